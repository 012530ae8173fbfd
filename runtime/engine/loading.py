"""How much of a model's weights is read, told while it starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TextIO

WIDTH = 30
"""Characters of a bar."""
SECONDS = 2.0
"""Between two lines of a log."""

log = logging.getLogger(__name__)


def loading_bar(stream: TextIO) -> Callable[[str, float], None]:
    """Writes a bar of what is being done and the share of the weights that is read, over and over
    into one line of a terminal."""

    def tell(what: str, fraction: float) -> None:
        done = round(WIDTH * fraction)
        bar = "#" * done + "." * (WIDTH - done)
        end = "\n" if fraction >= 1 else ""
        stream.write(f"\rloading [{bar}] {fraction:4.0%} {what}\x1b[K{end}")
        stream.flush()

    return tell


def loading_log(clock: Callable[[], float] = time.monotonic) -> Callable[[str, float], None]:
    """The same for what is no terminal: a line of the log now and then, of a model that is read at
    once none."""
    told = clock()

    def tell(what: str, fraction: float) -> None:
        nonlocal told
        if clock() - told >= SECONDS:
            told = clock()
            log.info("loading weights: %.0f %% (%s)", 100 * fraction, what)

    return tell
