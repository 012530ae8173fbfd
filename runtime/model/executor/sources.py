"""Rows that go on from a token of the step before, once that step's tokens are on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rootlace.runtime.contracts.plan import AutomatonState, SampleRow, StepPlan


def fed(plan: StepPlan, before: np.ndarray) -> StepPlan:
    """The plan with the tokens in place that its feeds name. before int32: the tokens that the plan
    launched before found; where it found none (-1) any token will do, its row has failed."""
    if not len(plan.feeds):
        return plan
    token_ids = plan.token_ids.copy()
    token_ids[plan.feeds[:, 0]] = np.maximum(before[plan.feeds[:, 1]], 0)
    return replace(plan, token_ids=token_ids)


def resolved(rows: Sequence[SampleRow], before: np.ndarray) -> Sequence[SampleRow]:
    """The rows without sources, and with masks in place of states of automata."""
    if all(row.source < 0 and row.automaton is None for row in rows):
        return rows
    return [_resolved(row, before) for row in rows]


def _resolved(row: SampleRow, before: np.ndarray) -> SampleRow:
    token_ids, mask, token = row.token_ids, row.mask, None
    if row.source >= 0:
        token = int(before[row.source])
        token_ids = np.append(token_ids, np.int32(token))
    if mask is None and row.automaton is not None:
        mask = _mask(row.automaton, token)
    return replace(row, token_ids=token_ids, mask=mask, source=-1, automaton=None)


def _mask(at: AutomatonState, token: int | None) -> np.ndarray:
    """int32 [words]: what may follow once the automaton has taken `token` (None: nothing)."""
    automaton, state = at.automaton, at.state
    if token is not None and state >= 0:
        known = 0 <= token < len(automaton.token_class)
        state = int(automaton.next_state[state, automaton.token_class[token]]) if known else -1
    if state < 0:
        return np.zeros(automaton.masks.shape[1], np.int32)
    mask: np.ndarray = automaton.masks[automaton.mask_of[state]]
    return mask
