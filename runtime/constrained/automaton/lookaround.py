"""Regexes with look-ahead, as automata without.

Whether a look-ahead holds depends on the rest of the text only. So the text is read backwards:
for a rest of the text, let V be the set of the pattern's nodes from which that rest matches. V for
the rest with one more character in front follows from V, with negation and conjunction as easy as
choice (an alternating automaton is deterministic in reverse: Chandra, Kozen & Stockmeyer 1981).
All V that occur are found, over a small alphabet of kinds of characters; the transitions among them
turned round are an ordinary automaton for the forward direction, in which every state can reach the
end, for the lazy subset construction to read.

interegular has look-ahead, but only where its group holds all that it looks at: it refuses
`(?:(?!--).)*`.
"""

from __future__ import annotations

from rootlace.runtime.constrained.automaton.char_sets import contains, union
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.automaton.nfa import ACCEPT, Nfa, repeats
from rootlace.runtime.constrained.automaton.syntax import (
    LAST,
    Chars,
    Concat,
    Either,
    Literal,
    Look,
    Regex,
    Repeat,
)
from rootlace.runtime.constrained.automaton.utf8 import Ranges, char_automaton

_STEPS_PER_LEAF = 256
"""Bounds the work of finding all V: evaluations of a node, per leaf that is allowed."""


def has_look(regex: Regex) -> bool:
    """Whether a `Look` is anywhere in `regex`."""
    stack = [regex]
    seen: set[int] = set()
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        match current:
            case Look():
                return True
            case Concat(parts):
                stack += parts
            case Either(options):
                stack += options
            case Repeat(item, _, _):
                stack.append(item)
    return False


def nfa_with_look(regex: Regex, max_leaves: int) -> Nfa:
    """The automaton of `regex`. Raises `TooLarge` if it, or the way to it, is too large."""
    try:
        return _Reversal(regex, max_leaves).nfa()
    except RecursionError:
        raise TooLarge("the pattern is nested too deeply") from None


_END = 0
_ANYTHING = 1


class _Nodes:
    """Thompson's construction with conjunction: nodes from the end of the pattern to its beginning.

    `leaves[node]`: a set of characters and the node after it. `forks[node]`: nodes, any of which
    may go on. `looks[node]`: a node that must (or must not: negative) match, and the node after it.
    `order`: forks and looks, so that a look comes after all nodes that it looks at.
    """

    def __init__(self, max_nodes: int) -> None:
        self.leaves: dict[int, tuple[Ranges, int]] = {}
        self.forks: dict[int, list[int]] = {}
        self.looks: dict[int, tuple[int, int, bool]] = {}
        self.strata: list[list[int]] = [[]]
        self.count = 2
        self._max_nodes = max_nodes

    def build(self, regex: Regex, following: int, depth: int = 0) -> int:
        match regex:
            case Literal(text):
                for char in reversed(text):
                    following = self._leaf(((ord(char), ord(char)),), following)
                return following
            case Chars(ranges):
                return self._leaf(ranges, following)
            case Concat(parts):
                for part in reversed(parts):
                    following = self.build(part, following, depth)
                return following
            case Either(options):
                targets = [self.build(option, following, depth) for option in options]
                return self._fork(targets, depth)
            case Repeat(item, least, most):
                return repeats(
                    least,
                    most,
                    following,
                    lambda after: self.build(item, after, depth),
                    lambda targets: self._fork(targets, depth),
                )
            case Look(item, negative):
                node = self._new()
                self.looks[node] = (self.build(item, _ANYTHING, depth + 1), following, negative)
                self._place(node, depth)
                return node

    def _leaf(self, ranges: Ranges, following: int) -> int:
        node = self._new()
        self.leaves[node] = (ranges, following)
        return node

    def _fork(self, targets: list[int], depth: int) -> int:
        node = self._new()
        self.forks[node] = targets
        self._place(node, depth)
        return node

    def _place(self, node: int, depth: int) -> None:
        while len(self.strata) <= depth:
            self.strata.append([])
        self.strata[depth].append(node)

    def _new(self) -> int:
        if self.count > self._max_nodes:
            raise TooLarge(f"the pattern has more than {self._max_nodes} positions")
        self.count += 1
        return self.count - 1


class _Reversal:
    """All V of a regex, and how they follow from each other. A V is an int, bit n for node n."""

    def __init__(self, regex: Regex, max_leaves: int) -> None:
        self._max_leaves = max_leaves
        self._nodes = _Nodes(max_leaves)
        self._start = self._nodes.build(regex, _END)
        self._kinds = _kinds_of({ranges for ranges, _ in self._nodes.leaves.values()})
        of_set: dict[Ranges, int] = {}
        for number, kind in enumerate(self._kinds):
            for ranges in {ranges for ranges, _ in self._nodes.leaves.values()}:
                if contains(ranges, kind[0][0]):
                    of_set[ranges] = of_set.get(ranges, 0) | 1 << number
        # Per kind of character: the leaves that read it, and the nodes after them.
        self._readers = [
            [
                (1 << node, after)
                for node, (ranges, after) in self._nodes.leaves.items()
                if of_set.get(ranges, 0) >> number & 1
            ]
            for number in range(len(self._kinds))
        ]
        self._steps = 0

    def nfa(self) -> Nfa:
        end = self._closed(1 << _END)
        known = {end: 0}
        order = [end]
        # before[u]: for each V that some character in front of u leads to, the kinds that do.
        arrows: list[dict[int, list[int]]] = []
        for rest in order:
            found: dict[int, list[int]] = {}
            for kind, readers in enumerate(self._readers):
                read = 0
                for bit, after in readers:
                    if rest >> after & 1:
                        read |= bit
                self._count(len(readers))
                longer = self._closed(read)
                if longer not in known:
                    known[longer] = len(order)
                    order.append(longer)
                found.setdefault(known[longer], []).append(kind)
            arrows.append(found)
        return self._forward(order, arrows)

    def _forward(self, order: list[int], arrows: list[dict[int, list[int]]]) -> Nfa:
        """The automaton whose states are the V of what is left of the text."""
        nfa = Nfa(max(self._max_leaves, sum(map(len, arrows))))
        places: list[list[int]] = [[] for _ in order]
        nodes = [nfa.fork(targets) for targets in places]
        sets: dict[tuple[int, ...], Ranges] = {}
        for rest, found in enumerate(arrows):
            for longer, kinds in found.items():
                key = tuple(kinds)
                if key not in sets:
                    sets[key] = union(part for kind in kinds for part in self._kinds[kind])
                # In front of `rest`, a character of `kinds` gives `longer`: reading it leads back.
                places[longer].append(nfa.leaf(char_automaton(sets[key]), nodes[rest]))
        places[0].append(ACCEPT)
        begin = [
            nodes[number] for number, rest in enumerate(order) if rest >> self._start & 1
        ]
        nfa.start = nfa.entries(nfa.fork(begin)) if begin else ()
        return nfa

    def _closed(self, read: int) -> int:
        """V of a rest: from the leaves that can read it, all nodes. Inner looks come first."""
        nodes = self._nodes
        value = read | 1 << _ANYTHING
        for stratum in reversed(nodes.strata):
            changed = True
            while changed:
                changed = False
                self._count(len(stratum))
                for node in stratum:
                    if value >> node & 1:
                        continue
                    look = nodes.looks.get(node)
                    if look is None:
                        holds = any(value >> target & 1 for target in nodes.forks[node])
                    else:
                        inner, after, negative = look
                        holds = bool(value >> after & 1) and bool(value >> inner & 1) != negative
                    if holds:
                        value |= 1 << node
                        changed = True
        return value

    def _count(self, steps: int) -> None:
        self._steps += steps + 1
        if self._steps > _STEPS_PER_LEAF * self._max_leaves:
            raise TooLarge("the look-ahead of the pattern is too large")


def _kinds_of(sets: set[Ranges]) -> list[Ranges]:
    """Characters told apart by none of `sets` are of one kind; all kinds, each as ranges."""
    borders = sorted(
        {0, 0xD800, 0xE000}
        | {first for ranges in sets for first, _ in ranges}
        | {last + 1 for ranges in sets for _, last in ranges}
    )
    kinds: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    ordered = list(sets)
    for begin, end in zip(borders, [*borders[1:], LAST + 1], strict=True):
        if begin > LAST or 0xD800 <= begin < 0xE000:
            continue
        key = tuple(contains(ranges, begin) for ranges in ordered)
        kinds.setdefault(key, []).append((begin, end - 1))
    return [union(ranges) for ranges in kinds.values()]
