"""Requests that were sent, and prompts that are on their way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice

import numpy as np

_LOOKS = 64
"""So many prompts on their way are compared for each first block that they compute."""


@dataclass(slots=True, eq=False)
class Sent:
    """A request under way. `seconds`: of computing its prompt, until its first token is told."""

    replica: int
    seconds: float
    tokens: int
    digests: np.ndarray
    known: int
    """Of `digests`, how many others had computed, or were to compute."""
    at: float
    due: float
    """When its first token should be there, whoever was preferred to it."""
    begun: bool = False


class Coming:
    """Prompts that are not computed yet, by the first block that each computes: whoever shares more
    of a prompt than its replica held shares that block. So a prompt costs what one block does."""

    def __init__(self) -> None:
        self._first: dict[int, dict[Hashable, Sent]] = {}
        self._places: Counter[int] = Counter()
        """Where in prompts these blocks are, and how many of them."""

    def __len__(self) -> int:
        return len(self._first)

    def add(self, request: Hashable, sent: Sent) -> None:
        """What the replica did not hold of it is computed there."""
        if sent.known < len(sent.digests):
            first = sent.digests.item(sent.known)
            if first not in self._first:
                self._first[first] = {}
                self._places[sent.known] += 1
            self._first[first][request] = sent

    def remove(self, request: Hashable, sent: Sent) -> None:
        """It is computed, or will not be."""
        if sent.known < len(sent.digests):
            first = sent.digests.item(sent.known)
            there = self._first[first]
            del there[request]
            if not there:
                del self._first[first]
                self._places[sent.known] -= 1
                if not self._places[sent.known]:
                    del self._places[sent.known]

    def match(self, digests: np.ndarray) -> dict[int, int]:
        """How many of a prompt's `digests` (uint64, the shortest prefix first) each replica will
        have computed for others; replicas that compute none of it are left out."""
        found: dict[int, int] = {}
        places = [place for place in self._places if place < len(digests)]
        for first in filter(self._first.__contains__, digests[places].tolist()):
            for sent in islice(self._first[first].values(), _LOOKS):
                shorter = min(len(digests), len(sent.digests))
                # Prefixes: where two are equal, so are all before them.
                count = int(np.count_nonzero(digests[:shorter] == sent.digests[:shorter]))
                found[sent.replica] = max(count, found.get(sent.replica, 0))
        return found
