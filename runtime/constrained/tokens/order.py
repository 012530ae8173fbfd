"""The tokens of a vocabulary in the order of their bytes: which of them begin with given bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

import numpy as np


class TokenOrder:
    """Immutable; safe to share between threads. Tokens that stand for no bytes are not in it."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        order = sorted((data, token) for token, data in enumerate(token_bytes) if data)
        self._texts = [data for data, _ in order]
        self._tokens = np.array([token for _, token in order], np.int32)
        self._first = [bisect_left(self._texts, bytes([byte])) for byte in range(256)]
        self._first.append(len(order))

    def beginning_with(self, prefix: bytes) -> np.ndarray:
        """int32: the tokens whose bytes begin with `prefix`."""
        return self._tokens[slice(*self._range(prefix))]

    def going_on_with(self, prefix: bytes, following: Collection[int]) -> np.ndarray:
        """int32: the tokens that begin with `prefix` and one of the bytes `following`."""
        if not prefix:
            runs = [self._tokens[self._first[b] : self._first[b + 1]] for b in following]
            return np.concatenate(runs) if runs else np.zeros(0, np.int32)
        start, end = self._range(prefix)
        length = len(prefix)
        return self._tokens[
            [
                index
                for index in range(start, end)
                if len(self._texts[index]) > length and self._texts[index][length] in following
            ]
        ]

    def _range(self, prefix: bytes) -> tuple[int, int]:
        start = bisect_left(self._texts, prefix)
        return start, bisect_left(self._texts, bytes_after(prefix), start)


def bytes_after(prefix: bytes) -> bytes:
    """The least bytes behind all that begin with `prefix` (and are no longer than tokens are)."""
    prefix = prefix.rstrip(b"\xff")
    return prefix[:-1] + bytes((prefix[-1] + 1,)) if prefix else b"\xff" * 256
