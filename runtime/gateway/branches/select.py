"""One `Select`: every choice scored as a continuation of the branch, the best one appended.

Let l(c, i) be the log-probability of the i-th scored token of choice c after the branch and the
tokens before, and n(c) the number of scored tokens.

token_length_normalized
    score(c) = 1/n(c) * sum_i l(c, i); the largest wins.
greedy_token_selection
    The choices are compared as greedy decoding would among them: at each position only those with
    the largest log-probability stay. A choice that has ended takes part with its mean. The score
    reported is the mean.
unconditional_likelihood_normalized
    score(c) = 1/n(c) * sum_i (l(c, i) - u(c, i)), where u(c, i) is the log-probability of the same
    token when the scored tokens stand alone; u(c, 0), which nothing precedes, counts as 0.

The methods and their names are those of sglang's frontend. With a temperature T above 0 choice c is
drawn with probability proportional to exp(score(c) / T) instead. All choices are submitted
together, so the prefix they share is computed once.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.gateway.branches.branch import Branch
from rootlace.runtime.gateway.branches.core import Core
from rootlace.runtime.gateway.branches.growth import check_fits, settle
from rootlace.runtime.gateway.branches.requests import Requests
from rootlace.runtime.gateway.branches.sample import token_logprob
from rootlace.runtime.gateway.tokens.pieces import Piece
from rootlace.wire.errors import InternalError, InvalidRequest
from rootlace.wire.handling import Cache
from rootlace.wire.protocol import (
    ChoicesMethod,
    Event,
    SamplingParams,
    Select,
    Selected,
    Timing,
    TokenLogprob,
    Usage,
)

MAX_CHOICES = 4096

_random = random.SystemRandom()


class _Scored:
    """One prompt whose last tokens are scored: the tokens from `start` on."""

    def __init__(self, ids: list[int], start: int) -> None:
        self.ids = ids
        self.start = start
        self.logprobs: tuple[TokenLogprob, ...] = ()
        self.cached = 0
        self.queued = 0.0

    def values(self) -> list[float | None]:
        return [token.logprob for token in self.logprobs]


class Selection:
    """Runs one operation."""

    def __init__(self, core: Core, branch: Branch, op: Select) -> None:
        self._core = core
        self._branch = branch
        self._op = op

    async def run(self) -> Event:
        """The terminal event. Raises a typed error where the operation fails."""
        op, branch, started = self._op, self._branch, time.monotonic()
        self._check()
        await settle(self._core, branch)
        scored = await self._conditional()
        alone: list[_Scored] = []
        if op.method == "unconditional_likelihood_normalized":
            alone = [_Scored(s.ids[s.start :], 0) for s in scored]
        await self._score([*scored, *alone])
        best, scores = choose(op.method, [s.values() for s in scored], [s.values() for s in alone])
        if op.temperature > 0:
            best = draw(scores, op.temperature, _random.random())
        choice = op.choices[best]
        branch.state.begin = branch.state.begins
        branch.state.pending += (Piece(choice),)
        branch.state.gained.append(Piece(choice))
        # The prompt is that of all choices, and what one found another may have computed.
        prompt = scored[0].start
        usage = Usage(prompt_tokens=prompt, cached_tokens=min(prompt, *(s.cached for s in scored)))
        total = time.monotonic() - started
        return Selected(
            op.op,
            choice,
            best,
            tuple(scores),
            usage,
            tuple(s.logprobs for s in scored),
            Timing(max(s.queued for s in scored), total, total),
        )

    def _check(self) -> None:
        choices, temperature = self._op.choices, self._op.temperature
        if not 0 <= temperature < math.inf:
            raise InvalidRequest(f"select: temperature must be in [0, inf), not {temperature}")
        if not choices:
            raise InvalidRequest("select: there are no choices")
        if len(choices) > MAX_CHOICES:
            raise InvalidRequest(f"select: at most {MAX_CHOICES} choices, not {len(choices)}")
        for index, choice in enumerate(choices):
            if not choice:
                raise InvalidRequest(f"select: choice {index} is empty")

    async def _conditional(self) -> list[_Scored]:
        """The branch with each choice, tokenized jointly, and where they begin to differ."""
        state = self._branch.state
        length = (state.pending_length() + 1) * len(self._op.choices)
        length += sum(map(len, self._op.choices))
        base, joint = await self._core.tokenize(length, self._tokenize)
        common = min(_common_prefix(base, ids) for ids in joint)
        settled = state.ids.tolist()
        start = len(settled) + common
        for index, ids in enumerate(joint):
            if len(ids) == common:
                raise InvalidRequest(
                    f"select: choice {index} ({self._op.choices[index]!r}) adds no token"
                )
            check_fits(self._core, len(settled) + len(ids), room=0)
        return [_Scored(settled + ids, start) for ids in joint]

    def _tokenize(self) -> tuple[list[int], list[list[int]]]:
        state, encode = self._branch.state, self._core.tokenizer.encode_pieces
        base = encode(state.pending, state.previous, state.begins)
        joint = [
            encode((*state.pending, Piece(choice)), state.previous, state.begins)
            for choice in self._op.choices
        ]
        return base, joint

    async def _score(self, prompts: Sequence[_Scored]) -> None:
        branch, core = self._branch, self._core
        requests = Requests(core.engine, branch.account, branch.source)
        given = self._op.handling
        # A choice is no prompt to be pinned.
        cache = Cache() if given.cache.pin else given.cache
        handling = msgspec.structs.replace(given, cache=cache)
        for scored in prompts:
            params = SamplingParams(
                max_tokens=0, temperature=0.0, seed=0, prompt_logprobs_from=scored.start
            )
            requests.add(
                lambda rid, scored=scored, params=params: Request(  # type: ignore[misc]
                    rid,
                    np.array(scored.ids, np.int32),
                    params,
                    namespace=branch.namespace,
                    program=branch.program,
                    adapter=branch.adapter,
                    handling=handling,
                ),
                lambda update, scored=scored: self._take(scored, update),  # type: ignore[misc]
            )
        await requests.finish(branch.wait)
        for scored in prompts:
            if len(scored.logprobs) != len(scored.ids) - scored.start:
                raise InternalError(
                    f"select: {len(scored.ids) - scored.start} tokens to score, "
                    f"{len(scored.logprobs)} scored"
                )

    def _take(self, scored: _Scored, update: Update) -> None:
        if update.cached_tokens is not None:
            scored.cached = update.cached_tokens
        if update.queued is not None:
            scored.queued = update.queued
        if scores := update.prompt_token_scores():
            scored.logprobs = tuple(token_logprob(self._core.tokenizer, score) for score in scores)


def choose(
    method: ChoicesMethod,
    conditional: Sequence[Sequence[float | None]],
    unconditional: Sequence[Sequence[float | None]] = (),
) -> tuple[int, list[float]]:
    """The best choice and every choice's score, from log-probabilities per scored token.

    None (a token that nothing precedes) counts as 0. Of equals the first wins.
    """
    values = [[value or 0.0 for value in row] for row in conditional]
    if method == "unconditional_likelihood_normalized":
        alone = [[value or 0.0 for value in row] for row in unconditional]
        values = [
            [a - b for a, b in zip(row, base, strict=True)]
            for row, base in zip(values, alone, strict=True)
        ]
    scores = [math.fsum(row) / len(row) for row in values]
    if method == "greedy_token_selection":
        return _greedy(values, scores), scores
    return max(range(len(scores)), key=scores.__getitem__), scores


def draw(scores: Sequence[float], temperature: float, uniform: float) -> int:
    """The choice at `uniform` (in [0, 1)) of the cumulated softmax of scores / temperature."""
    largest = max(scores)
    weights = [math.exp((score - largest) / temperature) for score in scores]
    left = uniform * math.fsum(weights)
    for index, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return index
    return max(range(len(scores)), key=scores.__getitem__)


def _greedy(values: Sequence[Sequence[float]], means: Sequence[float]) -> int:
    left = list(range(len(values)))
    for position in range(max(map(len, values))):
        at = {c: values[c][position] if position < len(values[c]) else means[c] for c in left}
        largest = max(at.values())
        left = [c for c in left if at[c] == largest]
        if len(left) == 1:
            break
    return left[0]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
