"""Which tokens a sequence has, and how often in its output: what penalties ask at every step.

Counting a sequence anew takes as long as sorting it. Sequences grow, so counts are kept and what is
new is added; that they are still those of the same sequence is looked at every time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

MAX_SEQUENCES = 1024


@dataclass
class _Counted:
    owner: object
    tokens: np.ndarray  # int32, a copy
    prompt_len: int
    distinct: np.ndarray  # int32, ascending
    counts: np.ndarray  # int32


class SeenTokens:
    """Not thread-safe."""

    def __init__(self, vocab_size: int, max_sequences: int = MAX_SEQUENCES) -> None:
        self._vocab_size = vocab_size
        self._max_sequences = max_sequences
        self._known: OrderedDict[int, _Counted] = OrderedDict()

    def count(
        self, owner: object, token_ids: np.ndarray, prompt_len: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(distinct tokens of the vocabulary, ascending, how often each is behind `prompt_len`),
        int32. `owner`, an object of the sequence's own, is what it is known by."""
        known = self._known.get(id(owner))
        if known is None or not _begins(known, owner, token_ids, prompt_len):
            known = _Counted(owner, token_ids[:0].copy(), prompt_len, *(np.empty(0, np.int32),) * 2)
            self._known[id(owner)] = known
            if len(self._known) > self._max_sequences:
                self._known.popitem(last=False)
        self._known.move_to_end(id(owner))
        done = len(known.tokens)
        if len(token_ids) > done:
            self._add(known, token_ids[done:prompt_len], counted=False)
            self._add(known, token_ids[max(done, prompt_len) :], counted=True)
            known.tokens = token_ids.copy()
        return known.distinct, known.counts

    def _add(self, known: _Counted, tokens: np.ndarray, counted: bool) -> None:
        if not len(tokens):
            return
        fresh, counts = np.unique(tokens.astype(np.int32), return_counts=True)
        inside = (fresh >= 0) & (fresh < self._vocab_size)
        fresh, counts = fresh[inside], counts[inside].astype(np.int32) * np.int32(counted)
        place = np.searchsorted(known.distinct, fresh)
        there = np.zeros(len(fresh), bool)
        within = place < len(known.distinct)
        there[within] = known.distinct[place[within]] == fresh[within]
        # New arrays: the old ones may be on their way to the device.
        known.counts = known.counts.copy()
        known.counts[place[there]] += counts[there]
        known.distinct = np.insert(known.distinct, place[~there], fresh[~there])
        known.counts = np.insert(known.counts, place[~there], counts[~there])


def _begins(known: _Counted, owner: object, token_ids: np.ndarray, prompt_len: int) -> bool:
    """Whether the sequence begins with what was counted."""
    done = len(known.tokens)
    return (
        known.owner is owner
        and known.prompt_len == prompt_len
        and done <= len(token_ids)
        and np.array_equal(known.tokens, token_ids[:done])
    )
