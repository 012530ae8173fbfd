"""Names of prefixes that no two prefixes share, for what outlives a process or crosses a tenant."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

KEY_BYTES = 16


def prefix_keys(space: bytes, tokens: np.ndarray, block_size: int, first: int = 0) -> list[bytes]:
    """The keys of the prefixes of `tokens` (int32) that end with block `first`, the next one and so
    on, whole blocks only.

    BLAKE2b of the space and of all tokens of the prefix: unlike sums (`PrefixDigests`), nobody can
    make up a prompt that has the key of another one, or of another space. O(tokens) in C, and about
    1 us for each key.
    """
    data = tokens.astype("<i4", copy=False).data.cast("B")
    step = 4 * block_size
    digest = hashlib.blake2b(data[: first * step], digest_size=KEY_BYTES, key=space)
    found = []
    for at in range(first * step, len(data) - step + 1, step):
        digest.update(data[at : at + step])
        found.append(digest.copy().digest())
    return found


class LazyKeys:
    """What `prefix_keys` gives, of each the first 8 bytes as a number, when it is asked for."""

    def __init__(self, space: bytes, tokens: np.ndarray, block_size: int) -> None:
        self._data = tokens.astype("<i4", copy=False).data.cast("B")
        self._step = 4 * block_size
        self._hashes = {0: hashlib.blake2b(digest_size=KEY_BYTES, key=space)}
        """Of so many bytes."""

    def item(self, at: int) -> int:
        """The key of the prefix that ends with block `at`."""
        end = (at + 1) * self._step
        if end not in self._hashes:
            start = max(known for known in self._hashes if known < end)
            longer = self._hashes[start].copy()
            longer.update(self._data[start:end])
            self._hashes[end] = longer
        return int.from_bytes(self._hashes[end].digest()[:8], sys.byteorder)
