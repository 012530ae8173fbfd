"""One sample under way: its tokens, its text, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence

from rootlace.protocol import Chunk, FinishReason, Output, SamplingParams, TokenLogprob
from rootlace.runtime.engine.messages import TokenScore, Update
from rootlace.runtime.gateway.detokenizer import Detokenizer
from rootlace.runtime.gateway.stops import StopChecker
from rootlace.runtime.gateway.tokenizer import Tokenizer


class Sample:
    """Turns the engine's updates of one request into chunks and an output.

    `context` are the ids of the prompt. Every sampled token counts in `token_ids`, the one that
    ended the sample included; `kept_ids` and `rest` are what becomes part of the branch.
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer, context: Sequence[int], params: SamplingParams
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.forced_tokens = 0
        """How many of `token_ids` the constraint forced."""
        self.finish: FinishReason | None = None
        self.matched: str | int | None = None
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, context, params.skip_special_tokens)
        self._stops = StopChecker(params.stop, params.no_stop_trim)
        self._texts: list[str] = []
        self._ends: list[int] = []  # characters decoded after each token, -1 within a character
        self._length = 0
        self._chunked_texts = 0
        self._chunked_ids = 0

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def feed(self, update: Update) -> None:
        """Take new tokens. `finish` is set once nothing of later updates counts."""
        stopped_by_token = update.finish == "stop" and update.matched is not None
        last = len(update.token_ids) - 1
        forced = frozenset(update.forced)
        for i, token_id in enumerate(update.token_ids):
            self.token_ids.append(token_id)
            self.forced_tokens += i in forced
            if i < len(update.scores):
                self.logprobs.append(token_logprob(self._tokenizer, update.scores[i]))
            if stopped_by_token and i == last and not self._params.no_stop_trim:
                break
            self._add_text(self._detokenizer.feed([token_id]))
            if self._stops.matched is not None:
                self.finish, self.matched = "stop", self._stops.matched
                return
        if update.finish is not None:
            self._end("stop" if update.finish == "stop" else "length", update.matched)

    def take_chunk(self, op: int) -> Chunk | None:
        """What is new since the last chunk; None while there is no new text to show."""
        text = "".join(self._texts[self._chunked_texts :])
        ids = self.token_ids[self._chunked_ids :]
        if not text and not (ids and self.finish):
            return None
        logprobs = self.logprobs[self._chunked_ids :]
        self._chunked_texts = len(self._texts)
        self._chunked_ids += len(ids)
        return Chunk(op, self.index, text, tuple(ids), tuple(logprobs))

    def output(self) -> Output:
        assert self.finish is not None
        return Output(
            self.text,
            tuple(self.token_ids),
            self.finish,
            self.matched,
            tuple(self.logprobs),
            self.forced_tokens,
        )

    def kept(self) -> tuple[list[int], str]:
        """The ids that join the branch, and the text behind them that becomes pending."""
        if isinstance(self.matched, str):
            cut = self._stops.cut
            count = len(self._ends)
            while count and not 0 <= self._ends[count - 1] <= cut:
                count -= 1
            whole = self._ends[count - 1] if count else 0
            return self.token_ids[:count], self.text[whole:cut]
        if self.matched is not None and not self._params.no_stop_trim:
            return self.token_ids[:-1], ""
        return self.token_ids, ""

    def _add_text(self, text: str) -> None:
        self._length += len(text)
        self._ends.append(self._length if self._detokenizer.clean else -1)
        early = len(self._ends) < self._params.min_tokens
        self._texts.append(self._stops.skip(text) if early else self._stops.feed(text))

    def _end(self, finish: FinishReason, matched: int | None) -> None:
        self._texts.append(self._stops.feed(self._detokenizer.flush()))
        if self._stops.matched is not None:
            self.finish, self.matched = "stop", self._stops.matched
            return
        self._texts.append(self._stops.flush())
        self.finish, self.matched = finish, matched


def token_logprob(tokenizer: Tokenizer, score: TokenScore) -> TokenLogprob:
    top = tuple((id_, value, tokenizer.token_text(id_)) for id_, value in score.top)
    return TokenLogprob(score.token_id, tokenizer.token_text(score.token_id), score.logprob, top)
