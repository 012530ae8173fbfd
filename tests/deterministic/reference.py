"""Expected results, recomputed from an operation's tokens alone, without a cache, a batch, a
schedule or a fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rootlace.runtime.contracts.matcher import Grammar, Matcher
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.protocol import SamplingParams
from tests.deterministic import tokens
from tests.simulated_executor import made_up_logprobs


@dataclass
class Expected:
    """Expected result. `code`: the code of a required error."""

    ids: list[int]
    finish: str = ""
    matched: str | int | None = None
    text: str = ""
    kept: list[int] = field(default_factory=list)
    rest: str = ""
    code: str = ""


@dataclass
class Content:
    """Content of a branch: tokens, the text behind them, and the tokens gained since its
    opening."""

    ids: list[int] = field(default_factory=list)
    pending: list[Piece] = field(default_factory=list)
    begin: bool | None = None
    gained: list[Piece | list[int]] = field(default_factory=list)

    def fork(self) -> Content:
        return Content(list(self.ids), list(self.pending), self.begin)

    def add(self, piece: Piece) -> None:
        if self.begin is None:
            self.begin = not piece.special
        if piece.text:
            self.pending.append(piece)
            self.gained.append(piece)

    def add_ids(self, ids: Sequence[int]) -> None:
        if self.begin is None:
            self.begin = False
        if self.pending:
            self.settle()
        self.ids += ids
        self.gained.append(list(ids))

    def whole(self, *more: Piece) -> list[int]:
        """Return all tokens; pending texts are tokenized as one string."""
        before = self.ids[-1] if self.ids else None
        pending = [*self.pending, *more]
        return self.ids + tokens.tokenizer().encode_pieces(pending, before, self.begin is not False)

    def settle(self) -> None:
        self.ids, self.pending = self.whole(), []

    def gained_text(self) -> list[Piece]:
        found = []
        for gained in self.gained:
            piece = gained
            if not isinstance(piece, Piece):
                piece = Piece(tokens.tokenizer().decode(piece))
            if piece.text:
                found.append(piece)
        return found


def generated(
    prompt: list[int],
    params: SamplingParams,
    most: int,
    grammar: Grammar | None = None,
    jumps: bool = True,
) -> Expected:
    """Return the expected sample, of at most `most` tokens; `params` has a seed."""
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (tokens.eos(),))}
    run = _Run(prompt, params, most, stops, None if grammar is None else grammar.matcher(), jumps)
    found = run.go()
    if found.code:
        return found
    shown = found.ids[:-1] if found.finish == "stop" and found.matched is not None else found.ids
    texts = tokens.text_of(prompt, shown)
    found.kept, found.text = shown, texts[-1][0]
    if params.stop:
        _cut(found, texts, params.stop[0])
    return found


def _cut(found: Expected, texts: list[tuple[str, bool]], stop: str) -> None:
    """Cut at the stop string, if present. `texts`: as `tokens.text_of` gives them."""
    for count in range(1, len(texts)):
        at = texts[count][0].find(stop)
        if at < 0:
            continue
        taken = min(count, len(texts) - 2)
        found.ids, found.text = found.ids[:taken], texts[count][0][:at]
        found.finish, found.matched = "stop", stop
        # Keep tokens up to the last one that ends with a whole character before the cut.
        whole = max(n for n in range(taken + 1) if texts[n][1] and len(texts[n][0]) <= at)
        found.kept, found.rest = found.ids[:whole], found.text[len(texts[whole][0]) :]
        return


class _Run:
    """Computes an expected sample, token by token."""

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        most: int,
        stops: set[int],
        matcher: Matcher | None,
        jumps: bool,
    ) -> None:
        self.all = list(prompt)
        self.start = len(prompt)
        self.params = params
        self.most = most
        self.stops = stops
        self.matcher = matcher
        self.jumps = jumps
        self.held = matcher is not None and matcher.can_rollback

    def go(self) -> Expected:
        if not self.most:
            return Expected([], "length")
        found = self._jump()
        while found is None:
            early = len(self.all) - self.start < self.params.min_tokens
            token = tokens.next_token(
                tokens.hashes(self.all)[-1],
                self.params.seed or 0,
                self.params.temperature,
                self._allowed(),
                self.stops if early else (),
            )
            if token < 0:
                return Expected([], code="constraint_not_met" if self.matcher else "internal")
            length = len(self.all)
            found = self._append(token)
            if found is None and len(self.all) > length:
                found = self._jump()
        return found

    def _allowed(self) -> np.ndarray | None:
        return None if self.matcher is None else self.matcher.allowed_mask()

    def _append(self, token: int) -> Expected | None:
        matcher = self.matcher
        stops = token in self.stops and len(self.all) - self.start >= self.params.min_tokens
        if matcher is not None and (not stops or self.held) and not matcher.advance(token):
            undone = matcher.rollback_refused() if self.held else None
            if undone is None:
                return Expected([], code="constraint_not_met")
            del self.all[len(self.all) - undone :]
            return None
        self.all.append(token)
        ids = self.all[self.start :]
        if stops:
            return Expected(ids, "stop", token)
        if matcher is not None and matcher.is_finished():
            return Expected(ids, "stop")
        return Expected(ids, "length") if len(ids) >= self.most else None

    def _jump(self) -> Expected | None:
        if self.matcher is None or not self.jumps:
            return None
        while forced := self.matcher.forced_tokens():
            for token in forced:
                length = len(self.all)
                if token in self.stops and length - self.start < self.params.min_tokens:
                    return None
                found = self._append(token)
                if found is not None or len(self.all) <= length:
                    return found
        return None


def logprobs(prompt: list[int], ids: list[int]) -> list[float]:
    """Return log-probabilities of each of `ids` behind a prompt."""
    return scores([*prompt, *ids], len(prompt))


def scores(ids: list[int], start: int) -> list[float]:
    """Return log-probabilities of the tokens from `start` on; 0 for a token with no predecessor."""
    hashes = np.array(tokens.hashes(ids)[:-1], np.uint64)
    found = [0.0, *made_up_logprobs(hashes, np.array(ids[1:], np.int32)).tolist()]
    return found[start:]


def selected(content: Content, choices: Sequence[str]) -> tuple[int, list[float]] | None:
    """Return the best choice, and all scores; None if a choice adds no token."""
    base = content.whole()
    joint = [content.whole(Piece(choice)) for choice in choices]
    start = min(_common(base, ids) for ids in joint)
    if any(len(ids) == start for ids in joint):
        return None
    found = []
    for ids in joint:
        values = scores(ids, start)
        found.append(math.fsum(values) / len(values))
    return max(range(len(found)), key=found.__getitem__), found


def _common(one: list[int], other: list[int]) -> int:
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)
