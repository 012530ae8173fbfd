"""Recent evictions and their causes, which explain a cache miss."""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rootlace.runtime.cache.journal import PrefixDigests
from rootlace.runtime.cache.node import Node

MAX_TOKENS = 1 << 20
"""Evicted tokens remembered, four bytes each."""
MAX_RECORDS = 4096
_LOOKED_AT = 64


class Cause(NamedTuple):
    """Why blocks were freed.

    Causes: room for a request of `program` in `namespace`, a flush, or the end of a time to live.
    """

    namespace: Hashable = ""
    program: str = ""
    flush: bool = False
    expired: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Eviction:
    """Evicted `tokens` from position `start` on; `digest` is that of the tokens before."""

    start: int
    digest: int
    tokens: np.ndarray
    at: float
    cause: Cause


class Evicted:
    """The last evictions, found by the digest of the tokens before.

    Two prefixes of equal digest (`PrefixDigests`) count as the same, which can make an explanation
    wrong, and nothing else.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.cause = Cause()
        """The cause of current evictions."""
        self._clock = clock
        self._records: deque[Eviction] = deque()
        self.digests = PrefixDigests(secrets.token_bytes(16))
        self._index: dict[tuple[int, int, int], list[Eviction]] = {}
        """(position, digest before, first token) -> evictions."""
        self._starts: Counter[int] = Counter()
        self._tokens = 0

    def note(self, leaf: Node, end: int) -> None:
        """Note that `leaf` is about to lose its tokens from position `end` on."""
        remaining = end - leaf.start
        tokens = leaf.tokens[remaining:].copy()
        assert leaf.parent is not None
        digest = self.digests.of_node(leaf.parent)
        if remaining:
            digest = self.digests.extended(digest, leaf.tokens[:remaining], leaf.start)
        record = Eviction(end, digest, tokens, self._clock(), self.cause)
        self._records.append(record)
        self._index.setdefault(_key(end, digest, tokens), []).append(record)
        self._starts[end] += 1
        self._tokens += len(tokens)
        while self._tokens > MAX_TOKENS or len(self._records) > MAX_RECORDS:
            self._forget(self._records.popleft())

    def _forget(self, record: Eviction) -> None:
        self._tokens -= len(record.tokens)
        key = _key(record.start, record.digest, record.tokens)
        kept = self._index[key]
        kept.remove(record)
        if not kept:
            del self._index[key]
        self._starts[record.start] -= 1
        if not self._starts[record.start]:
            del self._starts[record.start]

    def beyond(
        self, namespace: Hashable, tokens: np.ndarray, known: int
    ) -> tuple[int, Eviction | None]:
        """Length of `tokens` (int32) matched without remembered evictions, and the decisive
        eviction.

        The decisive eviction is the last one that removed the first token behind the `known` ones.

        Costs O(tokens), and a look at the last `_LOOKED_AT` records for each position where tokens
        like the prompt's own were evicted.
        """
        digests = self.digests.of_all(namespace, tokens)
        overlapping = []
        for start in sorted(start for start in self._starts if start < len(tokens)):
            key = start, int(digests[start]), int(tokens[start])
            for record in self._index.get(key, ())[-_LOOKED_AT:]:
                common = min(len(record.tokens), len(tokens) - start)
                same = record.tokens[:common] == tokens[start : start + common]
                end = start + (common if same.all() else int(same.argmin()))
                if end > known:
                    overlapping.append((start, end, record))
        took = [record for start, end, record in overlapping if start <= known < end]
        if not took:
            return known, None
        reach = known
        for start, end, _ in overlapping:  # by start
            if start <= reach:
                reach = max(reach, end)
        return reach, max(took, key=lambda record: record.at)

    def seconds_since(self, eviction: Eviction) -> float:
        return self._clock() - eviction.at

    def reset(self) -> None:
        """Forget all evictions after everything was lost at once."""
        self._records.clear()
        self._index.clear()
        self._starts.clear()
        self._tokens = 0

    def check(self, node: Node) -> None:
        """Raise AssertionError unless the cached digest of `node` is right."""
        remembered, node.digest = node.digest, None
        if remembered is not None:
            assert self.digests.of_node(node) == remembered, f"{node} remembers a wrong digest"


def _key(start: int, digest: int, tokens: np.ndarray) -> tuple[int, int, int]:
    return start, digest, int(tokens[0])
