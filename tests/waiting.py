"""Waiting for what others do, without depending on how long it takes.

Patience is counted in naps, not by a clock: on a machine that stands still for a while, or is too
busy to give us our turn, none of it is used up.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds of naps before something counts as never happening."""
NAP = 0.005


def eventually(condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Returns as soon as `condition` holds; fails only when it never does."""
    for _ in range(int(patience / NAP)):
        if condition():
            return
        time.sleep(NAP)
    assert condition(), "it never happened"


async def until(condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    """`eventually`, while the event loop does other things."""
    for _ in range(int(patience / NAP)):
        if condition():
            return
        await asyncio.sleep(NAP)
    assert condition(), "it never happened"


def skip(seconds: float) -> None:
    """Have the running event loop find that `seconds` have passed: what is timed for then is next.

    So a deadline of an hour passes when a test says so, and never before, however slow the machine.
    """
    loop = asyncio.get_running_loop()
    time_until_now = loop.time
    loop.time = lambda: time_until_now() + seconds  # type: ignore[method-assign]


async def soon(awaitable: Awaitable[T], patience: float = PATIENCE) -> T:
    """The result of `awaitable`. Raises TimeoutError if it does not come."""
    future = asyncio.ensure_future(awaitable)
    try:
        for _ in range(int(patience / 0.1)):
            done, _ = await asyncio.wait({future}, timeout=0.1)
            if done:
                return future.result()
        raise TimeoutError("it never came")
    finally:
        future.cancel()
