"""Where an output stands in the text that its client predicts, and what would come next there."""

from __future__ import annotations

import math

import numpy as np

MAX_DRAFT = 32
"""Tokens of a draft, at most."""
_FIRST_RATE, _FIRST_FOUND = 0.75, 0.6
"""How many of the predicted tokens are believed to be right while nothing is known."""
_LEARNT, _LEARNT_FOUND = 0.2, 0.3
"""How much one more token says of the next."""
_GRAM = 4
"""Tokens of the output that are looked for, at most."""
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
        *("at", "found", "rate", "sure"),
    )

    def __init__(self, tokens: np.ndarray, seen: int) -> None:
        """`tokens` int32. The output begins behind `seen` tokens of its sequence."""
        self._tokens = tokens
        self._seen = seen
        self._lately: list[int] = []
        self._anchor = 0
        """Behind the last token that was right."""
        self._guessed = False
        self._index: dict[int, np.ndarray] | None = None
        """By token, the places behind it."""
        self.at = 0
        self.sure = False
        """Whether the last token was the expected one."""
        self.rate = _FIRST_RATE
        self.found = _FIRST_FOUND

    def follow(self, sequence: np.ndarray, length: int) -> None:
        """The sequence has `length` tokens now; what is new of it is output."""
        for token in sequence[self._seen : length].tolist():
            self._take(token)
        self._seen = length

    def draft(self, count: int) -> list[int]:
        """The next tokens that are expected, `count` at most."""
        if self.at < 0:
            return []
        tokens: list[int] = self._tokens[self.at : self.at + count].tolist()
        return tokens

    def worth(self, price: float) -> int:
        """How long a draft should be, where a token more of it costs `price` of what one saves that
        is right: as long as the last one is right that often."""
        first = self.rate if self.sure else self.found
        if self.at < 0 or self.at >= len(self._tokens) or price >= first:
            return 0
        if price <= 0 or self.rate > 1 - 1e-9:
            return MAX_DRAFT
        return min(1 + int(math.log(price / first) / math.log(self.rate)), MAX_DRAFT)

    def _take(self, token: int) -> None:
        self._lately = [*self._lately[1 - _GRAM :], token]
        at, expected = self.at, False
        if 0 <= at < len(self._tokens):
            expected = not self._guessed
            right = int(self._tokens[at]) == token
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
        tokens, anchor, length = self._tokens, self._anchor, 1
        for before in self._lately[-2::-1]:
            longer = ends[ends > length]
            longer = longer[tokens[longer - length - 1] == before]
            if not len(longer):
                break
            ends, length = longer, length + 1
        behind = ends[ends > anchor]
        if length == 1:
            behind = behind[behind <= anchor + _NEAR]
        elif not len(behind):
            return int(ends[-1])
        return int(behind[0]) if len(behind) else -1


def _places(tokens: np.ndarray) -> dict[int, np.ndarray]:
    """By token, the places behind it, ascending."""
    order = np.argsort(tokens, kind="stable")
    distinct, starts = np.unique(tokens[order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(order + 1, starts[1:]), strict=True))
