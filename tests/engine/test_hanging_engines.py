"""Engines that hang, and engines that end after the last wait for them."""

import asyncio
import contextlib
import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rootlace.runtime import processes
from rootlace.runtime.config import CacheConfig, EngineConfig
from rootlace.runtime.contracts.messages import Heartbeat
from rootlace.runtime.engine.client import child_engine, engine_client


class Asleep(Exception):
    """Enough naps were taken."""


@pytest.mark.parametrize(
    ("heard", "step", "naps", "start"),
    [
        (lambda nap: nap, -1.0, None, 1.0),
        (lambda nap: min(nap, 5), -1.0, 605, math.inf),
        (lambda nap: None, -1.0, 20, math.inf),
        # Among its first steps: what is known is how long its start took.
        (lambda nap: min(nap, 5), -1.0, 25, 0.5),
        (lambda nap: min(nap, 5), -1.0, 45, 10.0),
        (lambda nap: min(nap, 5), -1.0, 605, 400.0),
        # A rank hangs, say: the loop waits for it.
        (lambda nap: min(nap, 5), 0.3, 25, 1.0),
        (lambda nap: min(nap, 5), 0.0, 25, 1.0),
        # A step of a machine that is ten, or a hundred times slower.
        (lambda nap: min(nap, 5), 3.0, 65, 1.0),
        (lambda nap: min(nap, 5), 60.0, 1205, 1.0),
    ],
    ids=[
        *("goes on", "still", "silent", "first steps", "slow start", "slower start"),
        *("late", "no step", "slow", "slower"),
    ],
)
async def test_an_engine_hangs_that_is_silent_or_whose_loop_stands_still(
    heard: Callable[[int], int | None],
    step: float,
    naps: int | None,
    start: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An idle loop goes round, too: it may be idle for ever."""
    assert await _naps_until_lost(monkeypatch, heard, step, True, start) == naps


@pytest.mark.parametrize(
    ("step", "start", "naps"),
    [(-1.0, 4.0, 125), (-1.0, 10.0, 205), (-1.0, 40.0, 605), (0.25, 1.0, 125), (10.0, 1.0, 205)],
)
async def test_an_engine_without_ranks_may_read_weights_for_two_minutes(
    step: float, start: float, naps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = functools.partial(min, 5)
    assert await _naps_until_lost(monkeypatch, heard, step, False, start) == naps


async def _naps_until_lost(
    monkeypatch: pytest.MonkeyPatch,
    heard: Callable[[int], int | None],
    step: float,
    ranks: bool,
    start: float,
) -> int | None:
    """Seconds until the engine counts as lost; None if it never does."""
    engine, taken = engine_client.Pulse(ranks, start), 0

    async def nap(seconds: float) -> None:
        nonlocal taken
        taken += 1
        if taken == 10_000:
            raise Asleep
        if (turns := heard(taken)) is not None:
            engine.note(Heartbeat(turns, step))

    monkeypatch.setattr(engine_client.asyncio, "sleep", nap)
    with contextlib.suppress(Asleep):
        assert await engine.lost()
        return taken
    return None


class EndsTooLate:
    """Process that ends after the wait for it, before it is killed."""

    returncode = None
    stdin = None
    ended = False

    async def wait(self) -> int:
        if not self.ended:
            try:
                await asyncio.sleep(3600)
            finally:
                self.ended = True
        return 0

    def kill(self) -> None:
        raise ProcessLookupError  # as asyncio does of one that has ended


async def test_an_engine_that_ends_when_patience_does(monkeypatch: pytest.MonkeyPatch) -> None:
    late = EndsTooLate()
    monkeypatch.setattr(child_engine, "STOP_GRACE_SECONDS", 0.01)
    place = child_engine.Children(EngineConfig())
    engine = place.open(lambda message: None)
    monkeypatch.setattr(engine, "_process", late)
    await engine.end()
    assert late.ended
    engine.close()
    place.close()


def test_no_folder_stays_of_a_launcher_without_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def new_memory() -> int:
        raise OSError("too many open files")

    monkeypatch.setattr(processes, "new_memory", new_memory)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="too many open files"):
        child_engine.Children(EngineConfig(cache=CacheConfig(host_gb=1.0)))
    assert not list(tmp_path.iterdir())
