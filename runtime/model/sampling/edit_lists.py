"""Biases, bans and penalties of a step's rows as lists in compressed rows (`LogitEdits`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rootlace.runtime.contracts.plan import SampleRow
from rootlace.runtime.model.sampling.seen_tokens import SeenTokens

Entries = tuple[np.ndarray, np.ndarray]
_NONE: Entries = (np.empty(0, np.int32), np.empty(0, np.float32))
_UNSEEN: Entries = (np.empty(0, np.int32), np.empty(0, np.int32))


class EditLists:
    """Makes these lists. Not thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._seen = SeenTokens(vocab_size)

    def biases(self, rows: Sequence[SampleRow], count: int, bans: bool) -> dict[str, np.ndarray]:
        """Biases, and bans if they are to be listed: for `count` rows, of which those behind the
        given ones have none. Ids outside the vocabulary are left out."""
        start, token, bias = _joined([self._biases(row, bans) for row in rows], count)
        return {"bias_start": start, "bias_token": token, "bias": bias}

    def seen(
        self, rows: Sequence[SampleRow], wanted: np.ndarray, count: int
    ) -> dict[str, np.ndarray]:
        """The tokens of those rows for which `wanted` is not 0, and how often each is in the
        output."""
        entries = [
            self._seen.count(row.params, row.token_ids, row.prompt_len) if penalised else _UNSEEN
            for row, penalised in zip(rows, wanted.tolist(), strict=False)
        ]
        start, token, seen = _joined(entries, count)
        return {"seen_start": start, "seen_token": token, "seen_count": seen}

    def _biases(self, row: SampleRow, bans: bool) -> Entries:
        entries = dict(row.params.logit_bias)
        if bans:
            entries.update(dict.fromkeys(row.banned, -np.inf))
        if not entries:
            return _NONE
        tokens = sorted(token for token in entries if 0 <= token < self._vocab_size)
        return np.array(tokens, np.int32), np.array([entries[t] for t in tokens], np.float32)


def _joined(entries: list[Entries], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start int32 [count + 1], tokens, values) of the rows' entries."""
    start = np.zeros(count + 1, np.int32)
    lengths = [len(tokens) for tokens, _ in entries]
    start[1 : len(entries) + 1] = np.cumsum(lengths)
    start[len(entries) + 1 :] = sum(lengths)
    tokens = np.concatenate([tokens for tokens, _ in entries])
    return start, tokens, np.concatenate([values for _, values in entries])
