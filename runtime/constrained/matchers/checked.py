"""Mask, verify, roll back: a mask that allows too much, and a check of the text as it comes.

The mask is that of any grammar; a verifier refuses what the mask cannot hold. What it refuses is
excluded at its place, and the text goes on from there or, if the same value fails again and again,
from its beginning, with another beginning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from rootlace.runtime.constrained.matchers.checked_text import CheckedText
from rootlace.runtime.constrained.matchers.islands import Islands
from rootlace.runtime.constrained.schema.verify import NUMBER_BYTES, Verifier, Violation
from rootlace.runtime.constrained.tokens import bitmask
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.contracts.matcher import Grammar, Matcher
from rootlace.runtime.contracts.plan import MaskRow

PATIENCE = 3
"""After so many refusals of one value it is begun anew; after so many beginnings, the value that
contains it."""
BASE_BYTES = 1 << 14
_NOT_NUMBER = [bytes((byte,)) for byte in range(256) if byte not in NUMBER_BYTES]


class CheckedGrammar:
    """The texts of `inner` that a verifier accepts; see `contracts.matcher.Grammar`."""

    def __init__(
        self,
        inner: Grammar,
        verifier_factory: Callable[[], Verifier | Islands],
        vocabulary: Vocabulary,
        max_retreats: int,
        keys_only: bool = False,
        long_keys: bool = False,
    ) -> None:
        """`keys_only`: all that is checked is that no object has a key twice. The mask holds that,
        but for tokens that hold a whole key and for odd spellings, each of which is refused at its
        place: no text is taken back. `long_keys`: as `CheckedText` has it.
        """
        self.inner = inner
        self._keys_only = keys_only
        self._long_keys = long_keys
        self._verifier_factory = verifier_factory
        self._vocabulary = vocabulary
        self._max_retreats = max_retreats

    @property
    def backend(self) -> str:
        return self.inner.backend if self._keys_only else f"{self.inner.backend}+checked"

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + BASE_BYTES

    def matcher(self) -> CheckedMatcher:
        return CheckedMatcher(
            self.inner.matcher(),
            self._verifier_factory(),
            self._vocabulary,
            self._max_retreats,
            self._keys_only,
            self._long_keys,
        )


class CheckedMatcher(Matcher):
    """See `contracts.matcher.Matcher`. It decides what a refusal excludes, and where to go on."""

    def __init__(
        self,
        inner: Matcher,
        verifier: Verifier | Islands,
        vocabulary: Vocabulary,
        max_retreats: int,
        keys_only: bool = False,
        long_keys: bool = False,
    ) -> None:
        self._inner = inner
        self._keys_only = keys_only
        self._verifier = verifier
        self._vocabulary = vocabulary
        self._max_retreats = max_retreats
        self._text = CheckedText(inner, verifier, vocabulary, long_keys)
        self._refused: tuple[int, Violation] | None = None
        self._error = ""
        self.reset()

    # ------------------------------------------------------------ masks

    def allowed_mask(self) -> np.ndarray:
        return bitmask.filled(self._text.fill_bitmask, self._vocabulary.size)

    def fill_bitmask(self, out: np.ndarray) -> None:
        self._text.fill_bitmask(bitmask.writable(out, self._vocabulary.size))

    def mask_row(self) -> MaskRow | None:
        return None if self._text.has_own_mask() else self._inner.mask_row()

    def prepare_mask(self) -> None:
        self._inner.prepare_mask()

    # ------------------------------------------------------------ forwards

    def advance(self, token_id: int) -> bool:
        self._refused = None
        if self._text.excludes(token_id):
            self._error = f"token {token_id} was excluded here by an earlier check"
            return False
        ends = token_id in self._vocabulary.eos_token_ids
        if ends and self._text.ends_too_early():
            return self._refuse(token_id, self._verifier.violation())
        if not self._inner.advance(token_id):
            self._error = self._inner.error()
            return False
        data = b"" if ends else self._vocabulary.token_bytes[token_id] or b"\xff[%d]" % token_id
        violation = self._verifier.feed(data)
        if violation is not None:
            self._inner.rollback(1)
            return self._refuse(token_id, violation)
        self._text.go(token_id)
        if not ends and not self._text.can_follow():
            violation = self._verifier.violation()
            self._text.back(1)
            return self._refuse(token_id, violation)
        self._error = ""
        return True

    def try_advance_fast(self, token_id: int, jumps: bool) -> bool:
        if self._text.has_own_mask() or not self._inner.try_advance_fast(token_id, jumps):
            return False
        if self._verifier.feed(self._vocabulary.token_bytes[token_id]) is not None:
            self._inner.rollback(1)
            return False
        self._text.go(token_id)
        if not self._text.can_follow():
            self._text.back(1)
            return False
        self._refused, self._error = None, ""
        return True

    def _refuse(self, token_id: int, violation: Violation | None) -> bool:
        if violation is None:
            violation = Violation(0, 0, "", "#", "nothing can follow")
        self._refused = (token_id, violation)
        self._error = f"json_schema: {violation}"
        return False

    def is_accepting(self) -> bool:
        return self._inner.is_accepting() and self._verifier.accepts()

    def is_finished(self) -> bool:
        return self._inner.is_finished() and self._verifier.accepts()

    def forced_text(self) -> bytes:
        return self._inner.forced_text()

    def forced_tokens(self) -> list[int]:
        # Where one of them is excluded, the text needs another spelling.
        return self._text.not_excluded(self._inner.forced_tokens())

    # ------------------------------------------------------------ backwards

    def rollback(self, count: int) -> None:
        taken = len(self._text.tokens)
        if not 0 <= count <= taken:
            raise ValueError(f"cannot undo {count} of {taken} tokens")
        self._refused = None
        self._error = ""
        self._text.back(count)

    def reset(self) -> None:
        self.rollback(len(self._text.tokens))
        self._text.forget()
        self._failures: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._restarts: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._retreats = 0

    def can_retreat(self) -> bool:
        return not self._keys_only  # it draws a token anew, but takes nothing back

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
        text = self._text
        before = len(text.tokens)
        text.exclude(self._refused_with(token_id, violation))
        if not self._keys_only and self._another_beginning(violation):
            self._error = ""
            return before - len(text.tokens)
        if text.try_another_token():
            self._error = ""
            return before - len(text.tokens)
        text.back(len(text.tokens))
        self._error = (
            f"json_schema: {violation} (nothing else is left to try after {self._retreats} tries)"
        )
        return None

    def _another_beginning(self, violation: Violation) -> bool:
        """If the value has failed often enough, go back to the first place in it, or in a value
        around it, where it can begin differently. False if it is not time, or there is none."""
        starts = [violation.start]
        starts += [start for start in self._verifier.open_starts() if start < violation.start]
        counts = self._failures
        way = self._text.way
        for start in starts:
            place, before = self._text.beginning(start)
            key = (way[min(place, len(way) - 1)], before)
            counts[key] += 1
            if counts[key] % PATIENCE and violation.length:  # without: there is no way on
                return False
            counts = self._restarts
            if self._restarts[key] % PATIENCE == PATIENCE - 1 and start != starts[-1]:
                self._restarts[key] += 1
                continue
            if self._text.begin_differently(place, start):
                return True
        return False

    def _refused_with(self, token_id: int, violation: Violation) -> np.ndarray:
        """int32: the tokens that are wrong here for the same reason."""
        prefix = self._vocabulary.token_bytes[token_id][: violation.length]
        if not prefix:
            return np.array([token_id], np.int32)
        order = self._vocabulary.order
        if violation.number:
            return np.concatenate([order.beginning_with(prefix[:-1] + b) for b in _NOT_NUMBER])
        return order.beginning_with(prefix)

    def error(self) -> str:
        return self._error or self._inner.error()
