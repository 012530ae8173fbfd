"""Split a context-free grammar into lexemes and rules that llguidance reads without changing the
language.

`grammar_of` states the condition. FIRST and FOLLOW are computed on bytes, as for LL(1) parsers
(Aho, Sethi & Ullman, section 4.4).

Sections: questions about regular languages; lexemes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from functools import cached_property, reduce
from itertools import groupby
from operator import or_
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from interegular.fsm import FSM, Alphabet

from rootlace.runtime.structured.gbnf import Regular, parse_gbnf
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.regex.syntax import (
    Chars,
    Concat,
    Either,
    Literal,
    Reference,
    Regex,
    Repeat,
    TooLarge,
    concat,
    lengths,
    pattern_of,
    quantifier,
)
from rootlace.wire.errors import InvalidConstraint

MAX_STATES = 512
"""Maximum number of states of one language's automaton."""
MAX_STEPS = 2048
"""Maximum number of states of a product that one question may visit."""
_FOUND = -1
"""State behind a whole text and one more byte."""
_UNREAD = -1
"""Class of the bytes that no state reads."""


class Language:
    """Language of `regex`: a set of texts in UTF-8. Sets of bytes are integers of 256 bits. Raises
    `TooLarge` if the automaton is too large from the start."""

    def __init__(self, regex: Regex, max_states: int = MAX_STATES) -> None:
        self._dfa = LazyDfa(regex, max_states)
        # A language may be compared with itself, which would be a reference cycle.
        self._known: WeakKeyDictionary[Language, dict[int, bool | None]] = WeakKeyDictionary()
        self._made: dict[int, FSM] = {}

    @property
    def empty(self) -> bool:
        return self._dfa.empty

    def first_bytes(self) -> int:
        """Bytes that a text may begin with."""
        if self.empty:
            return 0
        return _bits(self._dfa.transitions(np.array([self._dfa.start]))[0] >= 0)

    def goes_on_behind(self, text: Language, following: int) -> bool | None:
        """Return whether a text of this language begins with a whole text of `text` and a byte of
        `following`; None if the budget does not suffice."""
        if self.empty or text.empty:
            return False
        known = self._known.setdefault(text, {})
        if following not in known:
            try:
                known[following] = self._goes_on_behind(text, following)
            except TooLarge:
                known[following] = None
        return known[following]

    def _goes_on_behind(self, text: Language, following: int) -> bool:
        first = self.first_bytes() if text._dfa.accepting(text._dfa.start) else 0
        if not following & (first | self._later_bytes):
            return False
        return not self._fsm(0).isdisjoint(text._fsm(following))

    @cached_property
    def _later_bytes(self) -> int:
        """Return the bytes that occur behind the first byte of some text."""
        rows = self._dfa.all_transitions()
        return _bits((rows[np.unique(rows[rows >= 0])] >= 0).any(axis=0))

    def _fsm(self, following: int) -> FSM:
        """Return the automaton of all prefixes of texts; with `following`, the automaton of whole
        texts, each with one of these bytes appended."""
        if following not in self._made:
            self._made[following] = self._make(following)
        return self._made[following]

    def _make(self, following: int) -> FSM:
        rows = self._dfa.all_transitions()
        behind = np.unpackbits(
            np.frombuffer(following.to_bytes(32, "little"), np.uint8), bitorder="little"
        )
        # A class of bytes is 2 * the automaton's own + whether its bytes are among `following`.
        read = (rows >= 0).any(axis=0) | (behind == 1)
        class_of = np.where(read, 2 * self._dfa.byte_classes.astype(int) + behind, _UNREAD)
        keys, one_of_each = np.unique(class_of, return_index=True)
        # Numbered from 1: `FSM.isdisjoint` takes a state 0 for a dead end.
        steps = {
            state: {key: to + 1 for key, to in zip(keys.tolist(), row, strict=True) if to >= 0}
            for state, row in enumerate(rows[:, one_of_each].tolist(), 1)
        }
        if following:
            # Odd classes are those of `following`.
            found = {key: _FOUND for key in keys.tolist() if key & 1 and key != _UNREAD}
            for state, row in steps.items():
                if self._dfa.accepting(state - 1):
                    row.update(found)  # other targets of the byte do not matter
        return FSM(
            alphabet=_ByteClasses(class_of.tolist()),
            states=(),
            initial=self._dfa.start + 1,
            # No state of the automaton is dead: every path to a state begins some text.
            finals={_FOUND} if following else set(steps),
            map=steps,
            __no_validation__=True,
        )


def _bits(of_bytes: np.ndarray) -> int:
    return int.from_bytes(np.packbits(of_bytes, bitorder="little").tobytes(), "little")


class _ByteClasses(Alphabet):  # type: ignore[misc]
    """Byte classes that one automaton distinguishes."""

    def __init__(self, class_of: list[int]) -> None:
        super().__init__({})
        self._class_of = class_of

    def intersect(self, other: _ByteClasses) -> Any:
        """Return the joint byte classes of two automata, with the class in each. A joint class
        holds bytes that neither automaton distinguishes and both read."""
        pairs = set(zip(self._class_of, other._class_of, strict=True))
        both = [pair for pair in pairs if _UNREAD not in pair]
        old = tuple({new: pair[side] for new, pair in enumerate(both)} for side in (0, 1))
        return _Counted(len(both)), old


class _Counted(Alphabet):  # type: ignore[misc]
    """Byte classes that count the states of a product, and raise `TooLarge` beyond the budget.
    interegular reads `by_transition` once per state."""

    def __init__(self, size: int) -> None:
        super().__init__(dict(enumerate(range(size))))
        self._left = MAX_STEPS

    @property
    def by_transition(self) -> Any:
        self._left -= 1
        if self._left < 0:
            raise TooLarge(f"the product has more than {MAX_STEPS} states")
        return super().by_transition


# Lexemes ------------------------------------------------------------------------------------------


def lark_of(grammar: Regular) -> str:
    """Return llguidance's text of a grammar that is not regular as a whole."""
    split: set[Regex] = set()
    languages: dict[Regex, Language | None] = {}
    while True:
        lexed = _Lexed(grammar, split)
        conflicting = _Conflicts(lexed, languages).found()
        if not conflicting:
            return lexed.lark()
        split |= conflicting


class _Lexed:
    """Reachable rules by name in Lark: trees of references to rules and lexemes. Lexemes in `split`
    are replaced by their parts."""

    def __init__(self, grammar: Regular, split: set[Regex]) -> None:
        self._grammar = grammar
        self._split = split
        self._rule_names = {grammar.root: "r0"}
        self._lexeme_names: dict[Regex, str] = {}
        self.rules: dict[str, Regex] = {}
        waiting = deque([grammar.root])
        while waiting:
            rule = waiting.popleft()
            known = len(self._rule_names)
            self.rules[self._rule_names[rule]] = self._tree(grammar.rules[rule])
            waiting.extend(list(self._rule_names)[known:])
        self.lexemes = {name: regex for regex, name in self._lexeme_names.items()}

    def _tree(self, node: Regex) -> Regex:
        regex = self._grammar.of(node)
        if regex is not None:
            return self._regular(regex)
        match node:
            case Reference(rule):
                return Reference(self._rule_names.setdefault(rule, f"r{len(self._rule_names)}"))
            case Repeat(item, least, most):
                return Repeat(self._tree(item), least, most)
            case Either(options):
                return Either(tuple(map(self._tree, options)))
            case Concat(parts):
                return Concat(tuple(self._runs(parts)))
        raise AssertionError(node)

    def _runs(self, parts: tuple[Regex, ...]) -> Iterator[Regex]:
        """Join regular neighbours into one expression."""
        known = [(part, self._grammar.of(part)) for part in parts]
        for is_regular, run in groupby(known, lambda pair: pair[1] is not None):
            if is_regular:
                yield self._regular(concat(*(regex for _, regex in run if regex is not None)))
            else:
                yield from (self._tree(part) for part, _ in run)

    def _regular(self, regex: Regex) -> Regex:
        # A lexeme is never empty, so expressions that may be empty are split.
        if regex not in self._split and lengths(regex)[0] > 0:
            return Reference(self._lexeme_names.setdefault(regex, f"T{len(self._lexeme_names)}"))
        match regex:
            case Literal(text):
                return Concat(tuple(self._regular(Chars(((ord(c), ord(c)),))) for c in text))
            case Concat(parts) | Either(parts):
                return type(regex)(tuple(map(self._regular, parts)))
            case Repeat(item, least, most):
                return Repeat(self._regular(item), least, most)
        raise AssertionError(regex)

    def lark(self) -> str:
        lines = [f"{name}: {lark_text(tree)}" for name, tree in self.rules.items()]
        lines += [f"{name}: /{pattern_of(regex)}/" for name, regex in self.lexemes.items()]
        return "\n".join(["start: r0", *lines]) + "\n"


def lark_text(tree: Regex) -> str:
    match tree:
        case Reference(name):
            return name
        case Concat(parts):
            return " ".join(map(lark_text, parts)) if parts else '""'
        case Either(options):
            # An expression without texts.
            texts = list(map(lark_text, options)) or ["/[^\\s\\S]/"]
            return "(" + " | ".join(texts) + ")"
        case Repeat(item, least, most):
            return f"({lark_text(item)}){quantifier(least, most)}"
    raise AssertionError(tree)


class _Conflicts:
    """Conflicts between lexemes: a lexeme continues where another ends, with a byte that may follow
    it. Sets of bytes are integers of 256 bits."""

    def __init__(self, lexed: _Lexed, known: dict[Regex, Language | None]) -> None:
        """Find conflicts. `known`: languages of earlier lexemes, to which new ones are added."""
        self._lexed = lexed
        for regex in lexed.lexemes.values():
            if regex not in known:
                known[regex] = _language(regex)
        self._languages = {name: known[regex] for name, regex in lexed.lexemes.items()}
        self._begins = dict.fromkeys(lexed.rules, (False, 0))
        """Map from rule or lexeme to whether it may be empty, and to its possible first bytes."""
        for name, language in self._languages.items():
            self._begins[name] = (False, language.first_bytes() if language else -1)
        self._follow = dict.fromkeys(self._begins, 0)

    def found(self) -> set[Regex]:
        """Return the lexemes to split; single characters are never among them."""
        lexemes, languages = self._lexed.lexemes, self._languages
        long = [name for name, regex in lexemes.items() if not isinstance(regex, Chars)]
        found = {lexemes[name] for name in long if languages[name] is None}
        if found:
            return found
        self._find_begins()
        self._find_follow()
        for name in lexemes:
            text, follow, begins = languages[name], self._follow[name], self._begins[name][1]
            for other in long if follow else ():
                if lexemes[other] in found or not begins & self._begins[other][1]:
                    continue
                language = languages[other]
                if not (text and language) or language.goes_on_behind(text, follow) is not False:
                    found.add(lexemes[other])
        return found

    def _find_begins(self) -> None:
        before: dict[str, tuple[bool, int]] = {}
        while before != self._begins:
            before = dict(self._begins)
            # Called rules follow their callers, so one round finds most facts.
            for name, tree in reversed(self._lexed.rules.items()):
                self._begins[name] = self._begin(tree)

    def _begin(self, tree: Regex) -> tuple[bool, int]:
        match tree:
            case Reference(name):
                return self._begins[name]
            case Concat(parts):
                found = 0
                for empty, first in map(self._begin, parts):
                    found |= first
                    if not empty:
                        return False, found
                return True, found
            case Either(options):
                ways = [self._begin(option) for option in options]
                return any(empty for empty, _ in ways), reduce(or_, (first for _, first in ways), 0)
            case Repeat(item, least, _):
                empty, first = self._begin(item)
                return empty or least == 0, first
        raise AssertionError(tree)

    def _find_follow(self) -> None:
        before: dict[str, int] = {}
        while before != self._follow:
            before = dict(self._follow)
            for name, tree in self._lexed.rules.items():
                self._follow_in(tree, self._follow[name])

    def _follow_in(self, tree: Regex, after: int) -> None:
        match tree:
            case Reference(name):
                self._follow[name] |= after
            case Concat(parts):
                for part in reversed(parts):
                    self._follow_in(part, after)
                    empty, first = self._begin(part)
                    after = after | first if empty else first
            case Either(options):
                for option in options:
                    self._follow_in(option, after)
            case Repeat(item, _, most):
                again = self._begin(item)[1] if most is None or most > 1 else 0
                self._follow_in(item, after | again)


def _language(regex: Regex) -> Language | None:
    """Return the language of `regex`; None if its automaton has too many states."""
    try:
        language = Language(regex)
        return None if language.empty else language
    except TooLarge:
        return None


# Ebnf ---------------------------------------------------------------------------------------------
#
# Grammars as users write them: GBNF (`root ::= …`) and llguidance's dialect of Lark (`start: …`).
#
# A GBNF grammar keeps its language exactly (see `grammar_of`); a regular one becomes a regular
# expression. In Lark, names in capitals are lexemes, and the longest lexeme counts, as in Lark.


_GBNF_RULE = re.compile(r"^[^\S\n]*[A-Za-z_][A-Za-z0-9_-]*\s*::=", re.MULTILINE)
_LARK_EXCERPT = re.compile(r"\s*(\d+ \||\^)")
_LARK_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\)")


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is GBNF, since Lark has no `::=`."""
    return _GBNF_RULE.search(text) is not None


def grammar_of(text: str) -> Regex | str:
    """Return the regular expression of a regular grammar, and the Lark text of any other. Raises
    InvalidConstraint with the line of a GBNF grammar. llguidance finds errors of Lark later."""
    if not is_gbnf(text):
        return text
    grammar = Regular(parse_gbnf(text), "root")
    regex = grammar.of(Reference("root"))
    return lark_of(grammar) if regex is None else regex


def lark_error(error: InvalidConstraint) -> InvalidConstraint:
    """Return the error of a Lark grammar with line and column. llguidance appends lines around the
    error. These lines are dropped, since the last ones are not the user's."""
    lines = [line for line in str(error).splitlines() if not _LARK_EXCERPT.match(line)]
    message = _LARK_PLACE.sub(r"line \1, column \2", " ".join(" ".join(lines).split()))
    return InvalidConstraint(f"ebnf: {message}")
