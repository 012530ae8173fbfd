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
together, so the prefix they share is computed once. Tokens that several choices begin with are
scored once, with the first of these choices in the order of token ids.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest, Pooling
from rootlace.runtime.server.auth import Asker, namespace_of, private
from rootlace.runtime.server.generate import token_logprob
from rootlace.runtime.server.sequence import (
    NO_OUTPUT,
    Requests,
    TokenSequence,
    check_fits,
    check_text_fits,
    settle,
)
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.server_state import call_for, in_time
from rootlace.runtime.server.tokenizer import Piece, Tokenizer, common_prefix
from rootlace.wire.errors import InternalError, InvalidRequest
from rootlace.wire.protocol import (
    ChoicesMethod,
    Embed,
    Embedded,
    Part,
    RequestFacts,
    Select,
    Selected,
    Text,
    Timing,
    TokenLogprob,
    Tokens,
    Usage,
)
from rootlace.wire.sampling import PLAIN, Cache, Handling

# Vectors ------------------------------------------------------------------------------------------
#
# Vectors of texts: final hidden states before the model's head, or scores of labels.


Input = Sequence[Part]
"""Parts of one text; an input quotes no branch."""

KNOWN: dict[str, Pooling] = {"last": "last", "mean": "mean"}


@dataclass
class Vector:
    """Embedding of one input: `values` float32 [hidden size], or [labels] of a classifier."""

    values: np.ndarray
    prompt_tokens: int
    cached_tokens: int = 0


async def find_vectors(
    model: ServedModel,
    inputs: Sequence[Input],
    pooling: Pooling | None,
    *,
    normalise: bool = False,
    dimensions: int | None = None,
    namespace: str | None = "",
    adapter: str = "",
    asker: Asker | None = None,
    handling: Handling = PLAIN,
    names: Sequence[str] = (),
) -> tuple[list[Vector], Usage]:
    """Compute a vector for each input, and count the tokens of all.

    The inputs are computed in one batch with the engine's other work. Cancelling the caller ends
    them, and so does the timeout of `handling`. An input that ends with text is tokenized as a
    whole text, with the post-processor's tokens around. `namespace` is the name that `asker` uses.
    `pooling` None: the model's own. `dimensions` keeps the first numbers; `normalise` scales the
    kept ones to length 1. Raises the typed error of the first input that fails, named as in
    `names`.
    """
    model.check_adapter(adapter)
    asker, alone = asker or Asker.of(None, ""), not handling.cache.share
    namespace = namespace_of(asker.account, namespace)
    namespace = private(namespace) if alone else namespace
    sequence = TokenSequence(namespace, "", adapter, asker, private=alone)
    sequence.check_handling(handling)
    chosen = _own_pooling(model) if pooling is None else pooling
    vectors = [Vector(np.empty(0, np.float32), 0) for _ in inputs]
    requests = Requests(model.engine, asker)
    prompts = []
    for index, one in enumerate(inputs):
        try:
            prompts.append(await _prompt(model, one))
        except InvalidRequest as error:
            where = f"input[{index}]" if len(inputs) > 1 else "input"
            where = names[index] if names else where
            named = type(error)(f"{where}: {error}")
            named.param = where
            raise named from error
    for vector, prompt in zip(vectors, prompts, strict=True):
        vector.prompt_tokens = len(prompt)
        request = sequence.request(prompt, NO_OUTPUT, handling, pooling=chosen)
        requests.add(request, partial(_take_vectors, vector))
    try:
        async with in_time(handling.timeout):
            await requests.finish()
    finally:
        if alone:
            model.engine.forget_namespace(namespace)
    for vector in vectors:
        vector.values = vector.values[:dimensions]
        if normalise:
            length = float(np.sqrt(np.sum(np.square(vector.values, dtype=np.float64))))
            vector.values = (vector.values / (length or 1.0)).astype(np.float32)
    tokens = sum(one.prompt_tokens for one in vectors)
    return vectors, Usage(tokens, sum(one.cached_tokens for one in vectors))


def _own_pooling(model: ServedModel) -> Pooling:
    name = model.own_pooling
    if name in KNOWN:
        return KNOWN[name]
    raise InvalidRequest(f"the model's own pooling ({name}) is not supported; ask for last or mean")


def _take_vectors(vector: Vector, update: EngineOutput) -> None:
    if update.facts is not None:
        vector.cached_tokens = update.facts.cached_tokens
    if update.vector is not None:
        vector.values = update.vector


async def _prompt(model: ServedModel, parts: Input) -> np.ndarray:
    """Tokenize an input: int32 [tokens]. Raises InvalidRequest for an empty or invalid input."""
    length = sum(len(part.text) for part in parts if isinstance(part, Text))
    await check_text_fits(model, 0, length)
    ids = await model.tokenize(length, _ids, model, parts)
    if not ids:
        raise InvalidRequest("it is empty")
    check_fits(model, len(ids), outputs=0)
    vocabulary = model.model_info.vocab_size
    bad = next((one for one in ids if not 0 <= one < vocabulary), None)
    if bad is not None:
        raise InvalidRequest(f"{bad} is not a token id (the vocabulary has {vocabulary})")
    return np.array(ids, np.int32)


def _ids(model: ServedModel, parts: Input) -> list[int]:
    tokenizer = model.tokenizer
    ids: list[int] = []
    pieces: list[Piece] = []
    begins = bool(parts) and isinstance(parts[0], Text) and not parts[0].special
    for part in (*parts, Tokens(())):
        if isinstance(part, Text):
            pieces.append(Piece(part.text, part.special))
            continue
        if pieces:
            ids += tokenizer.encode_pieces(pieces, ids[-1] if ids else None, begins)
            pieces = []
        if not isinstance(part, Tokens):
            raise InvalidRequest("an input cannot quote a branch")
        ids += part.ids
    if ids and begins and isinstance(parts[-1], Text):
        ids += tokenizer.end_ids
    return ids


async def embed(model: ServedModel, op: Embed, asker: Asker) -> Embedded:
    """Answer an `Embed` of a session. Raises as `find_vectors` does."""
    vectors, usage = await find_vectors(
        model,
        [(one,) for one in op.inputs],
        op.pooling,
        normalise=op.normalise,
        namespace=op.namespace,
        asker=asker,
        adapter=op.adapter,
    )
    return Embedded(op.op, tuple(one.values.astype("<f4").tobytes() for one in vectors), usage)


# Select -------------------------------------------------------------------------------------------


MAX_CHOICES = 4096
MAX_CHARACTERS = 16 * 2**20
"""Most characters of all choices, each counted with the pending text before it."""
MAX_TOKENS = 16 * 2**20
"""Most tokens of all choices, each counted with the whole prompt: the size of the messages."""
MAX_SCORED = 2**18
"""Most tokens of all choices behind their common prefix."""

_random = random.SystemRandom()


@dataclass(eq=False)
class _Scored:
    """Prompt of a choice, int32, whose tokens from index `start` on count. The first `known` of
    them are scored with the choice before, in the order of token ids."""

    choice: int
    ids: np.ndarray
    start: int
    known: int
    scores: EngineOutput | None = None
    facts: RequestFacts = field(default_factory=RequestFacts)


class Selection:
    """Run of a `Select`."""

    def __init__(self, model: ServedModel, sequence: TokenSequence, op: Select) -> None:
        self._model = model
        self._sequence = sequence
        self._op = op

    async def run(self) -> Selected:
        """Compute the terminal event. Raises a typed error where the operation fails."""
        op, sequence, started = self._op, self._sequence, time.monotonic()
        self._check()
        await settle(self._model, sequence)
        scored = await self._conditional()
        alone: list[_Scored] = []
        if op.method == "unconditional_likelihood_normalized":
            alone = [_Scored(s.choice, s.ids[s.start :], 0, s.known) for s in scored]
        await self._score([*scored, *alone])
        rows = sum(len(s.ids) - s.start for s in scored)
        best, scores, logprobs = await call_for(rows, self._best, scored, alone)
        if op.temperature > 0:
            # The seed includes the position: two choices with one seed are drawn independently.
            seed = f"{op.seed} {scored[0].start}"
            numbers = _random if op.seed is None else random.Random(seed)
            best = draw(scores, op.temperature, numbers.random())
        choice = op.choices[best]
        sequence.state.begin = sequence.state.begin is not False
        sequence.state.pending += (Piece(choice),)
        sequence.state.gained.append(Piece(choice))
        # All choices share the prompt: one choice's request may find what another one computed.
        prompt = scored[0].start
        usage = Usage(
            prompt_tokens=prompt,
            cached_tokens=min(prompt, *(s.facts.cached_tokens for s in scored)),
        )
        total = time.monotonic() - started
        return Selected(
            op.op,
            choice,
            best,
            tuple(scores),
            usage,
            logprobs,
            Timing(max(s.facts.queued for s in scored), total, total),
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
                raise InvalidRequest(f"select: choice {index} is empty", f"choices[{index}]")

    async def _conditional(self) -> list[_Scored]:
        """Tokenize the branch with each choice, and find the first token where they differ. The
        choices are in the order of token ids."""
        state, choices = self._sequence.state, self._op.choices
        length = (state.pending_length() + 1) * len(choices) + sum(map(len, choices))
        _check_size(length, MAX_CHARACTERS, "characters, text that has no tokens yet included")
        return await self._model.tokenize(length, self._tokenize)

    def _tokenize(self) -> list[_Scored]:
        state, encode = self._sequence.state, self._model.tokenizer.encode_pieces
        base = encode(state.pending, *state.before)
        common, joint = len(base), list[list[int]]()
        for choice in self._op.choices:
            ids = encode((*state.pending, Piece(choice)), *state.before)
            common = min(common, common_prefix(base[:common], ids))
            joint.append(ids)
        settled = np.array(state.ids, np.int32)
        for index, length in enumerate(map(len, joint)):
            if length == common:
                choice = self._op.choices[index]
                raise InvalidRequest(
                    f"select: choice {index} ({choice!r}) adds no token", f"choices[{index}]"
                )
            check_fits(self._model, len(settled) + length, outputs=0)
        tokens = sum(map(len, joint))
        _check_size(tokens - common * len(joint), MAX_SCORED, "tokens to score")
        _check_size(tokens + len(settled) * len(joint), MAX_TOKENS, "tokens, each with the prompt")
        start, scored, last = len(settled) + common, list[_Scored](), list[int]()
        for own, at in sorted((ids[common:], at) for at, ids in enumerate(joint)):
            prompt = np.concatenate((settled, np.array(joint[at], np.int32)))
            scored.append(_Scored(at, prompt, start, common_prefix(last, own)))
            last = own
        return scored

    async def _score(self, prompts: Sequence[_Scored]) -> None:
        sequence, model = self._sequence, self._model
        requests = Requests(model.engine, sequence.asker)
        handling_given = self._op.handling
        # A choice is no prompt to be pinned.
        cache = Cache() if handling_given.cache.pin else handling_given.cache
        handling = msgspec.structs.replace(handling_given, cache=cache)

        def request(scored: _Scored) -> EngineRequest:
            first = scored.start + scored.known
            params = msgspec.structs.replace(NO_OUTPUT, prompt_logprobs_from=first)
            return sequence.request(scored.ids, params, handling)

        asked = ((request(scored), partial(_take, scored)) for scored in prompts)
        await requests.add_all(asked, sequence.wait)
        await requests.finish(sequence.wait)

    def _best(
        self, scored: Sequence[_Scored], alone: Sequence[_Scored]
    ) -> tuple[int, list[float], tuple[tuple[TokenLogprob, ...], ...]]:
        """Return the best choice, the scores of all, and the log-probabilities behind them."""
        tokenizer = self._model.tokenizer
        logprobs, by_itself = _logprobs(tokenizer, scored), _logprobs(tokenizer, alone)
        best, scores = choose(self._op.method, _values(logprobs), _values(by_itself))
        return best, scores, logprobs


def _logprobs(
    tokenizer: Tokenizer, scored: Sequence[_Scored]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Those of each choice. Raises InternalError where one is missing."""
    last: tuple[TokenLogprob, ...] = ()
    logprobs = [last] * len(scored)
    for one in scored:
        scores = [] if one.scores is None else one.scores.prompt_token_scores()
        last = (*last[: one.known], *(token_logprob(tokenizer, score) for score in scores))
        if len(last) != (count := len(one.ids) - one.start):
            raise InternalError(f"select: {count} tokens to score, {len(last)} scored")
        logprobs[one.choice] = last
    return tuple(logprobs)


def _take(scored: _Scored, update: EngineOutput) -> None:
    if update.facts is not None:
        scored.facts = update.facts
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
    """Return the best choice and every choice's score, from log-probabilities per scored token.

    None (a token that nothing precedes) counts as 0. Of equal scores the first wins.
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
    """Return the choice at `uniform`, in [0, 1), of the cumulated softmax(scores / temperature)."""
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
