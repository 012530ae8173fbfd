"""Choice among several continuations of a state. Continuations are forks, so they share the
computed prefix: ten samples compute only the tokens that they add."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rootlace.language.expressions import Appendable, Chain, Expression, Gen, items
from rootlace.language.failures import ProgramError
from rootlace.language.state import AsyncProgramState, State
from rootlace.language.variables import Awaited, Pending
from rootlace.wire.errors import InvalidRequest

Step = Appendable | Callable[[Any], object]
"""Continuation of a fork: an expression, or a function that appends to the fork."""


@dataclass(frozen=True)
class _Wait:
    """Request of a plan to wait until at least one of `pending` is over."""

    pending: Sequence[Pending]


Plan = Generator[Any, Any, Any]
"""Generator of a decision's steps: yields a `_Wait`, or a value (awaited if it is awaitable) that
is sent back."""


def best_of(s: State, n: int, step: Step, *, key: Callable[[Any], Any] | None = None) -> Any:
    """Fork the state `n` times, append `step` to each, and go on as the best fork. Return its
    score.

    The score is `key(fork)`, or without a `key` the mean log-probability of the fork's generated
    tokens. Failed forks are ignored; raises the first failure if all forks fail. Await the call in
    `async def` programs; `key` may be a coroutine function there.
    """
    _check_forks("best_of()", n)
    if key is None:
        step, key = _with_likelihood(step)
    return _decide(s, f"best_of(s, {n}, ...)", _best_of(s, n, step, key))


def majority(
    s: State, n: int, step: Step, name: str, *, key: Callable[[Any], Any] | None = None
) -> Any:
    """Fork the state `n` times, append `step` to each, and go on as a fork with the most frequent
    value. Return the value of the variable `name`.

    `key(value)`, a text without white space for example, is compared and returned instead of the
    value. The running forks are cancelled as soon as no other value can win. Failed forks have no
    vote; raises the first failure if all forks fail. Await the call in `async def` programs.
    """
    _check_forks("majority()", n)
    return _decide(s, f"majority(s, {n}, ...)", _majority(s, n, step, name, key or _itself))


def beam(
    s: State,
    step: Step,
    *,
    key: Callable[[Any], Any],
    depth: int,
    width: int = 2,
    branches: int = 2,
) -> Any:
    """Search in `depth` steps, and go on as the best fork of the last step. Return its `key(fork)`.

    Each step forks every kept state `branches` times, appends `step`, and keeps the best `width`
    forks. Failed forks are ignored. Await the call in `async def` programs; `key` may be a
    coroutine function there. Raises InvalidRequest if a number is below 1.
    """
    if depth < 1 or width < 1:
        raise InvalidRequest("beam() needs a depth and a width of at least 1")
    _check_forks("beam()", branches)
    return _decide(s, "beam(s, ...)", _beam(s, step, depth, width, branches, key))


def _check_forks(caller: str, n: int) -> None:
    if n < 1:
        raise InvalidRequest(f"{caller} needs at least 1 fork, not {n}")


# ---------------------------------------------------------------- plans


def _best_of(s: State, n: int, step: Step, key: Callable[[Any], Any]) -> Plan:
    forks = yield from _grow(s, n, step)
    scored = yield from _scored(forks, key)
    score, best = scored[0]
    s.branch.become(best.branch)
    return score


def _beam(
    s: State, step: Step, depth: int, width: int, branches: int, key: Callable[[Any], Any]
) -> Plan:
    front = [s]
    scored: list[tuple[Any, State]] = []
    for _ in range(depth):
        forks = []
        for state in front:
            forks += yield from _grow(state, branches, step)
        scored = yield from _scored(forks, key)
        for _, lost in scored[width:]:
            lost.branch.drop()
        scored = scored[:width]
        front = [state for _, state in scored]
    score, best = scored[0]
    s.branch.become(best.branch)
    return score


def _scored(forks: Sequence[State], key: Callable[[Any], Any]) -> Plan:
    """Return pairs (score, fork) of the forks that did not fail, best first."""
    scored = []
    failures = []
    for fork in forks:
        while waiting := _unfinished(fork):
            yield _Wait(waiting)
        error = fork.branch.error()
        if error is not None:
            failures.append(error)
            continue
        scored.append(((yield key(fork)), fork))
    if not scored:
        raise failures[0]
    return sorted(scored, key=lambda pair: pair[0], reverse=True)


def _majority(s: State, n: int, step: Step, name: str, key: Callable[[Any], Any]) -> Plan:
    running = yield from _grow(s, n, step)
    values: list[Any] = []  # compared by ==: lists and most dataclasses have no hash
    voters: list[State] = []  # the first fork of each value
    votes: list[int] = []
    failure: ProgramError | None = None
    while running and not _decided(votes, len(running)):
        done = [fork for fork in running if not _unfinished(fork)]
        if not done:
            yield _Wait([pending for fork in running for pending in _unfinished(fork)])
        for fork in done:
            running.remove(fork)
            try:
                value = key(fork.branch.find(name).get())
            except ProgramError as error:
                failure = failure or error
                continue
            if value not in values:
                values.append(value)
                voters.append(fork)
                votes.append(0)
            votes[values.index(value)] += 1
    for fork in running:
        fork.branch.drop()
    if not votes:
        assert failure is not None
        raise failure
    winner = votes.index(max(votes))  # the first of those that have as many
    s.branch.become(voters[winner].branch)
    return values[winner]


def _decided(votes: Sequence[int], left: int) -> bool:
    """Return whether no other value can reach the votes of the first, with `left` votes open."""
    most, next_most = sorted((*votes, 0, 0), reverse=True)[:2]
    return most > next_most + left


def _grow(s: State, n: int, step: Step) -> Plan:
    """Fork the state `n` times and append `step` to each. Fork i adds i to each `seed`, like sample
    i of `gen(n=...)` (with n samples, i times n); forks of forks are numbered through."""
    forks = list(s.fork(n))
    for index, fork in enumerate(forks):
        fork.branch.seed_offset = s.branch.seed_offset * n + index
        if isinstance(step, (str, Expression)):
            fork.append(step)
        else:
            yield step(fork)
    return forks


def _unfinished(fork: State) -> list[Pending]:
    return [pending for pending in fork.branch.pending() if not pending.done]


def _itself(value: Any) -> Any:
    return value


# ---------------------------------------------------------------- likelihood


def _with_likelihood(step: Step) -> tuple[Step, Callable[[State], float]]:
    """Return `step` with log-probabilities requested, and a function for a fork's mean
    log-probability."""
    parts = items(step) if isinstance(step, Expression) else ()
    names = [item.name for item in parts if isinstance(item, Gen)]
    if not names or None in names:
        raise TypeError("without a key, the step must be an expression with a gen that has a name")
    telling = [
        replace(item, options={**item.options, "logprobs": True}) if isinstance(item, Gen) else item
        for item in parts
    ]

    def likelihood(fork: State) -> float:
        metas = [fork.branch.variables[name].meta() for name in names if name is not None]
        firsts = [meta[0] if isinstance(meta, list) else meta for meta in metas]
        found = [token[0] for meta in firsts for token in meta["output_token_logprobs"]]
        return sum(found) / len(found) if found else float("-inf")

    return Chain(tuple(telling)), likelihood


# ---------------------------------------------------------------- running a plan


def _decide(s: State, what: str, plan: Plan) -> Any:
    if isinstance(s, AsyncProgramState):
        return Awaited(what, lambda: _run_async(s, plan))
    return _run(s, plan)


def _run(s: State, plan: Plan) -> Any:
    answer = None
    while True:
        try:
            wish = plan.send(answer)
        except StopIteration as end:
            return end.value
        answer = wish
        if isinstance(wish, _Wait):
            s.branch.wait_for_any(wish.pending)


async def _run_async(s: State, plan: Plan) -> Any:
    if inspect.getgeneratorstate(plan) != inspect.GEN_CREATED:
        raise InvalidRequest("a choice among continuations is made once: it was awaited before")
    answer = None
    while True:
        try:
            asked = plan.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(asked, _Wait):
            await s.branch.wait_for_any_async(asked.pending)
            answer = None
        else:
            answer = await asked if inspect.isawaitable(asked) else asked
