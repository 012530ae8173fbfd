"""Where an output stands in the text that its client predicts, and what would come next there."""

from __future__ import annotations

import math

import numpy as np

MAX_DRAFT = 32
"""Tokens of a draft, at most."""
_WRONG, _TRIED = 1.0, 4.0
"""So many of so many expected tokens are believed to have been wrong before anything is known."""
_KEPT = 0.98
"""What an older token counts beside the next one."""
_FIRST_FOUND, _LEARNT_FOUND = 0.6, 0.3
"""How many are believed to be right at a place that was only found, and how much one more says."""
_MOST_LOST, _MOST_WON = 2.0, 8.0
"""Drafts may have cost so much more than they saved, in tokens; what they saved before counts up to
so much."""
_AGAIN = 0.8
"""Drafts that cost too much are made again where so many of the predicted tokens are right."""
_GRAM = 4
"""Tokens of the output that are looked for, at most."""
_LOOKED_AT = 4
"""So many places are looked at on either side of the last right place."""
_NEAR = 8
"""So far behind the last right place, and no further, one token alone says where to go on."""
_BELIEVED = 0.5
"""A right token at a place that was only found is no chance where so many of them are right."""
_PART, _MOST_PAUSED = 4, 16
"""To look for the place costs, too: the next time after such a part of the tokens for which it is
not known, and so many at most."""


class PredictedText:
    """What is predicted, for all samples of it: the tokens `ids` (int32 [n]), and where each pair
    of them stands."""

    __slots__ = ("__weakref__", "_ends", "_pairs", "ids")

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self._pairs: np.ndarray | None = None  # [n - 1] int64, ascending
        self._ends: np.ndarray | None = None  # [n - 1], the place behind each; of equals ascending

    def ends(self, pair: tuple[int, int], anchor: int) -> list[int]:
        """Places behind this pair of tokens: those behind `anchor`, the next one first, and then
        those before, the last one first; `_LOOKED_AT` of either at most."""
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


class Prediction:
    """Follows an output through a predicted text.

    `at` is the place of the token that is expected next; -1: it is not known. A token that is
    another one is an edit. Then the longest end of the output (at least two tokens) that stands in
    the prediction says where to go on, rather behind the last right place than before it; else the
    token alone does, near that place. If neither says anything, the token was put in place of the
    expected one, as a guess. Where little is right the place is looked for now and then only.

    Whether a draft is made or not, each token that comes says whether the expected one was right:
    from that it is known how often one is, of late more than long ago, right behind another one
    that was (`next_right`), and where a place was only found (`found_right`).
    """

    __slots__ = (
        *("_anchor", "_guessed", "_known", "_seen", "_text", "_tried", "_wrong"),
        *("at", "found_right", "missed", "next_right", "sure", "until", "won"),
    )

    def __init__(self, text: PredictedText, seen: int) -> None:
        """The output begins behind `seen` tokens of its sequence."""
        self._text = text
        self._seen = seen
        self._anchor = 0
        """Behind the last token that was right."""
        self._guessed = False
        self._known = seen
        """How long the sequence was when the place was known last, rather than by chance."""
        self.until = 0
        """Until the sequence is so long, `follow` does nothing."""
        self.at = 0
        self.sure = False
        """Whether the last token was the expected one."""
        self._wrong, self._tried = 0.0, 0.0
        """Of so many expected tokens behind a right one, so many were wrong."""
        self.next_right = 1 - _WRONG / _TRIED
        self.found_right = _FIRST_FOUND
        self.won = 0.0
        """What drafts have saved beyond what they cost, in tokens."""
        self.missed = 0
        """Steps since the last draft that others had and this row had not, to be drafted for."""

    def follow(self, sequence: np.ndarray, length: int) -> None:
        """The sequence has `length` tokens now; what is new of it is output."""
        if length < self.until:
            return
        while self._seen < length:
            # Where the place is not known, only the end of the output can tell.
            self._seen = self._seen + 1 if self.at >= 0 else length
            self._take(sequence, self._seen)

    def draft(self, count: int) -> list[int]:
        """The next tokens that are expected, `count` at most."""
        if self.at < 0:
            return []
        expected: list[int] = self._text.ids[self.at : self.at + count].tolist()
        return expected

    def worth(self, price: float) -> tuple[int, float]:
        """How long a draft should be, where a token more of it costs `price` of what one saves that
        is right: as long as the last one is right that often. And what it is expected to save
        beyond that, in tokens."""
        if self.at < 0:
            return 0, 0.0
        right = self.next_right
        first = right if self.sure else self.found_right
        left = len(self._text.ids) - self.at
        if left <= 0 or price >= first:
            return 0, 0.0
        if self.won < -_MOST_LOST and not (self.sure and right > _AGAIN):
            return 0, 0.0
        count = min(MAX_DRAFT, left)
        if price > 0:
            count = min(1 + int(math.log(price / first) / math.log(right)), count)
        return count, first * (1 - right**count) / (1 - right) - price * count

    def drafted(self, right: int, cost: float) -> None:
        """Of a draft, so many tokens came. It cost so many, beside the steps that were missed."""
        self.won = min(self.won + right - cost - self.missed, _MOST_WON)
        self.missed = 0

    def _take(self, sequence: np.ndarray, end: int) -> None:
        """The output goes on with the last of the first `end` tokens of the sequence."""
        at, expected, token = self.at, False, int(sequence[end - 1])
        if 0 <= at < len(self._text.ids):
            expected = not self._guessed
            right = int(self._text.ids[at]) == token
            if self.sure:
                self._wrong = _KEPT * self._wrong + (not right)
                self._tried = _KEPT * self._tried + 1
                self.next_right = 1 - (self._wrong + _WRONG) / (self._tried + _TRIED)
            else:
                self.found_right += _LEARNT_FOUND * (right - self.found_right)
            if right:
                if self.sure or self.found_right > _BELIEVED:
                    self._known = end
                self.at = self._anchor = at + 1
                self.sure, self._guessed = True, False
                return
        pause = min(1 + (end - self._known) // _PART, _MOST_PAUSED)
        self.at = self._find(sequence[max(end - _GRAM, 0) : end].tolist())
        self.sure = self._guessed = False
        if self.at < 0 and expected and pause == 1:
            self.at, self._guessed = at + 1, True
        self.until = end + (pause if self.at < 0 else 1)

    def _find(self, lately: list[int]) -> int:
        """The place behind what the output ends with, -1 if there is none."""
        ids, anchor = self._text.ids, self._anchor
        found, longest = -1, 1
        if len(lately) > 1:
            for end in self._text.ends((lately[-2], lately[-1]), anchor):
                length, most = 2, min(len(lately), end)
                while length < most and ids[end - 1 - length] == lately[-1 - length]:
                    length += 1
                if length > longest:
                    found, longest = end, length
        if found < 0:
            near: list[int] = ids[anchor : anchor + _NEAR].tolist()
            if lately[-1] in near:
                return anchor + near.index(lately[-1]) + 1
        return found
