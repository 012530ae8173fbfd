"""A budget: how long a run may take, and how many tokens it may generate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec

from rootlace.wire.errors import BudgetExceeded, DeadlineExceeded, InvalidRequest, RootlaceError
from rootlace.wire.handling import Handling
from rootlace.wire.protocol import Generated, SamplingParams

Spend = Callable[[Generated], RootlaceError | None] | None


class Budget:
    """What a run may use from now on: `timeout` seconds and `tokens`, each None for no bound."""

    def __init__(self, timeout: float | None, tokens: int | None) -> None:
        self._timeout = timeout
        self._deadline = time.monotonic() + (timeout or 0.0)
        self._spending = None if tokens is None else Spending(tokens)

    def in_time(self, handling: Handling) -> Handling:
        """With a timeout that ends with the run's. Raises DeadlineExceeded if that has passed."""
        if self._timeout is None:
            return handling
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"the run was not done within its timeout of {self._timeout:g} s"
            )
        timeout = left if handling.timeout is None else min(left, handling.timeout)
        return msgspec.structs.replace(handling, timeout=timeout)

    def bounded(self, params: SamplingParams) -> tuple[SamplingParams, Spend]:
        """`params` within what is left of the tokens, and what is to be told of the result. Raises
        BudgetExceeded if nothing is left."""
        if self._spending is None:
            return params, None
        bounded = self._spending.bounded(params)
        return bounded, partial(self._spending.spend, cut=bounded is not params)


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
