"""Mask, verify, roll back: combine a mask that allows too much with a check of the text.

The mask belongs to any grammar; a verifier refuses text that the mask cannot exclude. The matcher
excludes the refused text at its place and continues from there. If the same value fails repeatedly,
the matcher begins the value again, differently.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import UNKNOWN, Grammar, Matcher
from rootlace.runtime.contracts.plan import MaskRow
from rootlace.runtime.structured.gbnf import with_exact_schemas
from rootlace.runtime.structured.json_schema.json_text import WHITESPACES
from rootlace.runtime.structured.json_schema.validate import (
    NUMBER_BYTES,
    UniqueKeys,
    Verifier,
    Violation,
)
from rootlace.runtime.structured.llguidance_backend import (
    Parser,
    SharedLexer,
    parser_limits,
    reason,
)
from rootlace.runtime.structured.vocabulary import vocabulary as bitmask
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.errors import InvalidConstraint

# Islands ------------------------------------------------------------------------------------------
#
# Distinct keys in JSON within other text: in structural tags, in `%json` of grammars.
#
# Another parser of llguidance finds the JSON values in a text. Its grammar is the same, with one
# token for each JSON value. A text may have several readings. Each is followed, and a text is
# refused if each reading has a key twice.


MAX_READINGS = 32
"""Most readings followed at one place."""
_JSON, _END, _SPECIAL = 256, 257, 258
"""Tokens for JSON, its end and special tokens. Bytes are below; from `_SPECIAL` on are the
vocabulary's."""
_MARK = {"rootlace": "island"}
_ISLAND = re.compile(r'%json\s*\{"rootlace": "island"\}')
_TOKENS = re.compile(r"<\[([0-9,\-]+)\]>")
_BEGINS = frozenset(b' \t\n\r{["-0123456789tfn')
_NAME = re.compile(rb"\xff\[(\d+)\]")
"""Form of special tokens among bytes."""


class IslandGrammar:
    """Grammar with one token for each JSON value. Thread-safe."""

    def __init__(
        self, lark: str, config: ConstraintConfig, special: frozenset[int], rules: UniqueKeys
    ) -> None:
        """Make the grammar. `special`: the special tokens that a text may hold. Raises
        InvalidConstraint."""
        self.rules = rules
        self.numbers = {id_: _SPECIAL + index for index, id_ in enumerate(sorted(special))}
        self.size = _SPECIAL + len(self.numbers)
        marked = with_exact_schemas(lark, lambda *_: _MARK)
        if special:
            marked = _TOKENS.sub(self._renumbered, marked)
        source = LLMatcher.grammar_from_lark(_ISLAND.sub(f"<[{_JSON}]>", marked))
        tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokens(self.size)), n_vocab=self.size, eos_token=[_END]
        )
        limits = parser_limits(config)
        self.lexer = SharedLexer(lambda: LLMatcher(tokenizer, source, log_level=0, limits=limits))
        if self.lexer.prototype().is_error():
            raise InvalidConstraint(reason(self.lexer.prototype()))

    def _renumbered(self, found: re.Match[str]) -> str:
        ids: list[int] = []
        for part in found[1].split(","):
            first, _, last = part.partition("-")
            ids += range(int(first), int(last or first) + 1)
        return f"<[{','.join(str(self.numbers[id_]) for id_ in ids)}]>"


class _Tokens:
    """Tokenizer interface that llguidance's wrapper expects."""

    bos_token_id, eos_token_id = None, _END

    def __init__(self, size: int) -> None:
        self.special_token_ids = [*range(_JSON, size)]
        names = [b"[%d]" % id_ for id_ in self.special_token_ids]
        self.tokens = [*(bytes((byte,)) for byte in range(_JSON)), *names]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class _Reading:
    """Reading of a text. `parser` stands behind all of the text, or, with `json`, before the JSON
    value that `json` is reading."""

    def __init__(self, parser: Parser, json: Verifier | None = None) -> None:
        self.parser = parser
        self.json = json
        self.feeds = 0
        """Count of feeds that `json` has taken in."""

    def place(self) -> tuple[int, int]:
        return len(self.parser.tokens), self.feeds

    def back(self, tokens: int, taken: int) -> None:
        if len(self.parser.tokens) > tokens:
            self.parser.undo(len(self.parser.tokens) - tokens)
        if self.json is not None and self.feeds > taken:
            self.json.undo(self.feeds - taken)
            self.feeds = taken


_Snapshot = tuple[tuple[_Reading, tuple[int, int]], ...]
"""All readings and their places. Empty if there are too many readings, or too large ones, to
follow; the rest of the text is then unchecked."""


class Islands:
    """Verifier of the JSON values in a text, with the interface of `Verifier`. Not thread-safe."""

    has_ahead = True

    def __init__(self, grammar: IslandGrammar) -> None:
        self._grammar = grammar
        self._readings = [_Reading(Parser(grammar.lexer, grammar.size))]
        self._beyond = False  # the bounds of the parser
        self._history = [self._snapshot()]

    def feed(self, data: bytes) -> Violation | None:
        """Take in the next bytes; a special token is `\\xff[id]`. A violation changes nothing."""
        name = _NAME.fullmatch(data)
        number = self._grammar.numbers.get(int(name[1])) if name else None
        refused = Violation(0, 0, "", "#", "the text has no reading")
        readings, self._beyond = self._readings, False
        only = readings[0] if len(readings) == 1 and number is None else None
        if only is not None and only.json is not None and only.json.is_plain(data):
            only.json.feed(data)
            only.feeds += 1
            self._history.append(self._snapshot())
            return None
        for index, token in enumerate(data if number is None else (number,)):
            if not readings:
                break
            after: list[_Reading] = []
            for reading in readings:
                violation = self._step(reading, token, after)
                refused = violation or refused
            readings = after if len(after) <= MAX_READINGS and not self._beyond else []
            if not after and not self._beyond:
                self._restore()
                length = len(data) if name else index + 1
                return Violation(length, refused.start, "", "#", refused.message)
        self._readings = readings
        self._history.append(self._snapshot())
        return None

    def _step(self, reading: _Reading, token: int, after: list[_Reading]) -> Violation | None:
        """Add the readings that continue with a token to `after`."""
        if reading.json is not None:
            return self._within(reading, token, after)
        parser = reading.parser
        if token in _BEGINS and parser.matcher.validate_tokens([_JSON]) == 1:
            violation = self._within(
                _Reading(parser.copy(), Verifier(self._grammar.rules)), token, after
            )
        else:
            violation = None
        if parser.take(token):
            after.append(reading)
        self._beyond = self._beyond or parser.matcher.is_error()
        return violation

    def _within(self, reading: _Reading, token: int, after: list[_Reading]) -> Violation | None:
        json = reading.json
        assert json is not None
        behind = None
        if json.accepts():
            # The byte after the value belongs to the text behind the value.
            parser = reading.parser.copy()
            if parser.take(_JSON):
                behind = _Reading(parser)
        violation = None
        if token < _JSON:
            violation = json.feed(bytes((token,)))
            if violation is None:
                reading.feeds += 1
                after.append(reading)
        if behind is not None:
            violation = self._step(behind, token, after) or violation
        return violation

    def undo(self, count: int) -> None:
        """Forget the last `count` feeds."""
        if count:
            del self._history[len(self._history) - count :]
            self._restore()

    def _snapshot(self) -> _Snapshot:
        return tuple((reading, reading.place()) for reading in self._readings)

    def _restore(self) -> None:
        for reading, place in self._history[-1]:
            reading.back(*place)
        self._readings = [reading for reading, _ in self._history[-1]]

    def ahead(self) -> tuple[list[bytes], int | None]:
        """Return the continuations that all readings would refuse; see `Verifier.ahead`."""
        endings: list[bytes] | None = None
        digits: int | None = -1
        for reading in self._readings:
            inner, left = ([], None) if reading.json is None else reading.json.ahead()
            endings = inner if endings is None else [end for end in endings if end in inner]
            digits = None if left is None or digits is None else max(digits, left)
        return endings or [], digits if self._readings else None

    # The mask of the grammar knows where the text may end.

    def violation(self) -> Violation | None:
        return None

    def accepts(self) -> bool:
        return True

    def open_starts(self) -> list[int]:
        return []


# Checked ------------------------------------------------------------------------------------------


PATIENCE = 3
"""Refusals of one value after which the value begins again; then beginnings after which the
enclosing value does."""
BASE_BYTES = 1 << 14
_GAPS = sorted({gap[at:].encode() for gap in WHITESPACES for at in range(len(gap))})
"""White space that may stand before a value, and its endings."""
_NOT_NUMBER = [bytes((byte,)) for byte in range(256) if byte not in NUMBER_BYTES]


class CheckedGrammar(msgspec.Struct, frozen=True, eq=False):
    """Grammar of the texts of `inner` that a verifier accepts; see `contracts.matcher.Grammar`."""

    inner: Grammar
    verifier_factory: Callable[[], Verifier | Islands]
    vocabulary: Vocabulary
    max_retreats: int
    keys_only: bool = False
    """Whether only `UniqueKeys` are checked.

    The mask then excludes repeated keys, except in tokens that hold a whole key, and in unusual
    escapes. Both are refused at their place, so no text is rolled back.
    """
    long_keys: bool = False
    """Whether each key with the beginning of another key can also continue differently."""

    @property
    def backend(self) -> str:
        return self.inner.backend if self.keys_only else f"{self.inner.backend}+checked"

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + BASE_BYTES

    def matcher(self) -> CheckedMatcher:
        return CheckedMatcher(self)


class _Limits(NamedTuple):
    """Limits on the next token besides the mask of `inner`.

    `early`: the mask alone would allow the text to end. `taken`: tokens that would repeat a key, or
    make a number too long. `excluded`: int32 mask of all tokens that are not excluded. `open`: some
    token is certainly allowed.
    """

    early: bool
    taken: list[np.ndarray]
    excluded: np.ndarray | None
    open: bool


class CheckedMatcher(Matcher):
    """Matcher of a mask with a verifier; see `contracts.matcher.Matcher`.

    Mask and verifier advance and roll back together. A place is a node in the tree of all token
    sequences tried, so an exclusion holds after one sequence only.
    """

    def __init__(self, grammar: CheckedGrammar) -> None:
        self._grammar = grammar
        self.can_rollback = not grammar.keys_only
        """Whether tokens may be taken back; otherwise the matcher only draws a token again."""
        self._vocabulary = grammar.vocabulary
        self._inner = grammar.inner.matcher()
        self._verifier = grammar.verifier_factory()
        self._tokens: list[int] = []
        self._path = [0]  # the nodes on the way; the last is the current place
        self._nodes: dict[tuple[int, int], int] = {}
        self._remaining: dict[int, np.ndarray] = {}  # int32 masks of the tokens not excluded
        self._refused: tuple[int, Violation] | None = None
        self._error = ""
        self._failures: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._restarts: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._rollbacks = 0
        self.place = self._inner.place
        self._limits: _Limits | None = None
        if not grammar.keys_only:
            self._look()

    def _look(self) -> None:
        """Find out the limits of mask and check at this place."""
        grammar, order = self._grammar, self._vocabulary.order
        excluded = self._remaining.get(self._path[-1])
        # If only keys are checked, the mask knows where the text may end.
        early = (
            not grammar.keys_only and self._inner.is_accepting() and not self._verifier.accepts()
        )
        taken: list[np.ndarray] = []
        is_number = False
        if self._verifier.has_ahead:
            endings, digits = self._verifier.ahead()
            for end in endings:
                if len(found := order.beginning_with(end)):
                    taken.append(found)
            longer = self._vocabulary.digits
            if digits is not None and digits + 1 < len(longer) - 1:
                taken.append(longer[digits + 1])
                is_number = True
        self._limits = None
        self.place = self._inner.place
        if early or taken or excluded is not None:
            # A text within the mask can continue; a key that may not end here may get longer.
            is_open = not (early or is_number) and excluded is None and grammar.long_keys
            self._limits, self.place = _Limits(early, taken, excluded, is_open), UNKNOWN

    # ------------------------------------------------------------ masks

    def allowed_mask(self) -> np.ndarray:
        return bitmask.filled(self.fill_bitmask, self._vocabulary.size)

    def fill_bitmask(self, out: np.ndarray) -> None:
        out = bitmask.writable(out, self._vocabulary.size)
        self._inner.fill_bitmask(out)
        limits = self._limits
        if limits is None:
            return
        if limits.excluded is not None:
            out &= limits.excluded
        if limits.early:
            out &= _without(len(out), self._vocabulary.eos_token_ids)
        for tokens in limits.taken:
            np.bitwise_and.at(out, tokens >> 5, ~(np.int32(1) << (tokens & 31)))

    def mask_row(self) -> MaskRow | None:
        return self._inner.mask_row() if self._limits is None else None

    def prepare_mask(self) -> None:
        self._inner.prepare_mask()

    def _can_follow(self) -> bool:
        """Return whether any token, including the end, may follow."""
        if self._limits is None or self._limits.open:
            return True
        words = np.zeros(bitmask.words_of(self._vocabulary.size), np.int32)
        self.fill_bitmask(words)
        return bool(words.any())

    # ------------------------------------------------------------ forwards

    def advance(self, token_id: int) -> bool:
        self._refused = None
        vocabulary, limits = self._vocabulary, self._limits
        ends = token_id in vocabulary.eos_token_ids
        if limits is not None:
            excluded, known = limits.excluded, 0 <= token_id < vocabulary.size
            if excluded is not None and known and not bitmask.allows(excluded, token_id):
                self._error = f"token {token_id} was excluded here by an earlier check"
                return False
            if ends and limits.early:
                return self._refuse(token_id, self._verifier.violation())
        if not self._inner.advance(token_id):
            self._error = self._inner.error()
            return False
        data = b"" if ends else vocabulary.token_bytes[token_id] or b"\xff[%d]" % token_id
        violation = self._verifier.feed(data)
        if violation is not None:
            self._inner.rollback(1)
            return self._refuse(token_id, violation)
        path = self._path
        path.append(self._nodes.setdefault((path[-1], token_id), len(self._nodes) + 1))
        self._tokens.append(token_id)
        self._error = ""
        if self._grammar.keys_only and not (self._verifier.has_ahead or self._remaining):
            self._limits, self.place = None, self._inner.place
            return True
        self._look()
        if self._limits is None or ends or self._can_follow():
            return True
        violation = self._verifier.violation()
        self._back(1)
        return self._refuse(token_id, violation)

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
        tokens = self._inner.forced_tokens()
        node: int | None = self._path[-1]
        for index, token in enumerate(tokens if self._remaining else ()):
            if node is None:
                break
            remaining = self._remaining.get(node)
            if remaining is not None and not bitmask.allows(remaining, token):
                return tokens[:index]  # the text needs another spelling
            node = self._nodes.get((node, token))
        return tokens

    # ------------------------------------------------------------ backwards

    def rollback(self, count: int) -> None:
        taken = len(self._tokens)
        if not 0 <= count <= taken:
            raise ValueError(f"cannot undo {count} of {taken} tokens")
        self._refused = None
        self._error = ""
        self._back(count)

    def _back(self, count: int) -> None:
        if count:
            self._inner.rollback(count)
            self._verifier.undo(count)
            del self._tokens[-count:], self._path[-count:]
            self._look()

    def reset(self) -> None:
        self.rollback(len(self._tokens))
        self._nodes.clear()
        self._remaining.clear()
        self._look()
        self._failures.clear()
        self._restarts.clear()
        self._rollbacks = 0

    def rollback_refused(self) -> int | None:
        if self._refused is None:
            self._error = self._error or "no token was refused that the mask allowed"
            return None
        token_id, violation = self._refused
        self._refused = None
        if self._rollbacks >= self._grammar.max_retreats:
            self._error = f"json_schema: {violation} (given up after {self._rollbacks} tries)"
            return None
        self._rollbacks += 1
        before = len(self._tokens)
        self._exclude(self._refused_with(token_id, violation))
        begun = not self._grammar.keys_only and self._another_beginning(violation)
        if begun or self._another_token():
            self._error = ""
            return before - len(self._tokens)
        self._back(len(self._tokens))
        self._error = (
            f"json_schema: {violation} (nothing else is left to try after {self._rollbacks} tries)"
        )
        return None

    def _refused_with(self, token_id: int, violation: Violation) -> np.ndarray:
        """Return the tokens that are wrong here for the same reason, int32."""
        prefix = self._vocabulary.token_bytes[token_id][: violation.length]
        if not prefix:
            return np.array([token_id], np.int32)
        order = self._vocabulary.order
        if violation.number:
            return np.concatenate([order.beginning_with(prefix[:-1] + b) for b in _NOT_NUMBER])
        return order.beginning_with(prefix)

    def _exclude(self, tokens: np.ndarray) -> None:
        """Exclude tokens at this place for ever."""
        mask = _without(bitmask.words_of(self._vocabulary.size), tokens)
        remaining = self._remaining.get(self._path[-1])
        self._remaining[self._path[-1]] = mask if remaining is None else remaining & mask
        self._look()

    def _another_token(self) -> bool:
        """Go back to the nearest place where some token can follow."""
        while not self._can_follow():
            if not self._tokens:
                return False
            token = self._tokens[-1]
            self._back(1)
            self._exclude(np.array([token], np.int32))
        return True

    def _another_beginning(self, violation: Violation) -> bool:
        """Go back to a place where a value can begin differently, if the value has failed often
        enough.

        Values are tried from the failed one outwards. Returns False if it is too early, or without
        such a place.
        """
        starts = [violation.start]
        starts += [start for start in self._verifier.open_starts() if start < violation.start]
        counts = self._failures
        lengths = self._lengths()
        for start in starts:
            place, before = self._beginning(start, lengths)
            key = (self._path[place], before)
            counts[key] += 1
            if counts[key] % PATIENCE and violation.length:  # without: no token can follow
                return False
            counts = self._restarts
            if self._restarts[key] % PATIENCE == PATIENCE - 1 and start != starts[-1]:
                self._restarts[key] += 1
                continue
            if self._begin_differently(place, start - lengths[place]):
                return True
        return False

    def _lengths(self) -> list[int]:
        """Return the length in bytes of the text before each place."""
        sizes = (len(self._vocabulary.token_bytes[token]) for token in self._tokens)
        return list(accumulate(sizes, initial=0))

    def _beginning(self, start: int, lengths: list[int]) -> tuple[int, int]:
        """Return the place before the value at byte `start`, and the length of the other text
        between.

        The place is before the white space ahead of the value. So beginnings that differ only in
        white space have the same place and length.
        """
        place = bisect_right(lengths, start) - 1
        while place > 0 and self._vocabulary.token_bytes[self._tokens[place - 1]].isspace():
            place -= 1
        between = self._text_from(place)
        return place, len(between[: max(start - lengths[place], 0)].rstrip())

    def _text_from(self, place: int) -> bytes:
        return b"".join(self._vocabulary.token_bytes[token] for token in self._tokens[place:])

    def _begin_differently(self, place: int, start: int) -> bool:
        """Go back to the first place from `place` on where a token can follow once earlier attempts
        are excluded.

        The current place does not count. The value starts `start` bytes behind `place`. Returns
        False, with nothing changed, if there is no such place.
        """
        tried, text = self._tokens[place:], self._text_from(place)
        self._back(len(tried))
        begun = text[: start + 1]
        for index, token in enumerate(tried):
            data = self._vocabulary.token_bytes[token]
            remaining = self._remaining.get(self._path[-1])
            order, blanks = self._vocabulary.order, np.zeros(0, np.int32)
            same = np.array([token], np.int32)
            alike = order.beginning_with(begun if index == 0 else data[:1])
            if index == 0 and len(begun.strip()) == 1:
                # White space begins no other value.
                known = map(self._vocabulary.token_of, _GAPS)
                blanks = np.array([token for token in known if token is not None], np.int32)
                ways = [gap + begun.strip() for gap in (b"", *_GAPS)]
                alike = np.concatenate([alike, *map(order.beginning_with, ways)])
            for excluded in (alike, same):
                self._exclude(np.concatenate([excluded, blanks]))
                if self._can_follow():
                    return True
                if remaining is None:
                    del self._remaining[self._path[-1]]
                else:
                    self._remaining[self._path[-1]] = remaining
                self._look()
            self._inner.advance(token)
            self._verifier.feed(data)
            self._tokens.append(token)
            self._path.append(self._nodes[self._path[-1], token])
            self._look()
        return False

    def error(self) -> str:
        return self._error or self._inner.error()


def _without(words: int, tokens: np.ndarray | Sequence[int]) -> np.ndarray:
    """Return a packed mask of all tokens but these, int32 [words]."""
    bits = np.ones(words * 32, np.uint8)
    bits[np.asarray(tokens, np.int64)] = 0
    return bitmask.packed(bits)
