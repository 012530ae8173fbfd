"""A budget: how many tokens a run may generate. (How long it may take is its `timeout`.)"""

from __future__ import annotations

import threading

import msgspec

from rootlace.wire.errors import BudgetExceeded, InvalidRequest
from rootlace.wire.protocol import Generated, SamplingParams


class Spending:
    """What a run has used of its tokens, forced ones and those of lost forks included. They are
    counted when a generation has ended, so those that run side by side may each use what was left
    when they were asked for."""

    def __init__(self, tokens: int) -> None:
        """Raises InvalidRequest for a budget of nothing."""
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise InvalidRequest(f"token_budget must be a number of tokens, not {tokens!r}")
        self._tokens = tokens
        self._used = 0
        self._lock = threading.Lock()

    def bounded(self, params: SamplingParams) -> SamplingParams:
        """`params` with what is left at most. Raises BudgetExceeded where that is nothing."""
        most = (self._tokens - self._used) // params.n
        if most <= 0:
            raise self._used_up()
        if params.max_tokens is not None and params.max_tokens <= most:
            return params
        least = min(params.min_tokens, most)
        return msgspec.structs.replace(params, max_tokens=most, min_tokens=least)

    def spend(self, result: Generated, cut: bool) -> BudgetExceeded | None:
        """Count a generation's tokens. The error that it ends with if that was too much; `cut`: it
        was given fewer than it asked for."""
        with self._lock:
            told = sum(len(output.token_ids) for output in result.outputs)
            self._used += told or result.usage.completion_tokens  # other backends tell no ids
        ended_early = cut and any(output.finish_reason == "length" for output in result.outputs)
        return self._used_up() if ended_early or self._used > self._tokens else None

    def _used_up(self) -> BudgetExceeded:
        return BudgetExceeded(
            f"the run's budget of {self._tokens} tokens is used up ({self._used} generated)"
        )
