"""What was evicted lately, and for whom: so that a miss can be explained."""

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
"""Evicted tokens that are remembered, four bytes each."""
MAX_RECORDS = 4096
_LOOKED_AT = 64


class Cause(NamedTuple):
    """Why blocks were freed: room for a request of `program` in `namespace`, a flush, or the end of
    the time that they had to live."""

    namespace: Hashable = ""
    program: str = ""
    flush: bool = False
    expired: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Eviction:
    """`tokens` stood at the positions from `start` on; `digest` is that of the tokens before."""

    start: int
    digest: int
    tokens: np.ndarray
    at: float
    cause: Cause


class Evicted:
    """The last evictions, found again by what stood before them.

    Two prefixes of equal digest (`PrefixDigests`) are taken for the same one, which can make an
    explanation wrong, and nothing else.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.cause = Cause()
        """On whose behalf the tree evicts now."""
        self._clock = clock
        self._records: deque[Eviction] = deque()
        self.digests = PrefixDigests(secrets.token_bytes(16))
        self._index: dict[tuple[int, int, int], list[Eviction]] = {}
        """By where they stood, the digest before, and their first token."""
        self._starts: Counter[int] = Counter()
        self._tokens = 0

    def note(self, leaf: Node, end: int) -> None:
        """`leaf` is about to lose its tokens from the position `end` on."""
        kept = end - leaf.start
        tokens = leaf.tokens[kept:].copy()
        assert leaf.parent is not None
        digest = self.digests.of_node(leaf.parent)
        if kept:
            digest = self.digests.extended(digest, leaf.tokens[:kept], leaf.start)
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
        """How far `tokens` (int32) would be known if nothing had been evicted of what is
        remembered, and the last eviction that took the first of those behind the `known` ones.

        Costs O(tokens), and a look at the last `_LOOKED_AT` records for each place where tokens
        like the prompt's own were evicted.
        """
        digests = self.digests.of_all(namespace, tokens)
        found = []
        for start in sorted(start for start in self._starts if start < len(tokens)):
            key = start, int(digests[start]), int(tokens[start])
            for record in self._index.get(key, ())[-_LOOKED_AT:]:
                common = min(len(record.tokens), len(tokens) - start)
                same = record.tokens[:common] == tokens[start : start + common]
                end = start + (common if same.all() else int(same.argmin()))
                if end > known:
                    found.append((start, end, record))
        took = [record for start, end, record in found if start <= known < end]
        if not took:
            return known, None
        reach = known
        for start, end, _ in found:  # by start
            if start <= reach:
                reach = max(reach, end)
        return reach, max(took, key=lambda record: record.at)

    def seconds_since(self, eviction: Eviction) -> float:
        return self._clock() - eviction.at

    def reset(self) -> None:
        """Everything was lost at once: there is nothing to say of single evictions."""
        self._records.clear()
        self._index.clear()
        self._starts.clear()
        self._tokens = 0

    def check(self, node: Node) -> None:
        """Raise AssertionError unless the digest that `node` remembers is right."""
        remembered, node.digest = node.digest, None
        if remembered is not None:
            assert self.digests.of_node(node) == remembered, f"{node} remembers a wrong digest"


def _key(start: int, digest: int, tokens: np.ndarray) -> tuple[int, int, int]:
    return start, digest, int(tokens[0])
