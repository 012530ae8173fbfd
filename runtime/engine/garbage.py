"""When the engine's process looks through all its memory for garbage."""

from __future__ import annotations

import gc

IDLE_AFTER = 10
"""Collections of the second generation, of some 7,000 objects each, before all is looked through at
an idle moment. It is Python's own number for any moment."""
BUSY_AFTER = 300
"""And where there has been no idle moment: it holds everybody, for some 0.3 µs an object. What has
come since the last time are 2 million objects at most, and little of it is garbage: requests and
constraints leave no circles (`tests/engine/test_garbage.py`)."""


def collect_when_idle() -> None:
    """From now on; what is here stays, and is not looked at again (0.1 s with a large vocabulary).
    `idle` is to be called where there is nothing else to do."""
    gc.collect()
    gc.freeze()
    first, second, _ = gc.get_threshold()
    gc.set_threshold(first, second, BUSY_AFTER)


def idle() -> bool:
    """Whether all was looked through, since it was time."""
    if gc.get_count()[2] < IDLE_AFTER:
        return False
    gc.collect()
    return True
