"""Programs notice only a pause when processes of a runtime with `state` are killed."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import psutil

import rootlace as rl
from tests.waiting import eventually


@rl.function
def story(s):
    """Run a streamed and seeded program with forks, a constraint, a choice and a join."""
    s += "Once upon a time there was"
    s += rl.gen("begin", max_tokens=60, temperature=0.9, seed=7, ignore_eos=True)
    forks = s.fork(3)
    for number, fork in enumerate(forks):
        fork += f" Number {number}:"
        fork += rl.gen("part", max_tokens=50, temperature=0.8, seed=number, ignore_eos=True)
        fork += rl.gen("name", regex="[A-Z][a-z]{20,30}", temperature=1.0, seed=number)
    s += " And then " + forks[0]["part"] + forks[2]["name"]
    s += rl.select("mood", [" happy", " sad"])
    s += rl.gen("end", max_tokens=50, temperature=0.0, stop="zzz", ignore_eos=True)
    s["forks"] = [(fork["part"], fork["name"]) for fork in forks]


def test_programs_go_on_as_if_nothing_had_been_killed(demo_model: Path, tmp_path: Path) -> None:
    """The disk is full for a while. Then the gateway, and with it its engine, is killed in the
    first stream, and the engine alone in the last."""
    folder, log = tmp_path / "state", tmp_path / "log"
    options = {
        "state": folder,
        "log_file": log,
        "dtype": "float32",
        "num_blocks": 1024,
        "threads": 1,
    }
    with rl.Runtime(demo_model, **options) as runtime:
        calm = story.run(backend=runtime)
        room = 2000 + log.stat().st_size  # less than the database needs
        assert room < (folder / "programs.sqlite-wal").stat().st_size
        before = resource.prlimit(runtime.pid, resource.RLIMIT_FSIZE, (room, -1))
        full = story.run(backend=runtime)
        assert full.text() == calm.text() and full["forks"] == calm["forks"]
        assert "programs are not kept any more" in log.read_text()
        resource.prlimit(runtime.pid, resource.RLIMIT_FSIZE, before)
        eventually(lambda: "programs are kept again" in log.read_text())
        killed = [runtime.pid]
        state = story.run(backend=runtime, stream=True)
        text = ""
        for piece in state.text_iter():
            text += piece
            if len(text) > 40 and len(killed) == 1:
                os.kill(killed[0], signal.SIGKILL)
                killed.append(0)
            elif len(text) > len(calm.text()) - 60 and len(killed) == 2:
                eventually(lambda: runtime.pid != killed[0])
                (engine,) = psutil.Process(runtime.pid).children()
                engine.kill()
                killed.append(engine.pid)
        assert len(killed) == 3
        assert text == state.text() == calm.text()
        assert state["forks"] == calm["forks"]
        assert state["mood"] == calm["mood"]
