"""Biases, bans and penalties of a step's rows as lists in compressed rows (`LogitEdits`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rootlace.runtime.contracts.plan import SampleRow
from rootlace.runtime.model.sampling.seen_tokens import SeenTokens
from rootlace.wire.protocol import SamplingParams

Entries = tuple[np.ndarray, np.ndarray]
_NONE: Entries = (np.empty(0, np.int32), np.empty(0, np.float32))
_UNSEEN: Entries = (np.empty(0, np.int32), np.empty(0, np.int32))


class EditLists:
    """Makes them. Not thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._seen = SeenTokens(vocab_size)

    def wanted(self, params: SamplingParams) -> bool:
        """Whether rows with these parameters have entries, apart from bans."""
        return bool(params.logit_bias) or _has_penalties(params)

    def arrays(
        self, rows: Sequence[SampleRow], count: int, bans: bool = True
    ) -> dict[str, np.ndarray]:
        """The fields of `LogitEdits` that `rows` need, for `count` rows; those behind the given
        ones have no entries. Ids outside the vocabulary are left out; so are banned tokens unless
        `bans` says that they are wanted."""
        found: dict[str, np.ndarray] = {}
        if any(row.params.logit_bias or (bans and row.banned) for row in rows):
            start, token, bias = _joined([self._biases(row, bans) for row in rows], count)
            found |= {"bias_start": start, "bias_token": token, "bias": bias}
        if any(_has_penalties(row.params) for row in rows):
            start, token, seen = _joined([self._counted(row) for row in rows], count)
            found |= {"seen_start": start, "seen_token": token, "seen_count": seen}
            params = [row.params for row in rows]
            found["repetition"] = np.ones(count, np.float32)
            found["repetition"][: len(rows)] = [each.repetition_penalty for each in params]
            found["frequency"] = np.zeros(count)
            found["frequency"][: len(rows)] = [each.frequency_penalty for each in params]
            found["presence"] = np.zeros(count)
            found["presence"][: len(rows)] = [each.presence_penalty for each in params]
        return found

    def _biases(self, row: SampleRow, bans: bool) -> Entries:
        entries = dict(row.params.logit_bias)
        if bans:
            entries.update(dict.fromkeys(row.banned, -np.inf))
        if not entries:
            return _NONE
        tokens = sorted(token for token in entries if 0 <= token < self._vocab_size)
        return np.array(tokens, np.int32), np.array([entries[t] for t in tokens], np.float32)

    def _counted(self, row: SampleRow) -> Entries:
        if not _has_penalties(row.params):
            return _UNSEEN
        return self._seen.count(row.params, row.token_ids, row.prompt_len)


def _joined(entries: list[Entries], count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start int32 [count + 1], tokens, values) of the rows' entries."""
    start = np.zeros(count + 1, np.int32)
    lengths = [len(tokens) for tokens, _ in entries]
    start[1 : len(entries) + 1] = np.cumsum(lengths)
    start[len(entries) + 1 :] = sum(lengths)
    tokens = np.concatenate([tokens for tokens, _ in entries])
    return start, tokens, np.concatenate([values for _, values in entries])


def _has_penalties(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    )
