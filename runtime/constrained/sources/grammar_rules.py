"""What of a grammar is regular, and the rest in llguidance's notation with the same language.

llguidance's lexer takes the longest lexeme: with the lexemes `x`, `xy` and `yz` it does not see
that "xyz" is `x` `yz`. A grammar has no such rule. So a part of it becomes one lexeme only where
that makes no difference: no lexeme that may stand in the text goes on after a whole lexeme `t` with
a byte that may also follow `t`. Where one does, it is taken apart, down to single characters if
need be: of those none is the beginning of another.
"""

from __future__ import annotations

from collections import deque

from rootlace.runtime.constrained.automaton.syntax import (
    Concat,
    Either,
    Literal,
    Reference,
    Regex,
    Repeat,
    nodes,
)
from rootlace.runtime.constrained.automaton.trees import (
    BLANK,
    NOTHING,
    concat,
    either,
    optional,
    repeat,
)
from rootlace.runtime.constrained.sources.gbnf import Rules
from rootlace.wire.errors import InvalidConstraint

MAX_REGULAR_ITEMS = 20_000
"""A regular rule with more items than this, counting those of the rules it calls, stays a rule."""

MAX_REGULAR_DEPTH = 100
"""So does one in which regular rules call each other more than this deep."""


class Regular:
    """The rules of a grammar that are regular, as regular expressions.

    These are the rules without recursion, and those that call themselves at their very beginning
    or end only (`list ::= item ("," list)?` is `(item ",")* item`).
    """

    def __init__(self, rules: Rules, root: str) -> None:
        """Raises InvalidConstraint where there is no rule `root`."""
        if root not in rules:
            raise InvalidConstraint(f"ebnf: there is no rule {root!r}")
        self.rules = rules
        self.root = root
        self._regex: dict[str, Regex] = {}
        self._size: dict[str, int] = {}
        self._depth: dict[str, int] = {}
        callers: dict[str, set[str]] = {name: set() for name in rules}
        for name, body in rules.items():
            for reference in _references(body):
                callers[reference.name].add(name)
        waiting = deque(rules)
        while waiting:
            name = waiting.popleft()
            if name not in self._regex and self._resolve(name):
                waiting.extend(callers[name])

    def of(self, node: Regex) -> Regex | None:
        """A part of a rule as a regular expression without references, if it is one."""
        match node:
            case Reference(name):
                return self._regex.get(name)
            case Repeat(item, least, most):
                inner = self.of(item)
                return None if inner is None else repeat(inner, least, most)
            case Concat(parts) | Either(parts):
                regular = tuple(found for part in parts if (found := self.of(part)) is not None)
                build = concat if isinstance(node, Concat) else either
                return build(*regular) if len(regular) == len(parts) else None
        return node

    def _resolve(self, name: str) -> bool:
        body = self.rules[name]
        called = {reference.name for reference in _references(body)} - {name}
        if not called <= self._regex.keys():
            return False
        size = self._items(body)
        depth = 1 + max((self._depth[other] for other in called), default=0)
        if size > MAX_REGULAR_ITEMS or depth > MAX_REGULAR_DEPTH:
            return False
        regex = self.of(body)
        if regex is None:
            tail = self._linear(body, name, at_end=True)
            head = self._linear(body, name, at_end=False) if tail is None else None
            if tail is not None:
                ends, before = tail
                regex = concat(repeat(before, 0, None), ends)
            elif head is not None:
                begins, after = head
                regex = concat(begins, repeat(after, 0, None))
            else:
                return False
        self._regex[name] = regex
        self._size[name] = size
        self._depth[name] = depth
        return True

    def _items(self, node: Regex) -> int:
        match node:
            case Literal(text):
                return max(len(text), 1)
            case Reference(name):
                return self._size.get(name, 1)
            case Repeat(item):
                return 1 + self._items(item)
            case Concat(parts) | Either(parts):
                return 1 + sum(map(self._items, parts))
        return 1

    def _linear(self, node: Regex, name: str, at_end: bool) -> tuple[Regex, Regex] | None:
        """(b, p) with node = b | p·name (`at_end`) or node = b | name·p; None: not of that form."""
        regex = self.of(node)
        if regex is not None:
            return regex, NOTHING
        match node:
            case Reference():
                return (NOTHING, BLANK) if node.name == name else None
            case Repeat(item, 0, 1):
                inner = self._linear(item, name, at_end)
                return None if inner is None else (optional(inner[0]), inner[1])
            case Concat(parts):
                own, rest = (parts[-1], parts[:-1]) if at_end else (parts[0], parts[1:])
                others = self.of(concat(*rest))
                inner = self._linear(own, name, at_end)
                if others is None or inner is None:
                    return None
                if at_end:
                    return concat(others, inner[0]), concat(others, inner[1])
                return concat(inner[0], others), concat(inner[1], others)
            case Either(options):
                found = [self._linear(option, name, at_end) for option in options]
                linear = [pair for pair in found if pair is not None]
                if len(linear) != len(options):
                    return None
                return either(*(b for b, _ in linear)), either(*(p for _, p in linear))
        return None


def _references(body: Regex) -> list[Reference]:
    return [node for node in nodes(body) if isinstance(node, Reference)]
