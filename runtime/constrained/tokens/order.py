"""The tokens of a vocabulary in the order of their bytes: which of them begin with given bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np


class TokenOrder:
    """Immutable; safe to share between threads. Tokens that stand for no bytes are not in it."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        tokens = in_order(token_bytes)
        self._texts = [token_bytes[token] for token in tokens.tolist()]
        self._tokens = tokens

    def beginning_with(self, prefix: bytes) -> np.ndarray:
        """int32: the tokens whose bytes begin with `prefix`."""
        start = bisect_left(self._texts, prefix)
        return self._tokens[start : bisect_left(self._texts, bytes_after(prefix), start)]


def in_order(token_bytes: Sequence[bytes]) -> np.ndarray:
    """int32: the tokens that stand for bytes, by these. One sort of all, or one array of a list of
    all, would hold everybody up."""
    parts: dict[bytes, list[int]] = {}
    for token, data in enumerate(token_bytes):
        parts.setdefault(data[:2], []).append(token)
    parts.pop(b"", None)
    order = (i for part in sorted(parts) for i in sorted(parts[part], key=token_bytes.__getitem__))
    return np.fromiter(order, np.int32)


def bytes_after(prefix: bytes) -> bytes:
    """The least bytes behind all that begin with `prefix` (and are no longer than tokens are)."""
    prefix = prefix.rstrip(b"\xff")
    return prefix[:-1] + bytes((prefix[-1] + 1,)) if prefix else b"\xff" * 256
