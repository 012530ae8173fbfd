"""Digests and keys of prefixes; the prefixes that the tree gained and lost, and the reasons of
losses. Digest: a 64-bit sum, fast, for routing. Key: BLAKE2b, for disks and other engines."""

from __future__ import annotations

import hashlib
import secrets
import sys
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from rootlace.runtime.cache.node import Node

# Digests ------------------------------------------------------------------------------------------


_MASK = 2**64 - 1
_BITS = 6
_NONE = np.empty(0, np.uint64)

TOLD_BLOCKS: tuple[int, ...] = (
    *range(1 << _BITS),
    *(count << shift for shift in range(1, 26) for count in range(1 << _BITS - 1, 1 << _BITS)),
)
"""Block counts of six significant bits: 0, 1, ... 63, 64, 66, ... 128, 132, ... 256, 264, ...

Routers are told of prefixes that end there. A cached prefix counts as at most 1/32 shorter, and a
prompt of 1,000 blocks has 190 such ends.
"""
_TOLD = np.array(TOLD_BLOCKS)


def told_blocks(first: int, last: int) -> np.ndarray:
    """int64: the `TOLD_BLOCKS` above `first`, up to `last`."""
    return _TOLD[bisect_right(TOLD_BLOCKS, first) : bisect_right(TOLD_BLOCKS, last)]


def most_blocks(blocks: int) -> int:
    """Return the longest prefix, in blocks, of which at most `blocks` blocks are told."""
    return TOLD_BLOCKS[bisect_right(TOLD_BLOCKS, blocks)] - 1


class PrefixDigests:
    """64-bit sums over a prefix's tokens, each times a random factor of its position.

    A digest depends on the tokens alone, whatever the cuts into nodes. All instances of a `key` use
    the same factors, so two processes agree. Prefixes of equal digest count as the same prefix,
    which every use must tolerate. Knowledge of the key allows collisions on purpose, so the key is
    secret where prompts come from strangers.
    """

    def __init__(self, key: bytes = b"") -> None:
        self._key = key
        self._factors = np.empty(0, np.uint64)

    def of_node(self, node: Node) -> int:
        """Return the digest of the tokens up to the end of `node`, cached as `Node.digest`. The
        cached digest spares the node's descendants the way up."""
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
        """Return the digest of a prefix of `start` tokens followed by `tokens` (int32)."""
        factors = self._upto(start + len(tokens))[start:]
        return (digest + int(np.dot(tokens.astype(np.uint64) + np.uint64(1), factors))) & _MASK

    def of_all(self, namespace: Hashable, tokens: np.ndarray) -> np.ndarray:
        """uint64 [len + 1]: digests of all prefixes of `tokens` (int32), the empty one included."""
        return self.behind(self._seed(namespace), tokens, 0)

    def reported(self, namespace: Hashable, tokens: np.ndarray, size: int) -> np.ndarray:
        """uint64: the digests of the prefixes of `tokens` (int32) of 1, 2, ... `TOLD_BLOCKS`."""
        ends = told_blocks(0, len(tokens) // size) * size
        digests: np.ndarray = self.of_all(namespace, tokens)[ends]
        return digests

    def behind(self, digest: int, tokens: np.ndarray, start: int) -> np.ndarray:
        """uint64 [len + 1]: the digests of a prefix followed by 0, 1, ... of `tokens` (int32).

        The prefix has `start` tokens and the digest `digest`.
        """
        factors = self._upto(start + len(tokens))[start:]
        products = np.empty(len(tokens) + 1, np.uint64)
        products[0] = digest
        products[1:] = tokens
        products[1:] += np.uint64(1)
        products[1:] *= factors
        return np.add.accumulate(products, out=products)

    def _seed(self, namespace: Hashable) -> int:
        return _hash(ascii(namespace).encode(), self._key)

    @cached_property
    def _random(self) -> np.random.Generator:
        # Only where a digest is asked for: an engine without replicas spares itself the import.
        return np.random.Generator(np.random.PCG64(_hash(b"factors", self._key)))

    def _upto(self, count: int) -> np.ndarray:
        """Return the factors of the first `count` positions."""
        missing = count - len(self._factors)
        if missing > 0:
            more = self._random.integers(2**64, size=max(missing, 1024), dtype=np.uint64)
            self._factors = np.concatenate((self._factors, more))
        return self._factors[:count]


def _hash(name: bytes, key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8, key=key).digest(), "little")


# Prefix keys --------------------------------------------------------------------------------------


KEY_BYTES = 16


def prefix_keys(space: bytes, tokens: np.ndarray, block_size: int, first: int = 0) -> list[bytes]:
    """Return the keys of the prefixes of `tokens` (int32) ending with block `first`, the next, ...

    Only full blocks have keys. A key is the BLAKE2b hash of the space and of all tokens of the
    prefix. Unlike with sums (`PrefixDigests`), no prompt can be made with the key of another prompt
    or space. Costs O(tokens) in C, and about 1 us for each key.
    """
    data = tokens.astype("<i4", copy=False).data.cast("B")
    step = 4 * block_size
    digest = hashlib.blake2b(data[: first * step], digest_size=KEY_BYTES, key=space)
    keys = []
    for at in range(first * step, len(data) - step + 1, step):
        digest.update(data[at : at + step])
        keys.append(digest.copy().digest())
    return keys


class LazyKeys:
    """The keys of `prefix_keys` on demand, the first 8 bytes of each as a number."""

    def __init__(self, space: bytes, tokens: np.ndarray, block_size: int) -> None:
        self._data = tokens.astype("<i4", copy=False).data.cast("B")
        self._step = 4 * block_size
        self._hashes = {0: hashlib.blake2b(digest_size=KEY_BYTES, key=space)}
        """Token bytes hashed -> hash state."""

    def item(self, at: int) -> int:
        """Return the key of the prefix that ends with block `at`."""
        end = (at + 1) * self._step
        if end not in self._hashes:
            start = max(known for known in self._hashes if known < end)
            longer = self._hashes[start].copy()
            longer.update(self._data[start:end])
            self._hashes[end] = longer
        return int.from_bytes(self._hashes[end].digest()[:8], sys.byteorder)


# Journal ------------------------------------------------------------------------------------------


class Change(msgspec.Struct, frozen=True):
    """Digests (uint64) of prefixes added since the last change, and of prefixes removed.

    `fresh`: all earlier changes are void. `blocks`: count of full blocks in the tree; None:
    unchanged.
    """

    added: np.ndarray
    removed: np.ndarray
    fresh: bool = False
    blocks: int | None = None


class Journal:
    """Collects changes of a tree until `take`.

    Only prefixes of `TOLD_BLOCKS` full blocks are told. A tree that holds a prefix holds all
    shorter ones.
    """

    def __init__(self, block_size: int, digests: PrefixDigests) -> None:
        self._block_size = block_size
        self._digests = digests
        self._held: dict[int, bool] = {}
        """Changed digest -> whether the tree holds the prefix now."""
        self._blocks = 0
        """Count of full blocks in the tree."""
        self._fresh = True

    def added(self, parent: Node, tokens: np.ndarray) -> None:
        """Note `tokens` added behind the end of `parent`."""
        self._note(parent, tokens, parent.end, True)

    def removed(self, leaf: Node, end: int) -> None:
        """Note that `leaf` is about to lose its tokens from position `end` on."""
        assert leaf.parent is not None
        self._note(leaf.parent, leaf.tokens, max(end, leaf.start), False)

    @property
    def changed(self) -> bool:
        """Whether there are changes to take; a count of blocks alone waits for the next digest."""
        return self._fresh or bool(self._held)

    def reset(self) -> None:
        """Note that all prefixes were lost."""
        self._held.clear()
        self._blocks = 0
        self._fresh = True

    def take(self) -> Change:
        """Changes since the last call."""
        held, fresh = self._held, self._fresh
        self._held, self._fresh = {}, False
        return Change(
            _array(digest for digest, is_held in held.items() if is_held),
            _array(digest for digest, is_held in held.items() if not is_held and not fresh),
            fresh,
            self._blocks,
        )

    def snapshot(self, roots: Iterable[Node]) -> Change:
        """Return all prefixes in the tree, for a listener that missed a change."""
        digests = [_NONE]
        nodes = list(roots)
        for node in nodes:  # the list grows meanwhile
            nodes.extend(node.children.values())
            if node.parent is not None:
                digests.append(self._bounds(node.parent, node.tokens, node.start))
        self._held.clear()
        self._fresh = False
        return Change(np.concatenate(digests), _NONE, True, self._blocks)

    def _note(self, parent: Node, tokens: np.ndarray, start: int, held: bool) -> None:
        end, size = parent.end + len(tokens), self._block_size
        blocks = end // size - start // size
        self._blocks += blocks if held else -blocks
        for digest in self._bounds(parent, tokens, start).tolist():
            self._held[digest] = held

    def _bounds(self, parent: Node, tokens: np.ndarray, start: int) -> np.ndarray:
        """Told digests behind position `start`, of `tokens` behind `parent`."""
        size = self._block_size
        ends = told_blocks(start // size, (parent.end + len(tokens)) // size) * size
        if not len(ends):
            return _NONE
        before = self._digests.of_node(parent)
        return self._digests.behind(before, tokens, parent.end)[ends - parent.end]


def _array(digests: Iterable[int]) -> np.ndarray:
    return np.fromiter(digests, np.uint64)


# Evictions, which explain a cache miss ------------------------------------------------------------


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


class Eviction(msgspec.Struct, frozen=True, eq=False):
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
        records = self._index[key]
        records.remove(record)
        if not records:
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
