"""Drafter, which follows an output through texts that it may repeat, and drafts the next tokens.

text the quick brown fox jumps over ... output the quick red fox -> one edit; drafts continue behind
"fox": "jumps over"

Sources of texts are the client's prediction, and texts of this or another request of the namespace
(`cache.suffix_index`).
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import numpy as np

from rootlace.runtime.cache.suffix_index import IndexedText, Owner, SuffixIndex
from rootlace.wire.protocol import DRAFT_SOURCES

MAX_DRAFT = 32
"""Most tokens of a draft."""
_WRONG, _TRIED = 1.0, 4.0
"""Prior: wrong tokens among expected tokens."""
_KEPT = 0.98
"""Weight of an older token beside the next one."""
_FIRST_FOUND, _LEARNT_FOUND = 0.6, 0.3
"""Prior share of right tokens at a place found by a search, and weight of one more token."""
_FIRST_RECALLED, _LEARNT_RECALLED = (0.4, 0.6, 0.7), 0.03
"""Prior share and weight at places in other texts, by the rank of the gram that agreed, for all
requests of an owner."""
_LEARNT_NEXT = 0.01
"""Weight of one more token in an owner's share of right tokens behind a right one."""
PREDICTION, TREE, OUTPUT, MODEL = range(len(DRAFT_SOURCES))
"""Sources of drafts: the client's prediction, another request's text, the request's own text, the
draft model (`scheduler.draft_model`)."""
_MOST_LOST, _MOST_WON = 2.0, 8.0
"""Bounds on the balance of drafts, in tokens: the largest loss, and the largest saving that counts.
"""
_AGAIN = 0.8
"""Share of right predictions at which drafts are tried again after a loss."""
_GRAM = 4
"""Most output tokens searched for in the prediction."""
_LOOKED_AT = 4
"""Places checked on either side of the last right place."""
_NEAR = 8
"""Distance behind the last right place within which a single token identifies the place."""
_BELIEVED = 0.5
"""Share of right predictions from which a right token at a found place is no coincidence."""
_PART, _MOST_PAUSED, _RECALLED_PAUSED = 4, 16, 2
"""Pause between searches: a share of the unmatched tokens, and the largest pause in tokens.

Searches in the index hardly pause, since votes repeat short pieces of each other. Without
repetition, `speculation.Drafting` looks rarely.
"""


class Rates:
    """Shares of right tokens in the texts of a source, learnt from every expected token. `found`:
    at a place found by a search, by rank. `next`: behind a right token."""

    __slots__ = ("found", "learnt_found", "learnt_next", "next")

    def __init__(
        self, found: tuple[float, ...], learnt_found: float, learnt_next: float = 0.0
    ) -> None:
        """`learnt_found`, `learnt_next`: weight of one more token."""
        self.found = list(found)
        self.next = 1 - _WRONG / _TRIED
        self.learnt_found, self.learnt_next = learnt_found, learnt_next


class PredictedText:
    """A predicted text shared by its requests: tokens `ids` (int32 [n]) and an index of token
    pairs."""

    __slots__ = ("__weakref__", "_ends", "_pairs", "end", "ids")

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self.end = len(ids)
        self._pairs: np.ndarray | None = None  # [n - 1] int64, ascending
        self._ends: np.ndarray | None = None  # [n - 1], the place behind each pair; ties ascending

    def ends(self, pair: tuple[int, int], anchor: int) -> list[int]:
        """Return places behind `pair`: places after `anchor` by distance, then places before by
        distance. At most `_LOOKED_AT` of either."""
        if self._pairs is None or self._ends is None:  # most predictions are right for long
            pairs = self.ids[:-1].astype(np.int64) << 32 | self.ids[1:]
            order = np.argsort(pairs, kind="stable")
            self._pairs, self._ends = pairs[order], order + 2
        pairs, wanted = self._pairs, pair[0] << 32 | pair[1]
        start = int(pairs.searchsorted(wanted))
        if start == len(pairs) or pairs[start] != wanted:
            return []
        ends = self._ends[start : int(pairs.searchsorted(wanted, "right"))]
        behind = int(ends.searchsorted(anchor, "right"))
        before = ends[max(behind - _LOOKED_AT, 0) : behind]
        return [*ends[behind : behind + _LOOKED_AT].tolist(), *before[::-1].tolist()]


class Recalled:
    """The index as a source of drafts, with each owner's rates of right drafts."""

    def __init__(self, index: SuffixIndex) -> None:
        self.index = index
        self._rates: WeakKeyDictionary[Owner, dict[int, Rates]] = WeakKeyDictionary()

    def rates(self, owner: Owner) -> dict[int, Rates]:
        """Return the rates of the sources `TREE` and `OUTPUT`."""
        rates = self._rates.get(owner)
        if rates is None:
            rates = self._rates[owner] = {
                source: Rates(_FIRST_RECALLED, _LEARNT_RECALLED, _LEARNT_NEXT)
                for source in (TREE, OUTPUT)
            }
        return rates


class Drafter:
    """Follower of an output through a text that may hold its next tokens.

    `at`: the place of the token expected next; -1: unknown. An unexpected token is an edit. The
    next place is then behind the longest suffix of the output (at least two tokens) found in the
    prediction; places behind the last right place come first. Without such a suffix, a single token
    gives the place if it is near the last one. Places of the index precede less successful places.
    If no place is found, the token counts as a replacement of the expected token. With few right
    tokens, the search pauses.

    Each token shows whether the expected one was right, drafted or not. Two decaying rates follow:
    right behind a right token (`next_right`), and right at a found place (`Rates.found`).
    """

    __slots__ = (
        *("_anchor", "_guessed", "_known", "_predicted", "_predicted_rates", "_rank", "_rates"),
        *(
            "_recalled",
            "_seen",
            "_start",
            "_text",
            "_tried",
            "_wrong",
            "at",
            "missed",
            "next_right",
            "indexed",
        ),
        *("source", "sure", "until", "won"),
    )

    def __init__(
        self,
        predicted: PredictedText | None,
        seen: int,
        recalled: Recalled | None = None,
        indexed: IndexedText | None = None,
    ) -> None:
        """Start behind `seen` tokens of the sequence, where the output begins.

        `indexed`: the request's own text in the index of `recalled`.
        """
        self._predicted = predicted
        self._recalled = recalled
        self.indexed = indexed
        self._text: PredictedText | IndexedText | None = predicted
        self.source = PREDICTION
        self._rates = self._predicted_rates = Rates((_FIRST_FOUND,), _LEARNT_FOUND)
        """Rates of the source followed now, and rates of the prediction."""
        self._rank = 0
        self._seen = seen
        self._start = seen if indexed is None else indexed.known
        """Length of the sequence at its admission; -1 after the first search."""
        self._anchor = 0
        """Place behind the last right token of the prediction."""
        self._guessed = False
        self._known = seen
        """Length of the sequence at which more than a coincidence last confirmed the place."""
        self.until = 0
        """Length of the sequence until which `follow` does nothing."""
        self.at = -1 if predicted is None else 0
        self.sure = False
        """Whether the last token was the expected one."""
        self._wrong, self._tried = 0.0, 0.0
        """Wrong tokens, and all expected tokens, behind a right one."""
        self.next_right = self._rates.next
        self.won = 0.0
        """Balance of drafts: tokens saved minus cost, in tokens."""
        self.missed = 0
        """Steps missed since the last draft while waiting to be drafted for."""

    def follow(self, sequence: np.ndarray, length: int) -> None:
        """Take in the outputs of a sequence of `length` tokens."""
        if length < self.until:
            return
        if (start := self._start) >= 0:  # only now: the index joins the prompts of many requests
            self._start = -1
            if start > self._seen:
                self.follow(sequence, start)
            if self.at < 0:
                self.at = self._find(sequence, start)
        while self._seen < length:
            # Where the place is unknown, only the end of the output can tell.
            self._seen = end = self._seen + 1 if self.at >= 0 else length
            at, expected, token, text = self.at, False, int(sequence[end - 1]), self._text
            if text is not None and 0 <= at < text.end:
                expected = not self._guessed
                right = text.ids.item(at) == token
                rates, rank = self._rates, self._rank
                if self.sure:
                    self._wrong = _KEPT * self._wrong + (not right)
                    self._tried = _KEPT * self._tried + 1
                    rates.next += rates.learnt_next * (right - rates.next)
                    prior = _TRIED * (1 - rates.next)
                    self.next_right = 1 - (self._wrong + prior) / (self._tried + _TRIED)
                else:
                    rates.found[rank] += rates.learnt_found * (right - rates.found[rank])
                if right:
                    if self.sure or rates.found[rank] > _BELIEVED:
                        self._known = end
                    self.at = at + 1
                    if self.source == PREDICTION:
                        self._anchor = at + 1
                    self.sure, self._guessed = True, False
                    continue
            longest = _MOST_PAUSED if self.indexed is None else _RECALLED_PAUSED
            pause = min(1 + (end - self._known) // _PART, longest)
            self.at = self._find(sequence, end)
            self.sure = self._guessed = False
            if self.at < 0 and expected and pause == 1:
                self.at, self._guessed = at + 1, True
            self.until = end + (pause if self.at < 0 else 1)

    def draft(self, count: int) -> list[int]:
        """Return the next expected tokens, at most `count`."""
        text = self._text
        if self.at < 0 or text is None:
            return []
        expected: list[int] = text.ids[self.at : min(self.at + count, text.end)].tolist()
        return expected

    def worth(self, price: float) -> tuple[int, float]:
        """Return the best draft length, and the tokens saved by the draft beyond its cost.

        `price`: the cost of a draft token, as a share of a right token's saving. The draft ends
        where the last token's chance of being right falls below `price`.
        """
        if self.at < 0 or self._text is None:
            return 0, 0.0
        right = self.next_right
        first = right if self.sure else self._rates.found[self._rank]
        left = self._text.end - self.at
        if left <= 0 or price >= first:
            return 0, 0.0
        if self.won < -_MOST_LOST and not (self.sure and right > _AGAIN):
            return 0, 0.0
        # Only an edited prediction continues for long behind a replaced token.
        limit = 1 if self._guessed and self.source != PREDICTION else MAX_DRAFT
        count = min(limit, left)
        if price > 0:
            count = min(1 + int(math.log(price / first) / math.log(right)), count)
        return count, first * (1 - right**count) / (1 - right) - price * count

    def drafted(self, right: int, cost: float) -> None:
        """Record a draft with `right` right tokens and a `cost` in tokens, missed steps not
        included."""
        self.won = min(self.won + right - cost - self.missed, _MOST_WON)
        self.missed = 0

    def _find(self, sequence: np.ndarray, end: int) -> int:
        """Return the place behind the suffix of `sequence[:end]` in the text of the best source, -1
        if absent."""
        place, recalled = -1, self._recalled
        if self._predicted is not None:
            place = self._find_predicted(sequence[max(end - _GRAM, 0) : end].tolist())
        if recalled is not None and self.indexed is not None:
            match = recalled.index.find(self.indexed, sequence, end)
            if match is not None:
                text, at, rank = match
                source = OUTPUT if text is self.indexed else TREE
                rates = recalled.rates(text.owner)[source]
                if place < 0 or rates.found[rank] > self._predicted_rates.found[0]:
                    self._text, self.source, self._rates, self._rank = text, source, rates, rank
                    return at
        if place >= 0:
            self._text, self.source = self._predicted, PREDICTION
            self._rates, self._rank = self._predicted_rates, 0
        return place

    def _find_predicted(self, lately: list[int]) -> int:
        """Return the place behind the output's suffix in the prediction, -1 if absent."""
        text, anchor = self._predicted, self._anchor
        assert text is not None
        ids, place, longest = text.ids, -1, 1
        if len(lately) > 1:
            for end in text.ends((lately[-2], lately[-1]), anchor):
                length, most = 2, min(len(lately), end)
                while length < most and ids[end - 1 - length] == lately[-1 - length]:
                    length += 1
                if length > longest:
                    place, longest = end, length
        if place < 0:
            near: list[int] = ids[anchor : anchor + _NEAR].tolist()
            if lately[-1] in near:
                return anchor + near.index(lately[-1]) + 1
        return place
