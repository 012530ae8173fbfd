"""What engines say of their caches, checked for what was lost on the way."""

from __future__ import annotations

from collections.abc import Callable

from rootlace.runtime.contracts.messages import CacheChanged

_PATIENCE = 64
"""So many changes may come before an engine is asked again for all that it holds."""


class Hearing:
    """Of one engine: passes changes on in their order. Where one is missing, nothing is passed on
    until the engine has said all that it holds, for which it is asked."""

    def __init__(self, ask: Callable[[], None], heard: Callable[[CacheChanged], None]) -> None:
        self._ask = ask
        self._heard = heard
        self._last = 0
        self._ignored = 0
        self.gaps = 0
        """How often something was missing."""

    def hear(self, message: CacheChanged) -> None:
        if not message.fresh and (self._ignored or message.number != self._last + 1):
            self.gaps += not self._ignored
            if self._ignored % _PATIENCE == 0:
                self._ask()
            self._ignored += 1
            return
        self._ignored = 0
        self._last = message.number
        self._heard(message)
