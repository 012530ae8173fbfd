"""Regexes with look-around, as automata without.

The result of a look-ahead depends on the rest of the text only. So the text is read backwards: for
a rest of the text, let V be the set of the pattern's nodes from which the rest matches. V for the
rest with one more character in front follows from V, with negation and conjunction as easy as
choice (an alternating automaton is deterministic in reverse: Chandra, Kozen & Stockmeyer 1981). All
V that occur are found, over a small alphabet of kinds of characters, and determinised in the
forward direction. That gives the smallest automaton (Brzozowski 1962), still over characters.

Look-behind depends on the last character before. It is a case distinction: V is known for each kind
of character that may come before the rest, and for the beginning of the text. Look-behind over more
than one character is not supported.

interegular has look-ahead, but only within its own group: it refuses `(?:(?!--).)*`.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from rootlace.runtime.structured.regex.nfa import repeats
from rootlace.runtime.structured.regex.syntax import (
    LAST,
    NOTHING,
    Chars,
    Concat,
    Either,
    Graph,
    Literal,
    Look,
    LookBehind,
    Ranges,
    Regex,
    Repeat,
    TooLarge,
    contains,
    nodes,
    union,
)

_STEPS_PER_LEAF = 512
"""Bound of the work to find all V: evaluations of a node, per allowed leaf."""


def has_look(regex: Regex) -> bool:
    """Return whether a `Look` or `LookBehind` is anywhere in `regex`."""
    return any(isinstance(node, Look | LookBehind) for node in nodes(regex))


def without_look(regex: Regex, max_leaves: int) -> Regex:
    """Return the same texts without look-around, as a `Graph`; `syntax.NOTHING` if there are none.
    Raises `TooLarge` if the graph, or its construction, is too large."""
    try:
        return _Reversal(regex, max_leaves).graph()
    except RecursionError:
        raise TooLarge("the pattern is nested too deeply") from None


_Step = tuple[int, int, int, bool]
"""Rule of the automaton as bits: the node; the nodes, one of which must hold; the node that a look
tests (0: no look); and whether the look is negative."""

_END = 0
_ANYTHING = 1


class _Nodes:
    """Thompson's construction with conjunction: nodes from the end of the pattern to its beginning.

    `leaves[node]`: a set of characters and the node after it. `forks[node]`: nodes, any of which
    may follow. `looks[node]`: a node that must (or must not: negative) match, and the node after
    it. `behinds[node]`: characters one of which must (must not) stand before, and the node after
    it. `strata[depth]`: forks, looks and behinds inside `depth` looks, in the order they were made.
    The tested parts of looks are in deeper strata.
    """

    def __init__(self, max_nodes: int) -> None:
        self.leaves: dict[int, tuple[Ranges, int]] = {}
        self.forks: dict[int, list[int]] = {}
        self.looks: dict[int, tuple[int, int, bool]] = {}
        self.behinds: dict[int, tuple[Ranges, int, bool]] = {}
        self.strata: defaultdict[int, list[int]] = defaultdict(list)
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
            case Graph(edges, accepting):
                after: list[list[int]] = [[following] if ends else [] for ends in accepting]
                heads = [self._fork(those, depth) for those in after]
                for those, of_state in zip(after, edges, strict=True):
                    those += [self.build(label, heads[to], depth) for label, to in of_state]
                return heads[0]
            case Look(item, negative):
                node = self._new()
                self.looks[node] = (self.build(item, _ANYTHING, depth + 1), following, negative)
                self.strata[depth].append(node)
                return node
            case LookBehind(chars, negative):
                node = self._new()
                self.behinds[node] = (chars.ranges, following, negative)
                self.strata[depth].append(node)
                return node
        raise AssertionError(regex)

    def _leaf(self, ranges: Ranges, following: int) -> int:
        node = self._new()
        self.leaves[node] = (ranges, following)
        return node

    def _fork(self, targets: list[int], depth: int) -> int:
        node = self._new()
        self.forks[node] = targets
        self.strata[depth].append(node)
        return node

    def _new(self) -> int:
        if self.count > self._max_nodes:
            raise TooLarge(f"the pattern has more than {self._max_nodes} positions")
        self.count += 1
        return self.count - 1


class _Reversal:
    """All V of a regex, and the rules between its nodes. A V is an int, bit n for node n."""

    def __init__(self, regex: Regex, max_leaves: int) -> None:
        self._max_leaves = max_leaves
        self._nodes = _Nodes(max_leaves)
        self._start = self._nodes.build(regex, _END)
        nodes = self._nodes
        sets = {ranges for ranges, _ in nodes.leaves.values()}
        behind = sorted({ranges for ranges, _, _ in nodes.behinds.values()})
        self._kinds = _kinds_of(sets | set(behind))
        # The character before, as far as look-behind distinguishes it: a bit per set of `behind`,
        # none at the beginning of the text.
        before = [
            sum(contains(ranges, kind[0][0]) << number for number, ranges in enumerate(behind))
            for kind in self._kinds
        ]
        befores = sorted({0, *before})
        self._before = [befores.index(bits) for bits in before]
        self._strata = [
            [
                self._compiled(stratum, {behind[n] for n in range(len(behind)) if bits >> n & 1})
                for _, stratum in sorted(nodes.strata.items(), reverse=True)
            ]
            for bits in befores
        ]
        of_set = {
            ranges: {n for n, kind in enumerate(self._kinds) if contains(ranges, kind[0][0])}
            for ranges in sets
        }
        # Per kind of character: the leaves that read it, and the nodes after them.
        self._readers = [
            [
                (1 << node, 1 << after)
                for node, (ranges, after) in nodes.leaves.items()
                if number in of_set[ranges]
            ]
            for number in range(len(self._kinds))
        ]
        self._steps = 0

    def graph(self) -> Regex:
        begins, longer = self._explore()
        # The state of a beginning of the text: which V the rest may have, bool [V].
        # `longer[kind][u]` is V of a character of `kind` and a rest with V = u, so after that
        # character the rest may have u if before it, it could have `longer[kind][u]`.
        # As every V occurs, no two of these states are equal (Brzozowski 1962) and none is a dead
        # end but the empty one.
        if not begins.any():
            return NOTHING
        known = {np.packbits(begins).tobytes(): 0}
        waiting = [begins]
        edges: list[tuple[tuple[Regex, int], ...]] = []
        leaves = 0
        for rests in waiting:
            reached: dict[int, list[int]] = {}
            for kind, step in enumerate(longer):
                after = rests[step]
                if after.any():
                    state = known.setdefault(np.packbits(after).tobytes(), len(known))
                    reached.setdefault(state, []).append(kind)
                    if state == len(waiting):
                        waiting.append(after)
            self._count(len(longer) * (8 + len(rests) // 64))
            labels = {
                state: Chars(union(part for kind in kinds for part in self._kinds[kind]))
                for state, kinds in reached.items()
            }
            edges.append(tuple((label, state) for state, label in labels.items()))
            leaves += len(labels)
            if leaves > self._max_leaves:
                raise TooLarge(f"the pattern has more than {self._max_leaves} positions")
        return Graph(tuple(edges), tuple(bool(rests[0]) for rests in waiting))

    def _explore(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Find all V, beginning with that of the end of the text.

        Returns the V that a whole text may have (bool [V]) and, per kind of character, the V after
        adding one such character in front of each V (int32 [V]).
        """
        # The leaves that can read a rest determine V.
        known = {1 << _END: 0}
        order = [1 << _END]
        longer: list[list[int]] = [[] for _ in self._kinds]
        begins = []
        for reading in order:
            values = [self._closed(reading, strata) for strata in self._strata]
            begins.append(bool(values[0] >> self._start & 1))
            for readers, step, before in zip(self._readers, longer, self._before, strict=True):
                value, read = values[before], 0
                for bit, after in readers:
                    if value & after:
                        read |= bit
                self._count(len(readers))
                if read not in known:
                    known[read] = len(order)
                    order.append(read)
                step.append(known[read])
        return np.array(begins), [np.array(step, np.int32) for step in longer]

    def _closed(self, reading: int, strata: list[tuple[list[_Step], bool]]) -> int:
        """Return V of a rest: from the leaves that can read it, all nodes. Inner looks come
        first."""
        value = reading | 1 << _ANYTHING
        for steps, loops in strata:
            changed = True
            while changed:
                changed = False
                self._count(len(steps))
                for bit, targets, inner, negative in steps:
                    if (
                        not value & bit
                        and value & targets
                        and (not inner or bool(value & inner) != negative)
                    ):
                        value |= bit
                        changed = loops
        return value

    def _compiled(self, stratum: list[int], before: set[Ranges]) -> tuple[list[_Step], bool]:
        """Return the steps of the nodes of `stratum` after a character that is in the sets
        `before`, and whether nodes refer to later ones."""
        steps: list[_Step] = []
        loops = False
        done = 0
        ours = sum(1 << node for node in stratum)
        for node in stratum:
            if node in self._nodes.forks:
                targets = 0
                for target in self._nodes.forks[node]:
                    targets |= 1 << target
                steps.append((1 << node, targets, 0, False))
            elif node in self._nodes.behinds:
                ranges, after, negative = self._nodes.behinds[node]
                targets = 1 << after if (ranges in before) != negative else 0
                steps.append((1 << node, targets, 0, False))
            else:
                inner, after, negative = self._nodes.looks[node]
                targets = 1 << after
                steps.append((1 << node, targets, 1 << inner, negative))
            done |= 1 << node
            loops = loops or bool(targets & ours & ~done)
        return steps, loops

    def _count(self, steps: int) -> None:
        self._steps += steps + 1
        if self._steps > _STEPS_PER_LEAF * self._max_leaves:
            raise TooLarge("the look-ahead of the pattern is too large")


def _kinds_of(sets: set[Ranges]) -> list[Ranges]:
    """Return the kinds of characters, each as ranges: no set of `sets` separates one kind."""
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
