"""Keys that come once in the JSON within other text: in structural tags, in `%json` of grammars.

Where JSON begins and ends in a text, another parser of llguidance knows: that of the same grammar
in which one token stands for each JSON value. A text may have several readings; each is followed,
and a text is refused where each has a key twice.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured.gbnf import with_exact_schemas
from rootlace.runtime.structured.json_schema.validate import UniqueKeys, Verifier, Violation
from rootlace.runtime.structured.llguidance_backend import (
    Parser,
    SharedLexer,
    parser_limits,
    reason,
)
from rootlace.wire.errors import InvalidConstraint

MAX_READINGS = 32
"""So many are followed at one place."""
_JSON, _END, _SPECIAL = 256, 257, 258
"""Tokens: below are the bytes, from `_SPECIAL` on the special tokens of the vocabulary."""
_MARK = {"rootlace": "island"}
_ISLAND = re.compile(r'%json\s*\{"rootlace": "island"\}')
_TOKENS = re.compile(r"<\[([0-9,\-]+)\]>")
_BEGINS = frozenset(b' \t\n\r{["-0123456789tfn')
_RULES = UniqueKeys()
_NAME = re.compile(rb"\xff\[(\d+)\]")
"""How special tokens are written among bytes."""


class IslandGrammar:
    """A grammar with a token for each JSON value. Thread-safe."""

    def __init__(self, lark: str, config: ConstraintConfig, special: frozenset[int]) -> None:
        """`special` are the special tokens that a text may hold. Raises InvalidConstraint."""
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
    """What llguidance's wrapper asks of a tokenizer."""

    bos_token_id, eos_token_id = None, _END

    def __init__(self, size: int) -> None:
        self.special_token_ids = [*range(_JSON, size)]
        names = [b"[%d]" % id_ for id_ in self.special_token_ids]
        self.tokens = [*(bytes((byte,)) for byte in range(_JSON)), *names]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


class _Reading:
    """One way to read a text: `parser` stands behind all of it, or, where `json` is given, before
    the JSON value that `json` has begun to read."""

    def __init__(self, parser: Parser, json: Verifier | None = None) -> None:
        self.parser = parser
        self.json = json
        self.feeds = 0
        """Of `json`."""

    def place(self) -> tuple[int, int]:
        return len(self.parser.tokens), self.feeds

    def back(self, tokens: int, taken: int) -> None:
        if len(self.parser.tokens) > tokens:
            self.parser.undo(len(self.parser.tokens) - tokens)
        if self.json is not None and self.feeds > taken:
            self.json.undo(self.feeds - taken)
            self.feeds = taken


class _Snapshot(NamedTuple):
    """All readings, and where each stands; none where they are too many, or too large, to be
    followed: then the text is checked no further."""

    readings: tuple[tuple[_Reading, tuple[int, int]], ...]


class Islands:
    """One text, read as a `Verifier` reads one. Not thread-safe."""

    def __init__(self, grammar: IslandGrammar) -> None:
        self._grammar = grammar
        self._readings = [_Reading(Parser(grammar.lexer, grammar.size))]
        self._beyond = False  # the bounds of the parser
        self._history = [self._snapshot()]

    def feed(self, data: bytes) -> Violation | None:
        """Take in the next bytes; a special token is `\\xff[id]`. On a violation nothing has
        changed."""
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
        """Add the readings that go on with a token to `after`."""
        if reading.json is not None:
            return self._within(reading, token, after)
        parser = reading.parser
        if token in _BEGINS and parser.matcher.validate_tokens([_JSON]) == 1:
            violation = self._within(_Reading(parser.copy(), Verifier(_RULES)), token, after)
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
            # What the value ends before is read by what stands behind it.
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
        return _Snapshot(tuple((reading, reading.place()) for reading in self._readings))

    def _restore(self) -> None:
        for reading, place in self._history[-1].readings:
            reading.back(*place)
        self._readings = [reading for reading, _ in self._history[-1].readings]

    def taken(self) -> list[bytes]:
        """What must not follow in the key that is being read: see `Verifier`."""
        found: list[bytes] | None = None
        for reading in self._readings:
            own = reading.json.taken() if reading.json is not None else []
            found = own if found is None else [end for end in found if end in own]
        return found or []

    # The mask of the grammar knows where the text may end.

    def violation(self) -> Violation | None:
        return None

    def accepts(self) -> bool:
        return True

    def number_length(self) -> int:
        return 0

    def open_starts(self) -> list[int]:
        return []
