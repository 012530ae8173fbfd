"""Mask, verify, roll back: a mask that allows too much, and a check of the text as it comes.

The mask is that of any grammar; a verifier refuses what the mask cannot hold. What it refuses is
excluded at its place, and the text goes on from there or, if the same value fails again and again,
from its beginning, with another beginning.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from rootlace.runtime.constrained.schema.scan import NUMBER_BYTES
from rootlace.runtime.constrained.schema.verify import Verifier, Violation
from rootlace.runtime.constrained.tokens import bitmask
from rootlace.runtime.constrained.tokens.order import TokenOrder
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.contracts.matcher import Grammar, Matcher
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow

PATIENCE = 3
"""After so many refusals of one value it is begun anew; after so many beginnings, the value that
contains it."""
MAX_NUMBER = 24
"""So long may a whole text that is one number grow while it may not end."""
BASE_BYTES = 1 << 14
_NOT_NUMBER = frozenset(range(256)) - NUMBER_BYTES


class CheckedGrammar:
    """The texts of `inner` that a verifier accepts; see `contracts.matcher.Grammar`."""

    def __init__(
        self,
        inner: Grammar,
        verifier_factory: Callable[[], Verifier],
        vocabulary: Vocabulary,
        max_retreats: int,
    ) -> None:
        self._inner = inner
        self._verifier_factory = verifier_factory
        self._vocabulary = vocabulary
        self._max_retreats = max_retreats

    @property
    def backend(self) -> str:
        return f"{self._inner.backend}+checked"

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes + BASE_BYTES

    def matcher(self) -> CheckedMatcher:
        return CheckedMatcher(
            self._inner.matcher(), self._verifier_factory(), self._vocabulary, self._max_retreats
        )


class CheckedMatcher:
    """See `contracts.matcher.Matcher`.

    Places are the nodes of the tree of all token sequences tried, so that what was excluded after
    one sequence is excluded after no other.
    """

    ready: MaskRow | None = None

    def __init__(
        self, inner: Matcher, verifier: Verifier, vocabulary: Vocabulary, max_retreats: int
    ) -> None:
        self._inner = inner
        self._verifier = verifier
        self._vocabulary = vocabulary
        self._max_retreats = max_retreats
        self._words = bitmask.words_of(vocabulary.size)
        self._no_end = _without(self._words, vocabulary.eos_token_ids)
        self._tokens: list[int] = []
        self._lengths = [0]  # of the text before each place on the way
        self._way = [0]  # the nodes on the way; the last is where we stand
        self._forget()

    def _forget(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self._remaining: dict[int, np.ndarray] = {}  # int32 masks of what is not excluded
        self._failures: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._restarts: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._retreats = 0
        self._refused: tuple[int, Violation] | None = None
        self._error = ""

    # ------------------------------------------------------------ masks

    def allowed_mask(self) -> np.ndarray:
        words = np.zeros(self._words, np.int32)
        self.fill_bitmask(words)
        return bitmask.unpacked(words, self._vocabulary.size)

    def fill_bitmask(self, out: np.ndarray) -> None:
        out = bitmask.writable(out, self._vocabulary.size)
        self._inner.fill_bitmask(out)
        remaining = self._remaining.get(self._way[-1])
        if remaining is not None:
            out &= remaining
        if self._ends_too_early():
            out &= self._no_end

    def automaton(self) -> AutomatonState | None:
        return None

    def mask_row(self) -> MaskRow | None:
        if self._way[-1] in self._remaining or self._ends_too_early():
            return None
        return self._inner.mask_row()

    def prepare_mask(self) -> None:
        self._inner.prepare_mask()

    def _ends_too_early(self) -> bool:
        """Whether the mask alone would let the text end here."""
        return self._inner.is_accepting() and not self._verifier.accepts()

    # ------------------------------------------------------------ forwards

    def advance(self, token_id: int) -> bool:
        self._refused = None
        if self._is_excluded(token_id, self._way[-1]):
            self._error = f"token {token_id} was excluded here by an earlier check"
            return False
        ends = token_id in self._vocabulary.eos_token_ids
        if ends and self._ends_too_early():
            return self._refuse(token_id, self._verifier.violation())
        if not self._inner.advance(token_id):
            self._error = self._inner.error()
            return False
        data = b"" if ends else self._vocabulary.token_bytes[token_id]
        violation = self._verifier.feed(data)
        if violation is not None:
            self._inner.rollback(1)
            return self._refuse(token_id, violation)
        self._go(token_id)
        if not ends and not self._can_follow():
            self._back(1)
            self._verifier.feed(data)
            violation = self._verifier.violation()
            self._verifier.undo(1)
            return self._refuse(token_id, violation)
        self._error = ""
        return True

    def _is_excluded(self, token_id: int, node: int) -> bool:
        remaining = self._remaining.get(node)
        if remaining is None or not 0 <= token_id < self._vocabulary.size:
            return False
        return not (int(remaining[token_id >> 5]) >> (token_id & 31)) & 1

    def _refuse(self, token_id: int, violation: Violation | None) -> bool:
        if violation is None:
            violation = Violation(0, 0, "", "#", "nothing can follow")
        self._refused = (token_id, violation)
        self._error = f"json_schema: {violation}"
        return False

    def _go(self, token_id: int) -> None:
        """Note a token that the inner matcher and the verifier have taken in."""
        step = (self._way[-1], token_id)
        self._way.append(self._nodes.setdefault(step, len(self._nodes) + 1))
        self._tokens.append(token_id)
        data = b"" if token_id in self._vocabulary.eos_token_ids else self._data(token_id)
        self._lengths.append(self._lengths[-1] + len(data))

    def _data(self, token_id: int) -> bytes:
        return self._vocabulary.token_bytes[token_id]

    def _can_follow(self) -> bool:
        """Whether there is anything that may follow, the end included."""
        too_early = self._ends_too_early()
        if self._way[-1] not in self._remaining and not too_early:
            return True  # what the mask allows can go on
        if too_early and self._verifier.number_length() > MAX_NUMBER:
            return False  # a number for which no end was found: nothing would ever refuse it
        words = np.zeros(self._words, np.int32)
        self.fill_bitmask(words)
        return bool(words.any())

    def try_advance_fast(self, token_id: int, jumps: bool) -> bool:
        return False

    def is_accepting(self) -> bool:
        return self._inner.is_accepting() and self._verifier.accepts()

    def is_finished(self) -> bool:
        return self._inner.is_finished() and self._verifier.accepts()

    def forced_text(self) -> bytes:
        return self._inner.forced_text()

    def forced_tokens(self) -> list[int]:
        tokens = self._inner.forced_tokens()
        node: int | None = self._way[-1]
        for index, token in enumerate(tokens):
            if node is None:
                break
            remaining = self._remaining.get(node)
            if remaining is not None and not (int(remaining[token >> 5]) >> (token & 31)) & 1:
                return tokens[:index]  # excluded there: the text needs another spelling
            node = self._nodes.get((node, token))
        return tokens

    # ------------------------------------------------------------ backwards

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self._tokens):
            raise ValueError(f"cannot undo {count} of {len(self._tokens)} tokens")
        self._refused = None
        self._error = ""
        self._back(count)

    def reset(self) -> None:
        self.rollback(len(self._tokens))
        self._forget()

    def _back(self, count: int) -> None:
        if count:
            self._inner.rollback(count)
            self._verifier.undo(count)
            for path in (self._tokens, self._lengths, self._way):
                del path[len(path) - count :]

    def can_retreat(self) -> bool:
        return True

    def retreat(self) -> int | None:
        if self._refused is None:
            self._error = self._error or "no token was refused that the mask allowed"
            return None
        token_id, violation = self._refused
        self._refused = None
        if self._retreats >= self._max_retreats:
            self._error = f"json_schema: {violation} (given up after {self._retreats} tries)"
            return None
        self._retreats += 1
        before = len(self._tokens)
        self._exclude(self._refused_with(token_id, violation))
        if self._another_beginning(violation) or self._another_token():
            self._error = ""
            return before - len(self._tokens)
        self._back(len(self._tokens))
        self._error = (
            f"json_schema: {violation} (nothing else is left to try after {self._retreats} tries)"
        )
        return None

    def _another_token(self) -> bool:
        """Go back to the nearest place where something can follow."""
        while not self._can_follow():
            if not self._tokens:
                return False
            token = self._tokens[-1]
            self._back(1)
            self._exclude(np.array([token], np.int32))
        return True

    def _another_beginning(self, violation: Violation) -> bool:
        """If the value has failed often enough, go back to the first place in it, or in a value
        around it, where it can begin differently. False if it is not time, or there is none."""
        starts = [violation.start]
        starts += [start for start in self._verifier.open_starts() if start < violation.start]
        counts = self._failures
        for start in starts:
            place = bisect_right(self._lengths, start) - 1
            key = (self._way[min(place, len(self._way) - 1)], start)
            counts[key] += 1
            if counts[key] % PATIENCE and violation.length:  # without: there is no way on
                return False
            counts = self._restarts
            if self._restarts[key] % PATIENCE == PATIENCE - 1 and start != starts[-1]:
                self._restarts[key] += 1
                continue
            if self._begin_differently(place, start):
                return True
        return False

    def _begin_differently(self, place: int, start: int) -> bool:
        """Go back to the first place from `place` on (but before this one) where, with what was
        tried there excluded, something can follow. False, with nothing changed, if none is."""
        tried = self._tokens[place:]
        self._back(len(tried))
        for index, token in enumerate(tried):
            data = self._data(token)
            begun = data[: start - self._lengths[-1] + 1] if index == 0 else data[:1]
            kept = self._remaining.get(self._way[-1])
            for excluded in (self._order.beginning_with(begun), np.array([token], np.int32)):
                self._exclude(excluded)
                if self._can_follow():
                    return True
                if kept is None:
                    del self._remaining[self._way[-1]]
                else:
                    self._remaining[self._way[-1]] = kept
            self._inner.advance(token)
            self._verifier.feed(data)
            self._go(token)
        return False

    @property
    def _order(self) -> TokenOrder:
        return self._vocabulary.order

    def _refused_with(self, token_id: int, violation: Violation) -> np.ndarray:
        """int32: the tokens that are wrong here for the same reason."""
        prefix = self._data(token_id)[: violation.length]
        if not prefix:
            return np.array([token_id], np.int32)
        if violation.number:
            return self._order.going_on_with(prefix[:-1], _NOT_NUMBER)
        return self._order.beginning_with(prefix)

    def _exclude(self, tokens: np.ndarray) -> None:
        """Never again at this place."""
        mask = _without(self._words, tokens)
        kept = self._remaining.get(self._way[-1])
        self._remaining[self._way[-1]] = mask if kept is None else kept & mask

    def error(self) -> str:
        return self._error or self._inner.error()


def _without(words: int, tokens: np.ndarray | Sequence[int]) -> np.ndarray:
    """int32 [words]: a packed mask of all tokens but these."""
    bits = np.ones(words * 32, np.uint8)
    bits[np.asarray(tokens, np.int64)] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)
