"""The text of a checked constraint, in which mask and check go forwards and back together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from rootlace.runtime.constrained.matchers.islands import Islands
from rootlace.runtime.constrained.schema.json_text import WHITESPACES
from rootlace.runtime.constrained.schema.verify import Verifier
from rootlace.runtime.constrained.tokens import bitmask
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.contracts.matcher import Matcher

_GAPS = sorted({gap[at:].encode() for gap in WHITESPACES for at in range(len(gap))})
"""White space that may stand before a value, and what may be left of it."""
MAX_NUMBER = 24
"""So long may a whole text that is one number grow while it may not end."""


class CheckedText:
    """The tokens taken in, and what is excluded after them.

    Places are the nodes of the tree of all token sequences tried, so that what was excluded after
    one sequence is excluded after no other.
    """

    def __init__(
        self,
        inner: Matcher,
        verifier: Verifier | Islands,
        vocabulary: Vocabulary,
        long_keys: bool = False,
    ) -> None:
        """`long_keys`: each key that begins like others can go on otherwise."""
        self._long_keys = long_keys
        self._inner = inner
        self._verifier = verifier
        self._vocabulary = vocabulary
        self._words = bitmask.words_of(vocabulary.size)
        self._no_end = _without(self._words, vocabulary.eos_token_ids)
        self.tokens: list[int] = []
        self.lengths = [0]  # of the text before each place on the way
        self.way = [0]  # the nodes on the way; the last is where we stand
        self.forget()

    def forget(self) -> None:
        """Forget what is excluded. The text must be empty."""
        self._nodes: dict[tuple[int, int], int] = {}
        self._remaining: dict[int, np.ndarray] = {}  # int32 masks of what is not excluded

    # ------------------------------------------------------------ what may follow

    def fill_bitmask(self, out: np.ndarray) -> None:
        self._inner.fill_bitmask(out)
        remaining = self._remaining.get(self.way[-1])
        if remaining is not None:
            out &= remaining
        if self.ends_too_early():
            out &= self._no_end
        for tokens in self._taken():
            np.bitwise_and.at(out, tokens >> 5, ~(np.int32(1) << (tokens & 31)))

    def _taken(self) -> list[np.ndarray]:
        """The tokens that would make a key one that is there already, if there are any."""
        ends = [self._vocabulary.order.beginning_with(end) for end in self._verifier.taken()]
        return [tokens for tokens in ends if len(tokens)]

    def ends_too_early(self) -> bool:
        """Whether the mask alone would let the text end here."""
        return self._inner.is_accepting() and not self._verifier.accepts()

    def has_own_mask(self) -> bool:
        """Whether the mask here is not that of `inner`."""
        own = self.way[-1] in self._remaining or self.ends_too_early()
        return own or bool(self._taken())

    def can_follow(self) -> bool:
        """Whether there is anything that may follow, the end included."""
        # What the mask allows can go on; and behind a key that may not end, any may be longer.
        own = self.way[-1] in self._remaining or self.ends_too_early()
        if not own and (self._long_keys or not self._taken()):
            return True
        if self.ends_too_early() and self._verifier.number_length() > MAX_NUMBER:
            return False  # a number for which no end was found: nothing would ever refuse it
        words = np.zeros(self._words, np.int32)
        self.fill_bitmask(words)
        return bool(words.any())

    def excludes(self, token_id: int) -> bool:
        return self._excluded_at(self.way[-1], token_id)

    def not_excluded(self, tokens: list[int]) -> list[int]:
        """`tokens` up to the first that is excluded after those before it."""
        node: int | None = self.way[-1]
        for index, token in enumerate(tokens):
            if node is None:
                break
            if self._excluded_at(node, token):
                return tokens[:index]
            node = self._nodes.get((node, token))
        return tokens

    def _excluded_at(self, node: int, token_id: int) -> bool:
        remaining = self._remaining.get(node)
        if remaining is None or not 0 <= token_id < self._vocabulary.size:
            return False
        return not bitmask.allows(remaining, token_id)

    # ------------------------------------------------------------ forwards and back

    def go(self, token_id: int) -> None:
        """Note a token that `inner` and `verifier` have taken in."""
        step = (self.way[-1], token_id)
        self.way.append(self._nodes.setdefault(step, len(self._nodes) + 1))
        self.tokens.append(token_id)
        ends = token_id in self._vocabulary.eos_token_ids
        length = 0 if ends else len(self._vocabulary.token_bytes[token_id])
        self.lengths.append(self.lengths[-1] + length)

    def back(self, count: int) -> None:
        if count:
            self._inner.rollback(count)
            self._verifier.undo(count)
            for path in (self.tokens, self.lengths, self.way):
                del path[len(path) - count :]

    def exclude(self, tokens: np.ndarray) -> None:
        """Never again at this place."""
        mask = _without(self._words, tokens)
        kept = self._remaining.get(self.way[-1])
        self._remaining[self.way[-1]] = mask if kept is None else kept & mask

    def try_another_token(self) -> bool:
        """Go back to the nearest place where something can follow."""
        while not self.can_follow():
            if not self.tokens:
                return False
            token = self.tokens[-1]
            self.back(1)
            self.exclude(np.array([token], np.int32))
        return True

    def beginning(self, start: int) -> tuple[int, int]:
        """The place before the value that starts at byte `start`, and before the white space ahead
        of that value; and the bytes of other text between the two.

        Values that differ in that white space alone have these in common.
        """
        place = bisect_right(self.lengths, start) - 1
        while 0 < place <= len(self.tokens) and self._token(place - 1).isspace():
            place -= 1
        between = b"".join(map(self._token, range(place, len(self.tokens))))
        return place, len(between[: max(start - self.lengths[place], 0)].rstrip())

    def _token(self, index: int) -> bytes:
        return self._vocabulary.token_bytes[self.tokens[index]]

    def begin_differently(self, place: int, start: int) -> bool:
        """Go back to the first place from `place` on (but before this one) where, with what was
        tried there excluded, something can follow. False, with nothing changed, if none is."""
        tried = self.tokens[place:]
        text = b"".join(map(self._token, range(place, len(self.tokens))))
        self.back(len(tried))
        begun = text[: start - self.lengths[-1] + 1]
        for index, token in enumerate(tried):
            data = self._vocabulary.token_bytes[token]
            kept = self._remaining.get(self.way[-1])
            order, blanks = self._vocabulary.order, np.zeros(0, np.int32)
            same = np.array([token], np.int32)
            alike = order.beginning_with(begun if index == 0 else data[:1])
            if index == 0 and len(begun.strip()) == 1:
                # White space begins no other value.
                known = self._vocabulary.token_of
                blanks = np.array([known[gap] for gap in _GAPS if gap in known], np.int32)
                ways = [gap + begun.strip() for gap in (b"", *_GAPS)]
                alike = np.concatenate([alike, *map(order.beginning_with, ways)])
            for excluded in (alike, same):
                self.exclude(np.concatenate([excluded, blanks]))
                if self.can_follow():
                    return True
                if kept is None:
                    del self._remaining[self.way[-1]]
                else:
                    self._remaining[self.way[-1]] = kept
            self._inner.advance(token)
            self._verifier.feed(data)
            self.go(token)
        return False


def _without(words: int, tokens: np.ndarray | Sequence[int]) -> np.ndarray:
    """int32 [words]: a packed mask of all tokens but these."""
    bits = np.ones(words * 32, np.uint8)
    bits[np.asarray(tokens, np.int64)] = 0
    return bitmask.packed(bits)
