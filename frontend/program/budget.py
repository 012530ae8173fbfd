"""A budget: how long a run may take, and how many tokens it may generate."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import msgspec

from rootlace.wire.errors import BudgetExceeded, DeadlineExceeded, InvalidRequest
from rootlace.wire.protocol import Generated, SamplingParams
from rootlace.wire.sampling import Handling


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

    def bounded(self, params: SamplingParams) -> tuple[SamplingParams, Share | None]:
        """`params` within what is left of the tokens, and what is to be told of the outcome. Raises
        BudgetExceeded if nothing is left."""
        if self._spending is None:
            return params, None
        bounded = self._spending.bounded(params)
        return bounded, Share(self._spending, cut=bounded is not params)


@dataclass(frozen=True)
class Share:
    """What one generation takes of a budget; `cut`: it was given fewer tokens than it asked for."""

    spending: Spending
    cut: bool

    def spend(self, result: Generated) -> BudgetExceeded | None:
        """It has ended. The error that it ends with if that was too much."""
        told = sum(len(output.token_ids) for output in result.outputs)
        self.spending.add(told or result.usage.completion_tokens)  # other backends tell no ids
        short = self.cut and any(output.finish_reason == "length" for output in result.outputs)
        return self.spending.exceeded(short)

    def lose(self, tokens: int) -> None:
        """It failed or was cancelled, when there were so many tokens."""
        self.spending.add(tokens)


class Spending:
    """What a run has used of its tokens, forced ones and those of lost forks included: of what was
    cancelled, those that had come by then. They are counted when a generation has ended, so those
    that run side by side may each use what was left when they were asked for."""

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

    def add(self, tokens: int) -> None:
        with self._lock:
            self._used += tokens

    def exceeded(self, short: bool) -> BudgetExceeded | None:
        """The error of having used too much, or (`short`) of wanting more than was left."""
        return self._used_up() if short or self._used > self._tokens else None

    def _used_up(self) -> BudgetExceeded:
        return BudgetExceeded(
            f"the run's budget of {self._tokens} tokens is used up ({self._used} generated)"
        )
