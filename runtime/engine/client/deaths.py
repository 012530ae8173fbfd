"""How often an engine died, and which of its deaths have a reason."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rootlace.wire.errors import ServerUnavailable

MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 300.0


@dataclass(eq=False)
class Death:
    """Of one engine, `at` this time. The requests that it had take it along, to whichever engine
    goes on with them: if one of them is found to kill engines, it is `explained`."""

    at: float
    explained: bool = False


class Deaths:
    """Of the engines that one client started."""

    def __init__(self) -> None:
        self.count = 0
        self._open: list[Death] = []
        """Those that nothing explains, as far as they are not long ago."""

    def note(self) -> Death:
        """An engine died."""
        death = Death(time.monotonic())
        self.count += 1
        self._open.append(death)
        return death

    def check(self, code: int | None) -> None:
        """Raises ServerUnavailable, with the `code` of the last one, if too many have no reason."""
        oldest = time.monotonic() - RESTART_WINDOW_SECONDS
        self._open = [one for one in self._open if not one.explained and one.at > oldest]
        if len(self._open) > MAX_RESTARTS:
            raise ServerUnavailable(f"the engine died {len(self._open)} times, last code {code}")
