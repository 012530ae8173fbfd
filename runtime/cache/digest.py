"""Digests of prefixes: the same for the same tokens, however a tree cuts them into nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

import numpy as np

from rootlace.runtime.cache.node import Node

_MASK = 2**64 - 1


class PrefixDigests:
    """Sums over a prefix's tokens, each times a random number of its position, in 64 bits.

    All instances of a `key` use the same numbers, so two processes agree. Two prefixes of equal
    digest are taken for the same one: whoever uses digests must bear that. Who knows the key can
    make such prefixes, so it is secret where prompts come from strangers.
    """

    def __init__(self, key: bytes = b"") -> None:
        self._key = key
        self._random = np.random.Generator(np.random.PCG64(_hash(b"factors", key)))
        self._factors = np.empty(0, np.uint64)
        self._sums: dict[int, np.ndarray] = {}

    def of_node(self, node: Node) -> int:
        """The digest of the tokens up to the end of `node`, which remembers it (`Node.digest`) and
        so spares its descendants the way up."""
        below = []
        while node.digest is None and node.parent is not None:
            below.append(node)
            node = node.parent
        digest = node.digest
        if digest is None:
            digest = node.digest = self._seed(node.namespace)
        for link in reversed(below):
            digest = link.digest = self.extended(digest, link.tokens, link.start)
        return digest

    def extended(self, digest: int, tokens: np.ndarray, start: int) -> int:
        """The digest of a prefix of `start` tokens and `tokens` (int32) behind them."""
        factors = self._upto(start + len(tokens))[start:]
        return (digest + int(np.dot(tokens.astype(np.uint64) + np.uint64(1), factors))) & _MASK

    def of_all(self, namespace: Hashable, tokens: np.ndarray) -> np.ndarray:
        """uint64 [len + 1]: the digests of all prefixes of `tokens` (int32), from none on."""
        return self.behind(self._seed(namespace), tokens, 0)

    def at_bounds(self, namespace: Hashable, tokens: np.ndarray, size: int) -> np.ndarray:
        """uint64 [len // size]: the digests of the prefixes of `tokens` (int32) that end with each
        block of `size`."""
        count = len(tokens) // size
        sums = tokens[: count * size].astype(np.uint64)
        sums *= self._upto(count * size)
        np.add.accumulate(sums, out=sums)
        # A token counts as one more than its number: `_ones` has that for all of them at once.
        found: np.ndarray = sums[size - 1 :: size] + self._ones(count, size)
        found += np.uint64(self._seed(namespace))
        return found

    def behind(self, digest: int, tokens: np.ndarray, start: int) -> np.ndarray:
        """uint64 [len + 1]: the digests of a prefix of `start` tokens, whose own is `digest`, with
        none, one and so on of `tokens` (int32) behind it."""
        factors = self._upto(start + len(tokens))[start:]
        found = np.empty(len(tokens) + 1, np.uint64)
        found[0] = digest
        found[1:] = (tokens.astype(np.uint64) + np.uint64(1)) * factors
        return np.cumsum(found, out=found)

    def _seed(self, namespace: Hashable) -> int:
        return _hash(ascii(namespace).encode(), self._key)

    def _ones(self, count: int, size: int) -> np.ndarray:
        """The sums of all factors before each of the first `count` bounds."""
        known = self._sums.get(size)
        if known is None or len(known) < count:
            factors = self._upto(max(count, 256) * size).reshape(-1, size)
            known = self._sums[size] = np.cumsum(factors.sum(axis=1))
        return known[:count]

    def _upto(self, count: int) -> np.ndarray:
        """The factors of the first `count` positions."""
        missing = count - len(self._factors)
        if missing > 0:
            more = self._random.integers(2**64, size=max(missing, 1024), dtype=np.uint64)
            self._factors = np.concatenate((self._factors, more))
        return self._factors[:count]


def _hash(name: bytes, key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8, key=key).digest(), "little")
