"""The bodies that are being received, of which all together have so many bytes at most.

One alone is bounded, too, but each of thousands of connections may send a large one slowly.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.gateway.http.connections import owner_of
from rootlace.runtime.gateway.http.source import source
from rootlace.runtime.gateway.keys.account import caller, client_of
from rootlace.runtime.gateway.rare_log import RareLog
from rootlace.runtime.gateway.shares import kept_for_others
from rootlace.wire.errors import Overloaded

log = logging.getLogger(__name__)

LARGEST = 16
"""So many of the largest size may be received at once, unless the configuration says otherwise."""


class Receiving:
    """Those of one server. The last eighth is for clients that have less than the mean: a client is
    a key or, without one, an address (of IPv6, a /64)."""

    def __init__(self, config: GatewayConfig) -> None:
        self._most = config.max_receiving_bytes or LARGEST * config.max_body_bytes
        self._taken = 0
        self._of: Counter[str] = Counter()
        self._rare = RareLog(log)

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """What is called in the block with how many bytes more have come of one body; it raises
        Overloaded where there is no room for them."""
        client = client_of(caller(), owner_of(source()))
        come = 0

        def take(more: int) -> None:
            nonlocal come
            own, owners = self._of.get(client, 0), len(self._of)
            full = self._taken + more > self._most
            alone = self._taken == come  # has its own bound, and would never find more room
            kept = kept_for_others(own, owners, self._taken, self._most, more)
            if not alone and (full or kept):
                self._rare.warn(
                    "bodies of %d bytes are being received: one is refused", self._taken
                )
                raise Overloaded("the server is receiving too many large bodies; try again")
            come += more
            self._taken += more
            self._of[client] += more

        try:
            yield take
        finally:
            self._taken -= come
            self._of[client] -= come
            if not self._of[client]:
                del self._of[client]


RECEIVING = web.AppKey("receiving", Receiving)
