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
from functools import partial

import msgspec
import numpy as np

from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.gateway.branches.branch import Branch
from rootlace.runtime.gateway.branches.core import Core
from rootlace.runtime.gateway.branches.growth import check_fits, settle
from rootlace.runtime.gateway.branches.requests import Requests
from rootlace.runtime.gateway.branches.sample import token_logprob
from rootlace.runtime.gateway.large import call_for
from rootlace.runtime.gateway.tokens.pieces import Piece
from rootlace.runtime.gateway.tokens.tokenizer import Tokenizer
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
MAX_CHARACTERS = 16 * 2**20
"""Of all choices, each behind the text that may still become other tokens with it."""
MAX_TOKENS = 16 * 2**20
"""Of all choices, each with the whole prompt: what the engine is sent."""
MAX_SCORED = 2**18
"""Tokens of all choices behind what they have in common."""

_random = random.SystemRandom()


class _Scored:
    """One prompt, int32, whose last tokens are scored: the tokens from `start` on."""

    def __init__(self, ids: np.ndarray, start: int) -> None:
        self.ids = ids
        self.start = start
        self.scores: Update | None = None
        self.cached = 0
        self.queued = 0.0

    def logprobs(self, tokenizer: Tokenizer) -> tuple[TokenLogprob, ...]:
        """Raises InternalError where one is missing."""
        scores = [] if self.scores is None else self.scores.prompt_token_scores()
        if len(scores) != len(self.ids) - self.start:
            raise InternalError(
                f"select: {len(self.ids) - self.start} tokens to score, {len(scores)} scored"
            )
        return tuple(token_logprob(tokenizer, score) for score in scores)


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
        rows = sum(len(s.ids) - s.start for s in scored)
        best, scores, logprobs = await call_for(rows, self._best, scored, alone)
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
            logprobs,
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
        state, choices = self._branch.state, self._op.choices
        length = (state.pending_length() + 1) * len(choices) + sum(map(len, choices))
        _check_size(length, MAX_CHARACTERS, "characters, text that has no tokens yet included")
        return await self._core.tokenize(length, self._tokenize)

    def _tokenize(self) -> list[_Scored]:
        state, encode = self._branch.state, self._core.tokenizer.encode_pieces
        base = encode(state.pending, state.previous, state.begins)
        common, joint = len(base), []
        for choice in self._op.choices:
            ids = encode((*state.pending, Piece(choice)), state.previous, state.begins)
            common = min(common, _common_prefix(base[:common], ids))
            joint.append(np.array(ids, np.int32))
        settled = np.array(state.ids, np.int32)
        for index, length in enumerate(map(len, joint)):
            if length == common:
                choice = self._op.choices[index]
                raise InvalidRequest(f"select: choice {index} ({choice!r}) adds no token")
            check_fits(self._core, len(settled) + length, room=0)
        tokens = sum(map(len, joint))
        _check_size(tokens - common * len(joint), MAX_SCORED, "tokens to score")
        _check_size(tokens + len(settled) * len(joint), MAX_TOKENS, "tokens, each with the prompt")
        start = len(settled) + common
        return [_Scored(np.concatenate((settled, own)), start) for own in joint]

    async def _score(self, prompts: Sequence[_Scored]) -> None:
        branch, core = self._branch, self._core
        requests = Requests(core.engine, branch.account, branch.source)
        given = self._op.handling
        # A choice is no prompt to be pinned.
        cache = Cache() if given.cache.pin else given.cache
        handling = msgspec.structs.replace(given, cache=cache)

        def request(scored: _Scored, rid: int) -> Request:
            params = SamplingParams(
                max_tokens=0, temperature=0.0, seed=0, prompt_logprobs_from=scored.start
            )
            return Request(
                rid,
                scored.ids,
                params,
                namespace=branch.namespace,
                program=branch.program,
                adapter=branch.adapter,
                handling=handling,
            )

        asked = ((partial(request, scored), partial(_take, scored)) for scored in prompts)
        await requests.add_all(asked, branch.wait)
        await requests.finish(branch.wait)

    def _best(
        self, scored: Sequence[_Scored], alone: Sequence[_Scored]
    ) -> tuple[int, list[float], tuple[tuple[TokenLogprob, ...], ...]]:
        """The best choice, the scores of all, and the log-probabilities that they are made of."""
        tokenizer = self._core.tokenizer
        logprobs = tuple(one.logprobs(tokenizer) for one in scored)
        by_itself = [one.logprobs(tokenizer) for one in alone]
        best, scores = choose(self._op.method, _values(logprobs), _values(by_itself))
        return best, scores, logprobs


def _take(scored: _Scored, update: Update) -> None:
    if update.cached_tokens is not None:
        scored.cached = update.cached_tokens
    if update.queued is not None:
        scored.queued = update.queued
    if update.prompt_targets is not None:
        scored.scores = update


def _values(rows: Sequence[Sequence[TokenLogprob]]) -> list[list[float | None]]:
    return [[token.logprob for token in row] for row in rows]


def _check_size(size: int, most: int, what: str) -> None:
    if size > most:
        raise InvalidRequest(
            f"select: the choices are {size} {what}, at most {most} may be: ask for fewer at a time"
        )


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
    if a[:length] == b[:length]:
        return length
    return next((i for i in range(length) if a[i] != b[i]), length)
