"""Waiting sequences in lexicographic order of their prompts."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from rootlace.runtime.scheduler.sequence import Sequence

_KEY_TOKENS = 4096


class PromptOrder:
    """The depth-first order of the tree that the prompts form: neighbours share most.

    A change costs O(log n) comparisons of the prompts' first 4096 tokens.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[bytes, int]] = []
        self._key_of: dict[int, bytes] = {}
        self._cursor: tuple[bytes, int] = (b"", -1)

    def add(self, sequence: Sequence) -> None:
        key = key_of(sequence)
        self._key_of[sequence.number] = key
        insort(self._keys, (key, sequence.number))

    def remove(self, number: int) -> None:
        key = self._key_of.pop(number)
        del self._keys[bisect_left(self._keys, (key, number))]

    def go_to(self, number: int) -> None:
        """Let `following` continue from here."""
        self._cursor = (self._key_of[number], number)

    def following(self) -> int:
        """The number that comes next, wrapping around. The order must not be empty."""
        return self._keys[bisect_left(self._keys, self._cursor) % len(self._keys)][1]

    def neighbours(self, sequence: Sequence) -> tuple[Iterator[int], Iterator[int]]:
        """Numbers before and after `sequence` (which need not be here itself), nearest first. In
        both directions the shared prefix only gets shorter."""
        at = bisect_left(self._keys, (key_of(sequence), -1))
        before = (self._keys[i][1] for i in range(at - 1, -1, -1))
        behind = (self._keys[i][1] for i in range(at, len(self._keys)))
        return before, behind


def key_of(sequence: Sequence) -> bytes:
    """Bytes whose order is that of the prompts, token by token, within each namespace."""
    tokens = sequence.tokens[: min(sequence.length, _KEY_TOKENS)]
    request = sequence.request
    place = f"{request.adapter}\0{request.namespace}\0".encode()
    return place + tokens.astype(">i4").tobytes()
