"""The prompts that an engine has pinned, for the next one to pin them again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.wire.errors import RootlaceError
from rootlace.wire.handling import PIN_SECONDS, PRIORITIES, Cache, Handling
from rootlace.wire.protocol import SamplingParams

log = logging.getLogger(__name__)

_COMPUTED = SamplingParams(max_tokens=0, temperature=0.0, seed=0)

MOST_TOKENS = 16 * 2**20
"""Of all prompts that are kept, four bytes each; beyond it, the oldest are not pinned again, but
count as lost if their engine dies."""


@dataclass
class _Pinned:
    request: Request
    until: float
    tokens: int
    again: int | None = None
    """The id of the request that pins it again."""

    @property
    def kept(self) -> bool:
        """Whether its tokens are still known."""
        return len(self.request.token_ids) == self.tokens


class PinnedPrompts:
    """Pins die with their engine, or with its KV where a step fails: they are computed again,
    behind all other work, and each is pinned for the time that it had left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pinned: dict[str, _Pinned] = {}
        self._tokens = 0
        self._let_go: set[int] = set()
        """Requests that were to pin again what was let go, until their last update: they may have
        done it before they could be aborted."""
        self.restored = self.lost = 0

    def note(self, pin: str, request: Request) -> None:
        """The engine has pinned the request's prompt, or has renewed the pin."""
        until = self._clock() + (request.handling.cache.ttl or PIN_SECONDS)
        known = self._pinned.get(pin)
        if request.rid in self._let_go or (known is not None and known.again == request.rid):
            return
        if known is not None:
            known.until = until = max(known.until, until)
            if known.kept or known.again is not None:
                return
            self._drop(pin)
        self._drop_old()
        self._pinned[pin] = _Pinned(request, until, len(request.token_ids))
        self._tokens += len(request.token_ids)
        for oldest in self._pinned.values():
            if self._tokens <= MOST_TOKENS:
                break
            self._tokens -= len(oldest.request.token_ids)
            none = np.empty(0, np.int32)
            oldest.request = msgspec.structs.replace(oldest.request, token_ids=none)

    def let_go(
        self, abort: Callable[[Iterable[int]], None], pin: str, namespace: str | None
    ) -> bool:
        """Whether there was such a pin of this namespace (None: of any). It is not pinned again,
        and a request that is to do that is aborted; an `Unpin` that the engine is sent after this
        finds what the request has done before."""
        self._drop_old()
        known = self._pinned.get(pin)
        if known is None or namespace not in (None, known.request.namespace):
            return False
        self._drop(pin)
        if known.again is not None:
            self._let_go.add(known.again)
            abort([known.again])
        return True

    def pin_again(self, next_rid: Callable[[], int], submit: Callable[..., None]) -> None:
        """Submit what pins again what an engine has lost; what cannot be submitted is lost."""
        for pin, request in self.again(next_rid):
            try:
                submit(request, partial(self.heard, pin), stays=True)
            except RootlaceError as error:
                self.lose(pin, str(error))

    def again(self, next_rid: Callable[[], int]) -> Iterator[tuple[str, Request]]:
        """What the next engine, or the one that has lost all KV, is to be sent, each with its pin.
        What had still to be pinned again waits for it anyway."""
        self._drop_old()
        for pin, known in list(self._pinned.items()):
            if known.again is not None:
                continue
            if not known.kept:
                self.lose(pin, f"of all prompts, {MOST_TOKENS} tokens are kept for that")
                continue
            known.again = next_rid()
            left = known.until - self._clock()
            yield (
                pin,
                Request(
                    known.again,
                    known.request.token_ids,
                    _COMPUTED,
                    namespace=known.request.namespace,
                    adapter=known.request.adapter,
                    handling=Handling(-PRIORITIES, cache=Cache(pin="try", ttl=left)),
                    resumed=True,
                    client=known.request.client,
                    max_pins=known.request.max_pins,
                ),
            )

    def heard(self, pin: str, update: Update) -> None:
        """What the engine tells of a request that pins again."""
        if update.finish is not None:
            self._let_go.discard(update.rid)
        known = self._pinned.get(pin)
        if known is None or known.again != update.rid:
            return
        if update.pin:
            known.again = None
            self.restored += 1
        elif update.finish is not None:
            self.lose(pin, update.error or "there is no room for it")

    def lose(self, pin: str, reason: str) -> None:
        """It cannot be pinned again."""
        tokens = self._drop(pin).tokens
        self.lost += 1
        log.warning("a pinned prompt of %d tokens is not pinned any more: %s", tokens, reason)

    def _drop_old(self) -> None:
        now = self._clock()
        for pin in [pin for pin, known in self._pinned.items() if known.until <= now]:
            self._drop(pin)

    def _drop(self, pin: str) -> _Pinned:
        known = self._pinned.pop(pin)
        self._tokens -= len(known.request.token_ids)
        return known
