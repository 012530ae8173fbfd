"""The highest rate at which a server answers in time, found by offering rates."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from benchmarks.overload.goodput import Goodput

IN_TIME = 0.98
"""Of the requests of a rate that is sustained."""
CLOSE = 1.08
"""The search ends when the lowest rate that was not sustained is so much higher than the highest
one that was."""


async def sustainable(
    offer: Callable[[float], Awaitable[Goodput]], first: float, timeout: float
) -> tuple[float, list[Goodput]]:
    """Return the highest sustained rate, and the results of all offers.

    `offer` sends requests at a rate without waiting for answers: a client that waits would ask less
    of a slower server, and find a rate at which nothing queues. It should last for many timeouts:
    until then a queue may grow with all answers in time. So 99 % of the answers must also come
    within half of the timeout.
    """
    trials: list[Goodput] = []

    async def sustained(rate: float) -> bool:
        found = await offer(rate)
        trials.append(found)
        soon = found.answered_p99 <= timeout / 2
        return soon and found.good >= IN_TIME * found.offered

    low, high = 0.0, first
    while await sustained(high):
        low, high = high, 2 * high
    while not low:
        half = high / 2
        low, high = (half, high) if await sustained(half) else (0.0, half)
    while high > CLOSE * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if await sustained(middle) else (low, middle)
    return low, trials
