"""A grammar as lexemes and rules over them that llguidance reads as the grammar means it.

See `grammar_rules` for the condition. What may follow what is computed as for LL(1) parsers (FIRST
and FOLLOW; Aho, Sethi & Ullman, section 4.4), on bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from rootlace.runtime.constrained.automaton import char_sets
from rootlace.runtime.constrained.automaton.emit import pattern_of
from rootlace.runtime.constrained.automaton.languages import MAX_STATES, Language
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.automaton.syntax import (
    LAST,
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

_ANYTHING = Repeat(Chars(char_sets.ALL), 0, None)


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
        self._languages = [_language(regex) for regex in lexed.lexemes]
        self._first = [
            sum(1 << byte for byte in known.first_bytes()) if known else -1
            for known in self._languages
        ]
        self._follow = [0] * len(self._languages)
        self._rule_first = dict.fromkeys(lexed.rules, 0)
        self._rule_empty = dict.fromkeys(lexed.rules, False)
        self._rule_follow = dict.fromkeys(lexed.rules, 0)

    def found(self) -> set[Regex]:
        lexemes = self._lexed.lexemes
        found: set[Regex] = {
            regex
            for regex, language in zip(lexemes, self._languages, strict=True)
            if language is None and not isinstance(regex, Chars)
        }
        if found:
            return found
        self._firsts()
        self._follows()
        for number, follow in enumerate(self._follow):
            if not follow:
                continue
            followed = _language(
                Concat((lexemes[number], _beginning_with(follow), _ANYTHING)), 4 * MAX_STATES
            )
            for other, regex in enumerate(lexemes):
                language = self._languages[other]
                if (
                    not isinstance(regex, Chars)
                    and self._first[number] & self._first[other]
                    and (not followed or not language or followed.overlaps(language) is not False)
                ):
                    found.add(regex)
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


def _language(regex: Regex, max_states: int = MAX_STATES) -> Language | None:
    """None: it has too many states to look at."""
    try:
        language = Language(regex, max_states)
        return None if language.empty else language
    except TooLarge:
        return None


def _beginning_with(first_bytes: int) -> Chars:
    """The characters whose UTF-8 begins with one of these bytes."""
    ranges = []
    for byte in range(0xF5):
        if first_bytes >> byte & 1:
            # The byte's own bits, and how many come after it.
            kept, after = (
                (byte, 0) if byte < 0x80 else (byte & 0x1F, 6) if byte < 0xE0
                else (byte & 0xF, 12) if byte < 0xF0 else (byte & 7, 18)
            )  # fmt: skip
            ranges.append((kept << after, min(((kept + 1) << after) - 1, LAST)))
    return Chars(char_sets.union(ranges))
