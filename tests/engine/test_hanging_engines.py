"""Engines that hang, and those that end when nobody waits for them any more."""

import asyncio
import math
from collections.abc import Callable

import pytest

from rootlace.runtime.config import EngineConfig
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
        (lambda nap: min(nap, 5), -1.0, 85, 4.0),
        (lambda nap: min(nap, 5), -1.0, 605, 40.0),
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
    engine, taken = engine_client.Pulse(engine_client.LATE_SECONDS, start), 0

    async def nap(seconds: float) -> None:
        nonlocal taken
        taken += 1
        if taken == 10_000:
            raise Asleep
        if (turns := heard(taken)) is not None:
            engine.note(Heartbeat(turns, step))

    monkeypatch.setattr(engine_client.asyncio, "sleep", nap)
    if naps is None:
        with pytest.raises(Asleep):
            await engine.lost()
    else:
        assert await engine.lost()
        assert taken == naps


class EndsTooLate:
    """A process that ends when it was waited for long enough, but is not killed yet."""

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
