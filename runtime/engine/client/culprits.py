"""Requests that were found to kill engines, by the client that sent them."""

from __future__ import annotations

import time
from collections.abc import Callable

from rootlace.wire.errors import ClientSuspended

MAX_CULPRITS = 3
WINDOW_SECONDS = 600.0


class Culprits:
    """Of all engines of a model. A client whose requests killed engines `MAX_CULPRITS` times within
    `WINDOW_SECONDS` is suspended until the first time was so long ago: each costs all others two
    restarts, and the next would only cost them more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: dict[str, list[float]] = {}
        """When some of each client were found."""

    def note(self, client: str) -> None:
        """A request of this client was found, or several at once."""
        self._forget_old()
        self._found.setdefault(client, []).append(self._clock())

    def refusal(self, client: str) -> ClientSuspended | None:
        """What its requests fail with, if it is suspended."""
        if client not in self._found:
            return None
        self._forget_old()
        found = self._found.get(client, [])
        if len(found) < MAX_CULPRITS:
            return None
        left = max(found[-MAX_CULPRITS] + WINDOW_SECONDS - self._clock(), 1.0)
        refusal = ClientSuspended(
            f"requests of this client ended the engine {len(found)} times within the last "
            f"{WINDOW_SECONDS / 60:.0f} minutes: it is suspended for {left:.0f} s"
        )
        refusal.retry_after = left
        return refusal

    def _forget_old(self) -> None:
        oldest = self._clock() - WINDOW_SECONDS
        late = {
            client: [at for at in found if at > oldest] for client, found in self._found.items()
        }
        self._found = {client: found for client, found in late.items() if found}
