"""Where an output stands in the text that its client predicts, and what would come next there."""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np

MAX_DRAFT = 32
"""Tokens of a draft, at most."""
_FIRST_RATE, _FIRST_FOUND = 0.75, 0.6
"""How many of the predicted tokens are believed to be right while nothing is known."""
_LEARNT, _LEARNT_FOUND = 0.2, 0.3
"""How much one more token says of the next."""
_MOST_LOST, _MOST_WON = 2.0, 8.0
"""Drafts may have cost so much more than they saved, in tokens; what they saved before counts up to
so much."""
_AGAIN = 0.8
"""Drafts that cost too much are made again where so many of the predicted tokens are right."""
_GRAM = 4
"""Tokens of the output that are looked for, at most."""
_LOOKED_AT = 16
"""So many places of a token are looked at on either side of the last right place."""
_NEAR = 8
"""So far behind the last right place, and no further, one token alone says where to go on."""


class Prediction:
    """Follows an output through a predicted text.

    `at` is the place of the token that is expected next; -1: it is not known. A token that is
    another one is an edit. Then the longest end of the output (at least two tokens) that stands in
    the prediction says where to go on, rather behind the last right place than before it; else the
    token alone does, near that place. If neither says anything, the token was put in place of the
    expected one, as a guess.

    Whether a draft is made or not, each token that comes says whether the expected one was right:
    from that it is known how often one is, of late more than long ago, behind another one that was
    (`rate`), and where a place was only found (`found`).
    """

    __slots__ = (
        *("_anchor", "_guessed", "_index", "_lately", "_seen", "_tokens"),
        *("at", "found", "rate", "sure", "won"),
    )

    def __init__(self, tokens: np.ndarray, seen: int) -> None:
        """`tokens` int32. The output begins behind `seen` tokens of its sequence."""
        self._tokens: list[int] = tokens.tolist()
        self._seen = seen
        self._lately: list[int] = []
        self._anchor = 0
        """Behind the last token that was right."""
        self._guessed = False
        self._index: dict[int, list[int]] | None = None
        """By token, the places behind it."""
        self.at = 0
        self.sure = False
        """Whether the last token was the expected one."""
        self.rate = _FIRST_RATE
        self.found = _FIRST_FOUND
        self.won = 0.0
        """What drafts have saved beyond what they cost, in tokens."""

    def follow(self, sequence: np.ndarray, length: int) -> None:
        """The sequence has `length` tokens now; what is new of it is output."""
        for token in sequence[self._seen : length].tolist():
            self._take(token)
        self._seen = length

    def draft(self, count: int) -> list[int]:
        """The next tokens that are expected, `count` at most."""
        return self._tokens[self.at : self.at + count] if self.at >= 0 else []

    def worth(self, price: float) -> int:
        """How long a draft should be, where a token more of it costs `price` of what one saves that
        is right: as long as the last one is right that often."""
        first = self.rate if self.sure else self.found
        if self.at < 0 or self.at >= len(self._tokens) or price >= first:
            return 0
        if self.won < -_MOST_LOST and not (self.sure and self.rate > _AGAIN):
            return 0
        if price <= 0 or self.rate > 1 - 1e-9:
            return MAX_DRAFT
        return min(1 + int(math.log(price / first) / math.log(self.rate)), MAX_DRAFT)

    def drafted(self, count: int, right: int, price: float) -> None:
        """Of a draft of `count` tokens, each at this price, `right` came."""
        self.won = min(self.won + right - price * count, _MOST_WON)

    def _take(self, token: int) -> None:
        self._lately = [*self._lately[1 - _GRAM :], token]
        at, expected = self.at, False
        if 0 <= at < len(self._tokens):
            expected = not self._guessed
            right = self._tokens[at] == token
            if self.sure:
                self.rate += _LEARNT * (right - self.rate)
            else:
                self.found += _LEARNT_FOUND * (right - self.found)
            if right:
                self.at = self._anchor = at + 1
                self.sure, self._guessed = True, False
                return
        self.at, self.sure, self._guessed = self._find(token), False, False
        if self.at < 0 and expected:
            self.at, self._guessed = at + 1, True

    def _find(self, token: int) -> int:
        """The place behind what the output ends with, -1 if there is none."""
        if self._index is None:
            self._index = _places(self._tokens)
        ends = self._index.get(token)
        if ends is None:
            return -1
        tokens, lately = self._tokens, self._lately
        behind = bisect_right(ends, self._anchor)
        found, longest = -1, 1
        for end in ends[behind : behind + _LOOKED_AT] + ends[:behind][: -_LOOKED_AT - 1 : -1]:
            length, most = 1, min(len(lately), end)
            while length < most and tokens[end - 1 - length] == lately[-1 - length]:
                length += 1
            if length > longest:
                found, longest = end, length
        if found < 0 and behind < len(ends) and ends[behind] <= self._anchor + _NEAR:
            return ends[behind]
        return found


def _places(tokens: list[int]) -> dict[int, list[int]]:
    """By token, the places behind it, ascending."""
    found: dict[int, list[int]] = {}
    for end, token in enumerate(tokens, 1):
        found.setdefault(token, []).append(end)
    return found
