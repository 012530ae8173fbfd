"""One `Generate`: n engine requests, their samples, and what becomes part of the branch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from rootlace.runtime.contracts.messages import (
    NO_TOKENS,
    EngineOutput,
    EngineRequest,
    ThoughtTokens,
)
from rootlace.runtime.server.cache_lint import with_texts
from rootlace.runtime.server.core import Core, Requests
from rootlace.runtime.server.sample import Sample, token_logprob
from rootlace.runtime.server.sequence import TokenSequence, check_fits, settle
from rootlace.runtime.server.server_state import call_for
from rootlace.runtime.server.session_log import GenerationLog
from rootlace.runtime.server.stops import searches_of
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.errors import InvalidRequest, RootlaceError, StateLost
from rootlace.wire.protocol import (
    DRAFT_SOURCES,
    Chunk,
    Event,
    Generate,
    Generated,
    RequestFacts,
    SamplingParams,
    Thoughts,
    Timing,
    TokenLogprob,
    Usage,
)
from rootlace.wire.sampling import with_defaults

# Bounds the cost per token of looking for stop strings.
MAX_STOP_LENGTH = 1024
MAX_PROMPT_LOGPROBS = 2**19
"""Alternatives included: the wire's encoder takes 40 ms for them, in which nothing else runs."""
# How many tokens the engine reports at a time where nobody streams and there is no stop string. If
# the engine dies, up to that many are lost and sampled again by the next one.
QUIET_TOKENS = 32
# The least time between two points of what is told of a generation's progress.
PROGRESS_SECONDS = 0.01
CHARACTERS_PER_TOKEN = 16
"""Of a prediction no more is looked at than so many for each token that the context may have."""


class Generation:
    """Runs one operation. The first sample continues the branch; sample i has seed + i."""

    def __init__(
        self,
        core: Core,
        sequence: TokenSequence,
        op: Generate,
        emit: Callable[[Event], None],
        log: GenerationLog | None = None,
    ) -> None:
        """`log` is told what the engine tells, and has what an earlier server was told."""
        self._log = log
        self._core = core
        self._sequence = sequence
        params = with_defaults(op.params, core.model_info.sampling)
        self._op = op if params is op.params else msgspec.structs.replace(op, params=params)
        self._emit = emit
        self._samples: list[Sample] = []
        self._prompt_scores: EngineOutput | None = None
        self._facts: RequestFacts | None = None
        self._tells = op.tell_cached
        self._prompt_tokens = 0
        self._accepted, self._rejected = [0] * len(DRAFT_SOURCES), [0] * len(DRAFT_SOURCES)
        """Tokens computed ahead, by source."""
        self._started = 0.0
        self._first_token: float | None = None
        self._progress: list[tuple[float, int]] = []

    async def run(self) -> Event:
        """The terminal event. Raises a typed error where the operation fails."""
        self._started = time.monotonic()
        spans = self._core.spans
        if spans is None:
            return await self._generate()
        ended: Generated | RootlaceError | None = None
        try:
            ended = await self._generate()
        except RootlaceError as error:
            ended = error
            raise
        finally:
            if ended is not None:
                model, program = self._core.model_info.name, self._sequence.program
                spans.generated(model, program, self._op, ended, self._timing())
        return ended

    async def _generate(self) -> Generated:
        core, sequence, op = self._core, self._sequence, self._op
        self._check()
        searches = await searches_of(op.params.stop_regex) if op.params.stop_regex else []
        await settle(core, sequence, everything=True)
        state = sequence.state
        if not state.ids:
            raise InvalidRequest("the prompt is empty: there is nothing to generate from", "prompt")
        prompt = state.prompt()
        self._prompt_tokens = len(prompt)
        rows = self._scored_rows(len(prompt))
        prediction = await self._predicted() if op.prediction else NO_TOKENS
        params = self._engine_params(len(state.ids))
        # The other samples of one prompt find what the first one computes.
        report = core.report_scope() if op.cache_report else ""
        thoughts = None if op.thoughts is None else self._thoughts(op.thoughts, state.ids[-1])
        self._samples = [
            Sample(index, core.tokenizer, state.ids, op.params, searches, thoughts)
            for index in range(op.params.n)
        ]
        if thoughts is not None and not (
            op.constraint is not None or thoughts.stops or thoughts.budget is not None
        ):
            thoughts = None  # they change nothing for the engine
        goes_on = self._log is not None and self._go_on(self._log)
        paid = len(state.ids) if goes_on else sequence.paid
        requests = Requests(core.engine, sequence.account, sequence.source, paid)
        sequence.stop = requests.stop
        sequence.paid = 0
        # Where a stop string may come, each token counts: the engine is to stop at once.
        stops = bool(op.params.stop or searches)
        emit_every = 1 if op.stream or stops else QUIET_TOKENS
        emit_seconds = core.config.stream_interval if op.stream and not stops else 0.0
        for sample in self._samples:
            if sample.finish is not None:
                continue
            own = _for_sample(params, sample.index)
            before = np.array(sample.token_ids, np.int32) if sample.token_ids else NO_TOKENS
            requests.add(
                lambda rid, own=own, before=before: EngineRequest(  # type: ignore[misc]
                    rid,
                    prompt,
                    own,
                    before,
                    op.constraint,
                    sequence.namespace,
                    sequence.program,
                    sequence.adapter,
                    emit_every=emit_every,
                    emit_seconds=emit_seconds,
                    report=report if own is params else "",
                    handling=op.handling,
                    resumed=goes_on,
                    prediction=prediction,
                    thoughts=thoughts,
                ),
                partial(self._take, sample),
            )
        scores: tuple[TokenLogprob, ...] = ()
        try:
            await requests.finish(sequence.wait)
            if self._prompt_scores is not None:
                scores = await call_for(rows, self._prompt_logprobs, self._prompt_scores)
        finally:
            sequence.stop = None
        generated = self._generated(prompt, scores)
        kept, rest = self._samples[0].kept()
        state.ids.extend(kept)
        state.pending = (Piece(rest),) if rest else ()
        if text := generated.outputs[0].text:
            state.gained.append(Piece(text))
        return generated

    def _thoughts(self, given: Thoughts, last: int) -> ThoughtTokens:
        """Those that the operation admits, behind the token `last`."""
        core = self._core
        begin, end, gap, then, close = (
            tuple(core.tokenizer.encode_pieces((Piece(text, True),), last)) if text else ()
            for text in (given.begin, given.end, given.gap, given.then, given.close)
        )
        return ThoughtTokens(
            end,
            begin,
            gap,
            then,
            close,
            given.budget,
            stops=tuple(set(self._op.params.stop_token_ids) - core.eos_ids),
            special=any(map(core.tokenizer.is_special, (*begin, *end))),
        )

    def _scored_rows(self, prompt: int) -> int:
        """How many log-probabilities of the prompt's tokens are asked for. Raises InvalidRequest
        for too many."""
        params = self._op.params
        if params.prompt_logprobs_from is None:
            return 0
        rows = (prompt - params.prompt_logprobs_from) * (1 + params.top_logprobs)
        if rows > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"{rows} log-probabilities of the prompt are more than {MAX_PROMPT_LOGPROBS}: begin"
                " later in it, or ask for fewer alternatives"
            )
        return rows

    def _prompt_logprobs(self, update: EngineOutput) -> tuple[TokenLogprob, ...]:
        tokenizer = self._core.tokenizer
        return tuple([token_logprob(tokenizer, one) for one in update.prompt_token_scores()])

    async def _predicted(self) -> np.ndarray:
        """The tokens of the predicted text, as many as any output may have."""
        core, most = self._core, self._core.model_info.context_length
        text = self._op.prediction[: CHARACTERS_PER_TOKEN * most]
        ids = await core.tokenize(len(text), core.tokenizer.encode_pieces, (Piece(text),))
        return np.array(ids[:most], np.int32)

    def _go_on(self, log: GenerationLog) -> bool:
        """Take what an earlier server was told, and send what the client does not have of it.
        False if that was nothing. Raises StateLost where the client has more."""
        before = log.before
        for index, update in before:
            self._feed(self._samples[index], update)
        for index, (characters, tokens) in log.progress.items():
            known = 0 <= index < len(self._samples)
            if not known or not self._samples[index].has(characters, tokens):
                raise StateLost("the client has more of this stream than the server: it was lost")
        if before and self._op.stream:
            for sample in self._samples:
                characters, tokens = log.progress.get(sample.index, (0, 0))
                self._tells = self._tells and not tokens
                sample.told(characters, tokens)
                if (chunk := sample.take_chunk(self._op.op)) is not None:
                    self._send(chunk)
        return bool(before)

    def _take(self, sample: Sample, update: EngineOutput) -> int | None:
        """Take one update. When the sample is complete: how many tokens came behind its end."""
        if self._log is not None:
            self._log.told(sample.index, update)
        before = len(sample.token_ids)
        chunk = self._feed(sample, update)
        if chunk is not None:
            (self._send if self._tells else self._emit)(chunk)
        if sample.finish is None:
            return None
        return len(update.token_ids) - (len(sample.token_ids) - before)

    def _take_facts(self, update: EngineOutput) -> None:
        """What the first update and the last one say of the request."""
        if update.facts is not None:
            self._facts = update.facts
        if update.prompt_targets is not None:
            # They come in one update, and again if the engine died and the request is replayed.
            self._prompt_scores = update

    def _send(self, chunk: Chunk) -> None:
        """Send a chunk; the first one says what was found of the prompt."""
        if self._tells and self._facts is not None:
            self._tells = False
            cached = self._facts.cached_tokens
            chunk = msgspec.structs.replace(
                chunk, cached_tokens=cached, prompt_tokens=self._prompt_tokens
            )
        self._emit(chunk)

    def _feed(self, sample: Sample, update: EngineOutput) -> Chunk | None:
        before = len(sample.token_ids)
        chunk = None
        if self._op.stream:
            chunk = sample.feed_chunk(update, self._op.op)
        else:
            sample.feed(update)
        if update.token_ids:
            now = self._core.last_token = time.monotonic()
            if self._first_token is None:
                self._first_token = now
            if sample.index == 0:
                # The first and the latest stay; those between are far enough apart to draw.
                told = self._progress
                if len(told) > 1 and told[-1][0] - told[-2][0] < PROGRESS_SECONDS:
                    told.pop()
                told.append((now - self._started, len(sample.token_ids)))
        if sample.index == 0 and (update.facts is not None or update.prompt_targets is not None):
            self._take_facts(update)
        if update.accepted or update.rejected:
            # A stop string may be found before the last of the tokens that came together.
            taken = len(sample.token_ids) - before
            for at, source in update.accepted:
                counts = self._accepted if at < taken else self._rejected
                counts[source] += 1
                if at < taken:
                    sample.drafted_at.append((before + at, source))
            for source, count in enumerate(update.rejected):
                self._rejected[source] += count
        return chunk

    def _engine_params(self, prompt: int) -> SamplingParams:
        """The parameters for the engine: no None where it needs a number, no stop strings."""
        given = self._op.params
        check_fits(self._core, prompt, room=0 if given.max_tokens == 0 else 1)
        room = self._core.max_prompt - prompt
        most = room if given.max_tokens is None else min(given.max_tokens, room)
        stops = set(given.stop_token_ids)
        if not given.ignore_eos:
            stops |= self._core.eos_ids
        first = given.prompt_logprobs_from
        if first is not None and first > prompt:
            raise InvalidRequest(
                f"log-probabilities are wanted from token {first} on "
                f"of a prompt of {prompt} tokens",
                "prompt_logprobs_from",
            )
        # No token is in a top_p of 0 by the sum of those before it, but the likeliest is to be.
        greedy = {"temperature": 0.0, "top_p": 1.0} if given.top_p == 0 else {}
        return msgspec.structs.replace(
            given,
            n=1,
            given=(),
            **greedy,
            max_tokens=most,
            min_tokens=min(given.min_tokens, most),
            stop=(),
            stop_regex=(),
            stop_token_ids=tuple(sorted(stops)),
            seed=secrets.randbits(63) if given.seed is None else given.seed,
            prompt_logprobs_from=first if first is not None and first < prompt else None,
        )

    def _check(self) -> None:
        vocabulary = self._core.model_info.vocab_size
        params = self._op.params
        for index, stop in enumerate(params.stop):
            if len(stop) > MAX_STOP_LENGTH:
                raise InvalidRequest(
                    f"stop[{index}] has {len(stop)} characters, at most {MAX_STOP_LENGTH} fit",
                    f"stop[{index}]",
                )
        for field, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocabulary:
                    raise InvalidRequest(
                        f"{field}: {token_id} is not a token id (the vocabulary has {vocabulary})"
                    )

    def _timing(self) -> Timing:
        """Until now. Where no token came, that is when the first one did."""
        total = time.monotonic() - self._started
        first = total if self._first_token is None else self._first_token - self._started
        queued = 0.0 if self._facts is None else self._facts.queued
        return Timing(queued, first, total, tuple(self._progress))

    def _generated(
        self, prompt: np.ndarray, prompt_logprobs: tuple[TokenLogprob, ...]
    ) -> Generated:
        outputs = tuple([sample.output() for sample in self._samples])
        timing, facts = self._timing(), self._facts or RequestFacts()
        drafts = dict(
            zip(DRAFT_SOURCES, zip(self._accepted, self._rejected, strict=True), strict=True)
        )
        accepted, rejected = drafts.pop(DRAFT_SOURCES[0])
        usage = Usage(
            prompt_tokens=len(prompt),
            cached_tokens=facts.cached_tokens,
            completion_tokens=sum([len(output.token_ids) for output in outputs]),
            forced_tokens=sum([output.forced_tokens for output in outputs]),
            accepted=accepted,
            rejected=rejected,
            drafts={source: counts for source, counts in drafts.items() if any(counts)},
        )
        self._core.metrics.generated(timing, usage.completion_tokens // len(outputs))
        finding = None
        if self._core.config.cache_reports != "off" and not self._sequence.private:
            sequence, lint = self._sequence, self._core.lint
            finding = lint.observe(
                sequence.namespace, prompt, usage.cached_tokens, sequence.adapter
            )
        if facts.report is not None:
            advice = "" if finding is None else finding.says
            report = with_texts(facts.report, prompt, self._core.tokenizer, advice)
            facts = msgspec.structs.replace(facts, report=report)
        return Generated(self._op.op, outputs, usage, timing, prompt_logprobs, facts)


def _for_sample(params: SamplingParams, index: int) -> SamplingParams:
    if index == 0:
        return params
    assert params.seed is not None
    seed = (params.seed + index + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, seed=seed, prompt_logprobs_from=None)
