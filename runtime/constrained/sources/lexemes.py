"""A grammar as lexemes and rules over them that llguidance reads as the grammar means it.

See `grammar_rules` for the condition. What may follow what is computed as for LL(1) parsers (FIRST
and FOLLOW; Aho, Sethi & Ullman, section 4.4), on bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rootlace.runtime.constrained.automaton.dfa import LazyDfa
from rootlace.runtime.constrained.automaton.emit import pattern_of
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.automaton.syntax import (
    Chars,
    Concat,
    Either,
    Literal,
    Look,
    LookBehind,
    Regex,
    Repeat,
)
from rootlace.runtime.constrained.sources.gbnf import (
    Alternatives,
    Node,
    Reference,
    Repetition,
    Sequence,
)
from rootlace.runtime.constrained.sources.grammar_rules import Regular

MAX_LEXEME_STATES = 512
MAX_PAIRS = 20_000
"""Of states visited together, over all lexemes: beyond it lexemes count as in conflict."""


@dataclass(frozen=True, slots=True)
class Lexeme:
    number: int


@dataclass(frozen=True, slots=True)
class Call:
    rule: str


@dataclass(frozen=True, slots=True)
class Row:
    parts: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    item: Tree
    least: int
    most: int | None


Tree = Lexeme | Call | Row | Choice | Loop


def lark_of(grammar: Regular) -> str:
    """llguidance's text of a grammar that is not regular as a whole."""
    split: set[Regex] = set()
    while True:
        lexed = _Lexed(grammar, split)
        conflicting = _Conflicts(lexed).found()
        if not conflicting:
            return lexed.lark()
        split |= conflicting


class _Lexed:
    """The rules that can be reached, over lexemes; those in `split` are taken apart."""

    def __init__(self, grammar: Regular, split: set[Regex]) -> None:
        self._grammar = grammar
        self._split = split
        self._numbers: dict[Regex, int] = {}
        self.rules: dict[str, Tree] = {}
        self.root = grammar.root
        waiting = [grammar.root]
        while waiting:
            name = waiting.pop()
            if name not in self.rules:
                self._called: list[str] = []
                self.rules[name] = self._tree(grammar.rules[name])
                waiting += self._called
        self.lexemes = list(self._numbers)

    def _tree(self, node: Node) -> Tree:
        regex = self._grammar.of(node)
        if regex is not None:
            return self._regular(regex)
        match node:
            case Reference(name):
                self._called.append(name)
                return Call(name)
            case Repetition(item, least, most):
                return Loop(self._tree(item), least, most)
            case Alternatives(options):
                return Choice(tuple(map(self._tree, options)))
            case Sequence(parts):
                return Row(tuple(self._runs(parts)))
        raise AssertionError(node)

    def _runs(self, parts: tuple[Node, ...]) -> list[Tree]:
        """Neighbours that are regular become one expression."""
        trees: list[Tree] = []
        run: list[Regex] = []
        for part in parts:
            regex = self._grammar.of(part)
            if regex is not None:
                run.append(regex)
                continue
            if run:
                trees.append(self._regular(_joined(run)))
                run = []
            trees.append(self._tree(part))
        if run:
            trees.append(self._regular(_joined(run)))
        return trees

    def _regular(self, regex: Regex) -> Tree:
        # A lexeme is never empty: what may be, is taken apart.
        if not nullable(regex) and regex not in self._split:
            return Lexeme(self._numbers.setdefault(regex, len(self._numbers)))
        match regex:
            case Literal(text):
                return Row(tuple(self._regular(Chars(((ord(c), ord(c)),))) for c in text))
            case Concat(parts):
                return Row(tuple(map(self._regular, parts)))
            case Either(options):
                return Choice(tuple(map(self._regular, options)))
            case Repeat(item, least, most):
                return Loop(self._regular(item), least, most)
        raise AssertionError(regex)

    def lark(self) -> str:
        names = {name: f"r{number}" for number, name in enumerate(self.rules)}
        lines = [f"start: {names[self.root]}"]
        lines += [f"{names[name]}: {_text(tree, names)}" for name, tree in self.rules.items()]
        lines += [f"T{i}: /{pattern_of(regex)}/" for i, regex in enumerate(self.lexemes)]
        return "\n".join(lines) + "\n"


def _joined(run: list[Regex]) -> Regex:
    return run[0] if len(run) == 1 else Concat(tuple(run))


def _text(tree: Tree, names: dict[str, str]) -> str:
    match tree:
        case Lexeme(number):
            return f"T{number}"
        case Call(rule):
            return names[rule]
        case Row(parts):
            return " ".join(_text(part, names) for part in parts) if parts else '""'
        case Choice(options):
            # What nothing matches.
            texts = [_text(option, names) for option in options] or ["/[^\\s\\S]/"]
            return "(" + " | ".join(texts) + ")"
        case Loop(item, least, most):
            inner = f"({_text(item, names)})"
            if most is None and least <= 1:
                return inner + "*+"[least]
            if (least, most) == (0, 1):
                return inner + "?"
            return f"{inner}{{{least},{'' if most is None else most}}}"


def nullable(regex: Regex) -> bool:
    """Whether the empty text matches."""
    match regex:
        case Literal(text):
            return not text
        case Chars() | Look() | LookBehind():
            return False
        case Concat(parts):
            return all(map(nullable, parts))
        case Either(options):
            return any(map(nullable, options))
        case Repeat(item, least, _):
            return least == 0 or nullable(item)


class _Conflicts:
    """Which lexemes go on where another one ends and may be followed by the same byte.

    Sets of bytes are integers of 256 bits.
    """

    def __init__(self, lexed: _Lexed) -> None:
        self._lexed = lexed
        self._dfas: list[LazyDfa | None] = [_dfa(regex) for regex in lexed.lexemes]
        self._first = [_live(dfa, dfa.start) if dfa else -1 for dfa in self._dfas]
        self._follow = [0] * len(self._dfas)
        self._rule_first = dict.fromkeys(lexed.rules, 0)
        self._rule_empty = dict.fromkeys(lexed.rules, False)
        self._rule_follow = dict.fromkeys(lexed.rules, 0)
        self._pairs = 0

    def found(self) -> set[Regex]:
        lexemes = self._lexed.lexemes
        found: set[Regex] = {
            regex
            for regex, dfa in zip(lexemes, self._dfas, strict=True)
            if dfa is None and not isinstance(regex, Chars)
        }
        if found:
            return found
        self._firsts()
        self._follows()
        for number, follow in enumerate(self._follow):
            for other, regex in enumerate(lexemes):
                if (
                    not isinstance(regex, Chars)
                    and self._first[number] & self._first[other]
                    and self._goes_on(number, other) & follow
                ):
                    found.add(regex)
        return found

    def _goes_on(self, number: int, other: int) -> int:
        """The bytes with which `other` goes on after a whole text of `number`; -1: not known."""
        one, two = self._dfas[number], self._dfas[other]
        assert one is not None and two is not None
        seen = {(one.start, two.start)}
        waiting = list(seen)
        found = 0
        try:
            while waiting:
                a, b = waiting.pop()
                self._pairs += 1
                if self._pairs > MAX_PAIRS:
                    return -1
                if one.accepting(a):
                    found |= _live(two, b)
                left, right = _row(one, a), _row(two, b)
                both = (left >= 0) & (right >= 0)
                steps = np.unique(left[both].astype(np.int64) << 32 | right[both])
                for step in steps.tolist():
                    pair = (step >> 32, step & 0xFFFFFFFF)
                    if pair not in seen:
                        seen.add(pair)
                        waiting.append(pair)
        except TooLarge:
            return -1
        return found

    def _firsts(self) -> None:
        changed = True
        while changed:
            changed = False
            # Called rules stand behind their callers: so most is known in one round.
            for name, tree in reversed(self._lexed.rules.items()):
                new = (self._empty(tree), self._first_of(tree))
                if new != (self._rule_empty[name], self._rule_first[name]):
                    self._rule_empty[name], self._rule_first[name] = new
                    changed = True

    def _empty(self, tree: Tree) -> bool:
        match tree:
            case Lexeme():
                return False
            case Call(rule):
                return self._rule_empty[rule]
            case Row(parts):
                return all(map(self._empty, parts))
            case Choice(options):
                return any(map(self._empty, options))
            case Loop(item, least, _):
                return least == 0 or self._empty(item)

    def _first_of(self, tree: Tree) -> int:
        match tree:
            case Lexeme(number):
                return self._first[number]
            case Call(rule):
                return self._rule_first[rule]
            case Row(parts):
                found = 0
                for part in parts:
                    found |= self._first_of(part)
                    if not self._empty(part):
                        break
                return found
            case Choice(options):
                found = 0
                for option in options:
                    found |= self._first_of(option)
                return found
            case Loop(item, _, _):
                return self._first_of(item)

    def _follows(self) -> None:
        before: list[int] = []
        while before != [*self._rule_follow.values()]:
            before = [*self._rule_follow.values()]
            for name, tree in self._lexed.rules.items():
                self._follow_in(tree, self._rule_follow[name])

    def _follow_in(self, tree: Tree, after: int) -> None:
        match tree:
            case Lexeme(number):
                self._follow[number] |= after
            case Call(rule):
                self._rule_follow[rule] |= after
            case Row(parts):
                for part in reversed(parts):
                    self._follow_in(part, after)
                    first = self._first_of(part)
                    after = after | first if self._empty(part) else first
            case Choice(options):
                for option in options:
                    self._follow_in(option, after)
            case Loop(item, _, most):
                again = self._first_of(item) if most is None or most > 1 else 0
                self._follow_in(item, after | again)


def _dfa(regex: Regex) -> LazyDfa | None:
    """None: it has too many states to look at."""
    try:
        dfa = LazyDfa(regex, MAX_LEXEME_STATES)
        return None if dfa.empty else dfa
    except TooLarge:
        return None


def _row(dfa: LazyDfa, state: int) -> np.ndarray:
    row: np.ndarray = dfa.transitions(np.array([state]))[0]
    return row


def _live(dfa: LazyDfa, state: int) -> int:
    alive = np.packbits(_row(dfa, state) >= 0, bitorder="little")
    return int.from_bytes(alive.tobytes(), "little")
