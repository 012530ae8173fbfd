"""A gateway that is killed and started again with the same `state`: programs notice a pause."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rootlace as rl
from rootlace.runtime.config import GatewayConfig
from rootlace.wire.errors import ServerUnavailable
from tests.e2e.conftest import Server, engine_config


@rl.function
def story(s):
    """Streamed and seeded, forks, a constraint, a choice and a join."""
    s += "Once upon a time there was"
    s += rl.gen("begin", max_tokens=80, temperature=0.9, seed=7, ignore_eos=True)
    forks = s.fork(3)
    for number, fork in enumerate(forks):
        fork += f" Number {number}:"
        fork += rl.gen("part", max_tokens=70, temperature=0.8, seed=number, ignore_eos=True)
        fork += rl.gen("name", regex="[A-Z][a-z]{20,30}", temperature=1.0, seed=number)
    s += " And then " + forks[0]["part"] + forks[2]["name"]
    s += rl.select("mood", [" happy", " sad"])
    s += rl.gen("end", max_tokens=60, temperature=0.0, stop="zzz", ignore_eos=True)
    s["forks"] = [(fork["part"], fork["name"]) for fork in forks]


class Kept:
    """A gateway process on one address and one folder."""

    def __init__(self, model: Path, folder: Path, **options: Any) -> None:
        settings = {"state": str(folder / "state"), **options}
        address = f"ipc://{folder}/programs.sock"
        self._config = GatewayConfig(model=str(model), program_address=address, **settings)
        self._engine = engine_config(model)
        self.address = address
        self.start()

    def start(self) -> None:
        self.server = Server(self._config, self._engine)

    def kill(self) -> None:
        os.kill(self.server.process.pid, signal.SIGKILL)
        self.server.process.wait()


@pytest.fixture
def kept(demo_model: Path, tmp_path: Path) -> Iterator[Kept]:
    place = Kept(demo_model, tmp_path)
    yield place
    place.server.stop()


def followed(state: Any, on_text: Callable[[int], None]) -> str:
    """The text of a streaming program as it comes; `on_text` is told how long it is."""
    text = ""
    for piece in state.text_iter():
        text += piece
        on_text(len(text))
    return text


def test_programs_go_on_behind_a_killed_gateway_as_if_nothing_had_been(kept: Kept) -> None:
    """Killed in the stream, in the forks, and once the engine alone."""
    endpoint = rl.RuntimeEndpoint(kept.address)
    calm = story.run(backend=endpoint)
    due = [60, 250]

    def disturb(length: int) -> None:
        if due and length > due[0]:
            due.pop(0)
            if not due:
                os.kill(kept.server.engine().pid, signal.SIGKILL)
                return
            kept.kill()
            threading.Thread(target=kept.start).start()

    state = story.run(backend=endpoint, stream=True)
    text = followed(state, disturb)
    assert not due
    assert state.text() == calm.text()
    assert text == calm.text()
    assert state["forks"] == calm["forks"]
    assert state["mood"] == calm["mood"]
    assert endpoint.get_server_info()["branches"] == 0
    endpoint.close()


def test_a_runtime_starts_its_gateway_again(demo_model: Path, tmp_path: Path) -> None:
    with rl.Runtime(demo_model, state=tmp_path / "state", dtype="float32") as runtime:
        calm = story.run(backend=runtime)
        state = story.run(backend=runtime, stream=True)
        killed = runtime.pid
        pieces = state.text_iter()
        text = next(pieces)
        os.kill(killed, signal.SIGKILL)
        text += "".join(pieces)
        assert text == calm.text()
        assert runtime.pid != killed


def test_without_state_a_program_is_told_what_it_lost(demo_model: Path, tmp_path: Path) -> None:
    place = Kept(demo_model, tmp_path, state="")
    endpoint = rl.RuntimeEndpoint(place.address)
    state = story.run(backend=endpoint, stream=True)
    next(state.text_iter())
    place.kill()
    with pytest.raises(rl.ProgramError) as failed:
        state.text()
    assert isinstance(failed.value.__cause__, ServerUnavailable)
    endpoint.close()
