"""What happens often, in a log that stays short."""

from __future__ import annotations

import logging
import time

SECONDS = 60.0


class RareLog:
    """Logs one line a minute at most, with how often there was something to say."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next = 0.0
        self._times = 0

    def warn(self, text: str, *values: object) -> None:
        self._times += 1
        now = time.monotonic()
        if now >= self._next:
            said = f"{text} (%d times since this was last said)"
            self._log.warning(said, *values, self._times)
            self._next, self._times = now + SECONDS, 0
