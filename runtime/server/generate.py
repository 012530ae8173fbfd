"""One `Generate`: n engine requests, their samples, and the part that joins the branch.

Sections: sample, generation.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from rootlace.runtime.contracts.messages import (
    NO_TOKENS,
    EngineOutput,
    ThoughtTokens,
    TokenScore,
)
from rootlace.runtime.server.cache_lint import LEAST, with_texts
from rootlace.runtime.server.sequence import (
    Requests,
    TokenSequence,
    check_fits,
    report_for,
    settle,
)
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.server_state import call_for
from rootlace.runtime.server.session_log import GenerationLog
from rootlace.runtime.server.stops import Search, StopChecker, searches_of
from rootlace.runtime.server.telemetry import Metrics, Spans
from rootlace.runtime.server.tokenizer import Detokenizer, Piece, Tokenizer
from rootlace.runtime.structured.thoughts import Phase, Watch
from rootlace.wire.errors import InvalidRequest, RootlaceError, StateLost
from rootlace.wire.protocol import (
    DRAFT_SOURCES,
    Chunk,
    Event,
    FinishReason,
    Generate,
    Generated,
    Output,
    RequestFacts,
    SamplingParams,
    Thoughts,
    Timing,
    TokenLogprob,
    Usage,
)
from rootlace.wire.sampling import with_defaults, with_seed_of

# Sample -------------------------------------------------------------------------------------------


_FINISHES: dict[str, FinishReason] = {"stop": "stop", "abort": "abort"}


class Sample:
    """Sample: turns the engine's updates of one request into chunks and an output.

    `context` holds the ids of the prompt. `token_ids` holds every sampled token, the one that ended
    the sample included; `joined` says what becomes part of the branch.

    Text is decoded no earlier than needed: token by token with stop strings, chunk by chunk if
    chunks are sent, else at the end.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        context: Sequence[int],
        params: SamplingParams,
        searches: Sequence[Search] = (),
        thoughts: ThoughtTokens | None = None,
        tells_drafts: bool = False,
    ) -> None:
        """`searches` are those of `params.stop_regex`; nothing stops within `thoughts`. With
        `tells_drafts`, log-probabilities name the source of drafted tokens."""
        self.index = index
        self._tells_drafts = tells_drafts
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.forced_at: list[int] = []
        """Indices of `token_ids` that the constraint forced."""
        self.drafted_at: list[tuple[int, int]] = []
        """(index of `token_ids`, index of `DRAFT_SOURCES`) for each drafted token."""
        self.finish: FinishReason | None = None
        self.matched: str | int | None = None
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, context, params.skip_special_tokens)
        self._stops: StopChecker | None = None
        if params.stop or searches:
            self._stops = StopChecker(params.stop, params.no_stop_trim, searches)
        self._watch: Watch | None = None
        if self._stops is not None and thoughts is not None:
            self._watch = Watch(thoughts, tokenizer.token_bytes)
            self._place = self._watch.start
        self._undecided: list[str] = []
        """Text that may be the beginning of thoughts or of an answer."""
        self._texts: list[str] = []
        self._decoded = 0
        """Number of `token_ids` with their text in `_texts` or held back in the detokenizer."""
        self._ends: list[int] = []
        """Characters decoded after each token, -1 within a character. Only with stop strings."""
        self._length = 0
        self._chunked_texts = 0
        self._chunked_ids = 0

    def feed(self, update: EngineOutput) -> None:
        """Add new tokens. Updates after `finish` is set do not count."""
        if update.scores is not None:
            self._take_scores(update)
        if self._stops is not None:
            self._feed_checked(update, self._stops)
            return
        if update.forced:
            self.forced_at += [len(self.token_ids) + at for at in update.forced]
        self.token_ids += update.token_ids
        if update.finish is not None:
            self.finish = _FINISHES.get(update.finish, "length")
            self.matched = update.matched
            self._decode(len(self.token_ids) - self._trims_last(update))
            self._texts.append(self._detokenizer.flush())

    def _feed_checked(self, update: EngineOutput, stops: StopChecker) -> None:
        last = len(update.token_ids) - 1
        forced = update.forced
        trims_last = self._trims_last(update)
        for i, token_id in enumerate(update.token_ids):
            if forced and i in forced:
                self.forced_at.append(len(self.token_ids))
            self.token_ids.append(token_id)
            if trims_last and i == last:
                break
            self._add_checked(self._detokenizer.feed((token_id,)), stops, token_id)
            if stops.matched is not None:
                self.finish, self.matched = "stop", stops.matched
                del self.logprobs[len(self.token_ids) :]
                return
        if update.finish is not None:
            self._end_checked(_FINISHES.get(update.finish, "length"), update, stops)

    def _trims_last(self, update: EngineOutput) -> bool:
        """Return whether the update's last token is a stop token, which the text leaves out."""
        stopped_by_token = update.finish == "stop" and update.matched is not None
        return stopped_by_token and bool(update.token_ids) and not self._params.no_stop_trim

    def feed_chunk(self, update: EngineOutput, op: int) -> Chunk | None:
        """Return `take_chunk` after `feed`; shorter if nothing but new text came."""
        ids = update.token_ids
        if (
            update.finish is not None
            or update.scores is not None
            or update.forced
            or self._stops is not None
            or self._chunked_ids != len(self.token_ids)
        ):
            self.feed(update)
            return self.take_chunk(op)
        self.token_ids += ids
        self._decoded = len(self.token_ids)
        text = self._detokenizer.feed(ids)
        if not text:
            return None
        self._texts.append(text)
        self._chunked_texts = len(self._texts)
        self._chunked_ids = self._decoded
        return Chunk(op, self.index, text, ids)

    def take_chunk(self, op: int) -> Chunk | None:
        """Return text and tokens since the last chunk; None while there is no new text to show."""
        if self._stops is None and self.finish is None:
            self._decode(len(self.token_ids))
        text = "".join(self._texts[self._chunked_texts :])
        ids = self.token_ids[self._chunked_ids :]
        if not text and not (ids and self.finish):
            return None
        logprobs = self.logprobs[self._chunked_ids :]
        self._chunked_texts = len(self._texts)
        self._chunked_ids += len(ids)
        return Chunk(op, self.index, text, tuple(ids), tuple(logprobs))

    def has(self, characters: int, tokens: int) -> bool:
        """Return whether at least `characters` and `tokens` were fed and decoded for chunks."""
        known = sum(map(len, self._texts))
        return 0 <= characters <= known and 0 <= tokens <= len(self.token_ids)

    def skip(self, characters: int, tokens: int) -> None:
        """Begin the next chunk behind `characters` and `tokens`, which the client has already."""
        text = "".join(self._texts)
        self._texts = [text[:characters], text[characters:]]
        self._chunked_texts = 1
        self._chunked_ids = tokens

    def output(self) -> Output:
        assert self.finish is not None
        return Output(
            "".join(self._texts),
            tuple(self.token_ids),
            self.finish,
            self.matched,
            tuple(self.logprobs),
            len(self.forced_at),
            tuple(self.forced_at),
            tuple(self.drafted_at),
        )

    def joined(self) -> tuple[list[int], str]:
        """Return the ids that join the branch, and the text behind them that becomes pending."""
        if isinstance(self.matched, str):
            assert self._stops is not None
            cut = self._stops.cut
            count = len(self._ends)
            while count and not 0 <= self._ends[count - 1] <= cut:
                count -= 1
            whole = self._ends[count - 1] if count else 0
            return self.token_ids[:count], "".join(self._texts)[whole:cut]
        if self.matched is not None and not self._params.no_stop_trim:
            return self.token_ids[:-1], ""
        return self.token_ids, ""

    def _take_scores(self, update: EngineOutput) -> None:
        tokenizer = self._tokenizer
        drafted = dict(update.accepted) if self._tells_drafts else {}
        for at, score in enumerate(update.token_scores()):
            source = DRAFT_SOURCES[drafted[at]] if at in drafted else ""
            self.logprobs.append(token_logprob(tokenizer, score, at in update.forced, source))

    def _decode(self, count: int) -> None:
        """Decode the first `count` tokens as far as later tokens cannot change their text."""
        if count > self._decoded:
            new = self.token_ids[self._decoded : count]
            self._decoded = count
            if text := self._detokenizer.feed(new):
                self._texts.append(text)

    def _add_checked(self, text: str, stops: StopChecker, token_id: int) -> None:
        self._length += len(text)
        self._ends.append(self._length if self._detokenizer.clean else -1)
        early = len(self._ends) < self._params.min_tokens
        if self._watch is not None and self._place.phase is not Phase.BEHIND:
            before, self._place = self._place, self._watch.after(self._place, token_id)
            if self._place.phase is Phase.UNDECIDED:
                self._undecided.append(text)
                return
            early = early or not self._place.never
            if before.phase is Phase.UNDECIDED:
                text = "".join([*self._undecided, text])
                self._undecided = []
        self._texts.append(stops.skip(text) if early else stops.feed(text))

    def _end_checked(self, finish: FinishReason, update: EngineOutput, stops: StopChecker) -> None:
        rest = "".join([*self._undecided, self._detokenizer.flush()])
        inside = self._watch is not None and self._place.phase is Phase.INSIDE
        self._texts.append(stops.skip(rest) if inside else stops.feed(rest))
        if stops.matched is not None:
            self.finish, self.matched = "stop", stops.matched
            return
        self._texts.append(stops.flush())
        self.finish, self.matched = finish, update.matched


def token_logprob(
    tokenizer: Tokenizer, score: TokenScore, forced: bool = False, drafted: str = ""
) -> TokenLogprob:
    top = tuple((id_, value, tokenizer.token_text(id_)) for id_, value in score.top)
    text = tokenizer.token_text(score.token_id)
    return TokenLogprob(score.token_id, text, score.logprob, top, forced, drafted)


# Generation ---------------------------------------------------------------------------------------


# Bounds the cost per token of the search for stop strings.
MAX_STOP_LENGTH = 1024
MAX_PROMPT_LOGPROBS = 2**19
"""Alternatives included: the wire's encoder takes 40 ms for them, and blocks the event loop."""
# Tokens per update of the engine without streaming and stop strings. If the engine dies, up to that
# many tokens are lost, and the next engine samples them again.
QUIET_TOKENS = 32
# Least seconds between two points of a generation's reported progress.
PROGRESS_SECONDS = 0.01
CHARACTERS_PER_TOKEN = 16
"""Characters of a prediction read per token of the context window; the rest is ignored."""


class Generation:
    """Run of a `Generate`. The first sample continues the branch; sample i has seed + i."""

    def __init__(
        self,
        model: ServedModel,
        sequence: TokenSequence,
        op: Generate,
        emit: Callable[[Event], None] = lambda chunk: None,
        log: GenerationLog | None = None,
        timeline: bool = False,
    ) -> None:
        """`log` records the engine's updates, and holds those of an earlier server. `timeline`:
        the result tells when tokens came, for `Timing.progress`."""
        self._log = log
        self._model = model
        self._sequence = sequence
        if defaults := model.model_info.sampling:
            op = msgspec.structs.replace(op, params=with_defaults(op.params, defaults))
        self._op = op
        self._emit = emit
        self._samples: list[Sample] = []
        self._prompt_scores: EngineOutput | None = None
        self._facts: RequestFacts | None = None
        self._tells = op.tell_cached
        self._prompt_tokens = 0
        self._accepted, self._rejected = [0] * len(DRAFT_SOURCES), [0] * len(DRAFT_SOURCES)
        """Tokens computed ahead, by the index of their source in `DRAFT_SOURCES`."""
        self._started = 0.0
        self._first_token: float | None = None
        self._timeline = timeline
        self._progress: list[tuple[float, int]] = []

    def run(self) -> Awaitable[Generated]:
        """Compute the terminal event. Raises a typed error where the operation fails."""
        spans = self._model.spans
        return self._generate() if spans is None else self._traced(spans)

    async def _traced(self, spans: Spans) -> Generated:
        ended: Generated | RootlaceError | None = None
        try:
            ended = await self._generate()
        except RootlaceError as error:
            ended = error
            raise
        finally:
            if ended is not None:
                model, program = self._model.model_info.name, self._sequence.program
                spans.generated(model, program, self._op, ended, self._timing())
        return ended

    async def _generate(self) -> Generated:
        self._started = time.monotonic()
        model, sequence, op = self._model, self._sequence, self._op
        searches = await searches_of(op.params.stop_regex) if op.params.stop_regex else []
        await settle(model, sequence, everything=True)
        state = sequence.state
        if not state.ids:
            raise InvalidRequest("the prompt is empty: there is nothing to generate from", "prompt")
        prompt = np.array(state.ids, np.int32)
        self._prompt_tokens = len(prompt)
        prediction = await self._predicted() if op.prediction else NO_TOKENS
        params, rows = self._engine_params(len(prompt))
        # The other samples of the prompt find in the cache what the first one computes.
        report = model.report_scope() if op.cache_report else ""
        thoughts = None if op.thoughts is None else self._thoughts(op.thoughts, state.ids[-1])
        self._samples = [
            Sample(
                *(index, model.tokenizer, state.ids, op.params, searches, thoughts, op.cache_report)
            )
            for index in range(op.params.n)
        ]
        if thoughts is not None and not (
            op.constraint is not None or thoughts.stops or thoughts.budget is not None
        ):
            thoughts = None  # without effect on the engine
        goes_on = self._log is not None and self._go_on(self._log)
        paid = len(state.ids) if goes_on else sequence.paid
        requests = Requests(model.engine, sequence.asker, paid)
        sequence.stop = requests.stop
        sequence.paid = 0
        # Where a stop string may come, the engine reports each token, so that it can stop at once.
        stops = bool(op.params.stop or searches)
        emit_every = 1 if op.stream or stops else QUIET_TOKENS
        emit_seconds = model.config.stream_interval if op.stream and not stops else 0.0
        for sample in self._samples:
            if sample.finish is not None:
                continue
            row_params = params
            if sample.index:
                row_params = with_seed_of(params, sample.index)
                row_params = msgspec.structs.replace(row_params, prompt_logprobs_from=None)
            request = sequence.request(
                prompt,
                row_params,
                op.handling,
                output_ids=np.array(sample.token_ids, np.int32) if sample.token_ids else NO_TOKENS,
                constraint=op.constraint,
                emit_every=emit_every,
                emit_seconds=emit_seconds,
                report="" if sample.index else report,
                resumed=goes_on,
                prediction=prediction,
                thoughts=thoughts,
            )
            requests.add(request, partial(self._take, sample))
        scores: tuple[TokenLogprob, ...] = ()
        try:
            await requests.finish(sequence.wait)
            if self._prompt_scores is not None:
                scores = await call_for(rows, self._prompt_logprobs, self._prompt_scores)
        finally:
            sequence.stop = None
        joined_ids, rest = self._samples[0].joined()
        generated = self._generated(prompt, scores)
        state.ids.extend(joined_ids)
        state.pending = (Piece(rest),) if rest else ()
        if text := generated.outputs[0].text:
            state.gained.append(Piece(text))
        return generated

    def _thoughts(self, thoughts: Thoughts, last: int) -> ThoughtTokens:
        """Tokenize the texts of the thoughts that the operation admits, behind the token `last`."""
        model = self._model
        begin, end, gap, then, close = (
            tuple(model.tokenizer.encode_pieces((Piece(text, True),), last)) if text else ()
            for text in (thoughts.begin, thoughts.end, thoughts.gap, thoughts.then, thoughts.close)
        )
        return ThoughtTokens(
            end,
            begin,
            gap,
            then,
            close,
            thoughts.budget,
            stops=tuple(set(self._op.params.stop_token_ids) - model.eos_ids),
            special=any(map(model.tokenizer.is_special, (*begin, *end))),
        )

    def _prompt_logprobs(self, update: EngineOutput) -> tuple[TokenLogprob, ...]:
        tokenizer = self._model.tokenizer
        return tuple([token_logprob(tokenizer, one) for one in update.prompt_token_scores()])

    async def _predicted(self) -> np.ndarray:
        """Tokenize the predicted text: int32 [tokens], no more than the context window has."""
        model, context_length = self._model, self._model.model_info.context_length
        text = self._op.prediction[: CHARACTERS_PER_TOKEN * context_length]
        ids = await model.tokenize(len(text), model.tokenizer.encode_pieces, (Piece(text),))
        return np.array(ids[:context_length], np.int32)

    def _go_on(self, log: GenerationLog) -> bool:
        """Replay updates of an earlier server, and send chunks that the client lacks. Returns
        whether there were updates. Raises StateLost where the client has more than the log."""
        before = log.before
        for index, update in before:
            self._take(self._samples[index], update, replayed=True)
        for index, (characters, tokens) in log.progress.items():
            known = 0 <= index < len(self._samples)
            if not known or not self._samples[index].has(characters, tokens):
                raise StateLost("the client has more of this stream than the server: it was lost")
        if before and self._op.stream:
            for sample in self._samples:
                characters, tokens = log.progress.get(sample.index, (0, 0))
                self._tells = self._tells and not tokens
                sample.skip(characters, tokens)
                if (chunk := sample.take_chunk(self._op.op)) is not None:
                    self._send(chunk)
        return bool(before)

    def _send(self, chunk: Chunk) -> None:
        """Send a chunk; the first one carries prompt length and cached tokens."""
        if self._tells and self._facts is not None:
            self._tells = False
            cached = self._facts.cached_tokens
            chunk = msgspec.structs.replace(
                chunk, cached_tokens=cached, prompt_tokens=self._prompt_tokens
            )
        self._emit(chunk)

    def _take(self, sample: Sample, update: EngineOutput, replayed: bool = False) -> int | None:
        """Take one update; `replayed` marks one that an earlier server received already. Returns,
        when the sample is complete, how many of the update's tokens came behind its end."""
        if self._log is not None and not replayed:
            self._log.record(sample.index, update)
        before = len(sample.token_ids)
        chunk = None
        if self._op.stream:
            chunk = sample.feed_chunk(update, self._op.op)
        else:
            sample.feed(update)
        if update.token_ids:
            now = self._model.last_token = time.monotonic()
            if self._first_token is None:
                self._first_token = now
            if self._timeline and sample.index == 0:
                # The first and the latest point stay; points between are far enough apart to draw.
                progress = self._progress
                if len(progress) > 1 and progress[-1][0] - progress[-2][0] < PROGRESS_SECONDS:
                    progress.pop()
                progress.append((now - self._started, len(sample.token_ids)))
        if sample.index == 0:
            # The first update and the last one carry the facts of the request.
            self._facts = update.facts or self._facts
            if update.prompt_targets is not None:
                # The scores come in one update, and again if the engine died and the request is
                # replayed.
                self._prompt_scores = update
        if update.accepted or update.rejected:
            # A stop string may end before the last of the tokens of one update.
            taken = len(sample.token_ids) - before
            for at, source in update.accepted:
                counts = self._accepted if at < taken else self._rejected
                counts[source] += 1
                if at < taken:
                    sample.drafted_at.append((before + at, source))
            for source, count in enumerate(update.rejected):
                self._rejected[source] += count
        if chunk is not None and not replayed:
            (self._send if self._tells else self._emit)(chunk)
        if sample.finish is None:
            return None
        return len(update.token_ids) - (len(sample.token_ids) - before)

    def _engine_params(self, prompt: int) -> tuple[SamplingParams, int]:
        """Return the engine's parameters, without None for a number and without stop strings, and
        the number of prompt log-probabilities. Raises InvalidRequest."""
        given, vocabulary = self._op.params, self._model.model_info.vocab_size
        for index, stop in enumerate(given.stop):
            if len(stop) > MAX_STOP_LENGTH:
                raise InvalidRequest(
                    f"stop[{index}] has {len(stop)} characters, at most {MAX_STOP_LENGTH} fit",
                    f"stop[{index}]",
                )
        for field, ids in (
            ("stop_token_ids", given.stop_token_ids),
            ("logit_bias", given.logit_bias),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocabulary:
                    raise InvalidRequest(
                        f"{field}: {token_id} is not a token id (the vocabulary has {vocabulary})"
                    )
        check_fits(self._model, prompt, outputs=0 if given.max_tokens == 0 else 1)
        left = self._model.max_prompt - prompt
        max_tokens = left if given.max_tokens is None else min(given.max_tokens, left)
        stops = set(given.stop_token_ids)
        if not given.ignore_eos:
            stops |= self._model.eos_ids
        first = given.prompt_logprobs_from
        if first is not None and first > prompt:
            raise InvalidRequest(
                f"log-probabilities are wanted from token {first} on "
                f"of a prompt of {prompt} tokens",
                "prompt_logprobs_from",
            )
        rows = 0 if first is None else (prompt - first) * (1 + given.top_logprobs)
        if rows > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"{rows} log-probabilities of the prompt are more than {MAX_PROMPT_LOGPROBS}: begin"
                " later in it, or ask for fewer alternatives"
            )
        # By the sum before it, a top_p of 0 leaves no token, though the likeliest one should stay.
        greedy = {"temperature": 0.0, "top_p": 1.0} if given.top_p == 0 else {}
        params = msgspec.structs.replace(
            given,
            n=1,
            given=(),
            **greedy,
            max_tokens=max_tokens,
            min_tokens=min(given.min_tokens, max_tokens),
            stop=(),
            stop_regex=(),
            stop_token_ids=tuple(sorted(stops)),
            seed=secrets.randbits(63) if given.seed is None else given.seed,
            prompt_logprobs_from=first if first is not None and first < prompt else None,
        )
        return params, rows

    def _timing(self) -> Timing:
        """Return the times until now. Without any token, `first_token` equals `total`."""
        total = time.monotonic() - self._started
        first = total if self._first_token is None else self._first_token - self._started
        queued = 0.0 if self._facts is None else self._facts.queued
        return Timing(queued, first, total, tuple(self._progress))

    def _generated(
        self, prompt: np.ndarray, prompt_logprobs: tuple[TokenLogprob, ...]
    ) -> Generated:
        timing, facts = self._timing(), self._facts or RequestFacts()
        outputs: list[Output] = []
        completion = forced = 0
        for sample in self._samples:
            outputs.append(sample.output())
            completion += len(sample.token_ids)
            forced += len(sample.forced_at)
        drafts = {}
        for at, source in enumerate(DRAFT_SOURCES):
            if at and (self._accepted[at] or self._rejected[at]):
                drafts[source] = self._accepted[at], self._rejected[at]
        usage = Usage(
            prompt_tokens=len(prompt),
            cached_tokens=facts.cached_tokens,
            completion_tokens=completion,
            forced_tokens=forced,
            accepted=self._accepted[0],
            rejected=self._rejected[0],
            drafts=drafts,
        )
        observe(self._model.metrics, timing, completion // len(outputs))
        finding, sequence = None, self._sequence
        computed = len(prompt) - usage.cached_tokens
        if computed >= LEAST and self._model.config.cache_reports != "off" and not sequence.private:
            finding = self._model.lint.observe(
                sequence.namespace, prompt, usage.cached_tokens, sequence.adapter
            )
        if facts.report is not None:
            advice = "" if finding is None else finding.says
            report = report_for(sequence.asker.account, facts.report)
            report = with_texts(report, prompt, self._model.tokenizer, advice)
            facts = msgspec.structs.replace(facts, report=report)
        return Generated(self._op.op, tuple(outputs), usage, timing, prompt_logprobs, facts)


def observe(metrics: Metrics, timing: Timing, tokens: int) -> None:
    """Observe the times of an ended request; `tokens` is the mean per sample."""
    metrics.whole.observe(timing.total)
    metrics.queued.observe(timing.queued)
    if tokens > 0:
        metrics.first.observe(timing.first_token)
    if tokens > 1:
        metrics.between.observe((timing.total - timing.first_token) / (tokens - 1))
