"""One sample under way: its tokens, its text, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence

from rootlace.runtime.contracts.messages import EngineOutput, ThoughtTokens, TokenScore
from rootlace.runtime.server.detokenizer import Detokenizer
from rootlace.runtime.server.stops import Search, StopChecker
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.runtime.structured.thoughts import Phase, Watch
from rootlace.wire.protocol import Chunk, FinishReason, Output, SamplingParams, TokenLogprob

_FINISHES: dict[str, FinishReason] = {"stop": "stop", "abort": "abort"}


class Sample:
    """Turns the engine's updates of one request into chunks and an output.

    `context` are the ids of the prompt. `token_ids` holds every sampled token, the one that ended
    the sample included; `kept` says what becomes part of the branch.

    Text is decoded no earlier than needed: token by token if there are stop strings, chunk by chunk
    if there are chunks, else at the end.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        context: Sequence[int],
        params: SamplingParams,
        searches: Sequence[Search] = (),
        thoughts: ThoughtTokens | None = None,
    ) -> None:
        """`searches` are those of `params.stop_regex`; nothing stops within `thoughts`."""
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.forced_at: list[int] = []
        """Which of `token_ids` the constraint forced."""
        self.drafted_at: list[tuple[int, int]] = []
        """Which of `token_ids` were drafted, and the index of the source of each."""
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
        """What may be the beginning of thoughts, or of an answer."""
        self._texts: list[str] = []
        self._decoded = 0
        """How many of `token_ids` have their text in `_texts`, or held back in the detokenizer."""
        self._ends: list[int] = []
        """With stop strings: characters decoded after each token, -1 within a character."""
        self._length = 0
        self._chunked_texts = 0
        self._chunked_ids = 0

    def feed(self, update: EngineOutput) -> None:
        """Take new tokens. Once `finish` is set, later updates do not count."""
        if update.scores is not None:
            self._take_scores(update.token_scores(), update.forced)
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
        """Whether the update's last token is a stop token, which is left out of the text."""
        stopped_by_token = update.finish == "stop" and update.matched is not None
        return stopped_by_token and bool(update.token_ids) and not self._params.no_stop_trim

    def feed_chunk(self, update: EngineOutput, op: int) -> Chunk | None:
        """`feed`, and what `take_chunk` gives then; short where nothing but new text comes."""
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
        """What is new since the last chunk; None while there is no new text to show."""
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
        """Whether so much was fed, decoded for chunks."""
        known = sum(map(len, self._texts))
        return 0 <= characters <= known and 0 <= tokens <= len(self.token_ids)

    def told(self, characters: int, tokens: int) -> None:
        """The client has so much of what was fed; the next chunk has what is behind."""
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

    def kept(self) -> tuple[list[int], str]:
        """The ids that join the branch, and the text behind them that becomes pending."""
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

    def _take_scores(self, scores: Sequence[TokenScore], forced: tuple[int, ...]) -> None:
        tokenizer = self._tokenizer
        self.logprobs += [
            token_logprob(tokenizer, score, index in forced) for index, score in enumerate(scores)
        ]

    def _decode(self, count: int) -> None:
        """Decode the first `count` tokens, as far as their text is certain."""
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


def token_logprob(tokenizer: Tokenizer, score: TokenScore, forced: bool = False) -> TokenLogprob:
    top = tuple((id_, value, tokenizer.token_text(id_)) for id_, value in score.top)
    text = tokenizer.token_text(score.token_id)
    return TokenLogprob(score.token_id, text, score.logprob, top, forced)
