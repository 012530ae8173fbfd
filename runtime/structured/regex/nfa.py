"""Nondeterministic automaton of a regex, over bytes, built without writing its states out.

Its nodes are those of Thompson's construction (1968): leaves that read bytes, and forks without
reading. A leaf reads a text, one of many texts, or one character of a set, and has as many states
as that takes. A state is an `item`: the leaf's number plus the offset into the leaf. Items are
numbered but not stored. So a leaf costs the same for one letter and for all of Unicode, and 65,536
choices are one leaf. Counted repeats are copied, until there are too many leaves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from rootlace.runtime.structured.regex.syntax import (
    DONE,
    NOTHING,
    CharAutomaton,
    Chars,
    Concat,
    Either,
    Graph,
    Literal,
    Look,
    LookBehind,
    Reference,
    Regex,
    Repeat,
    TooLarge,
    char_automaton,
)

ACCEPT = 0
"""Item of the end of the text."""

ByteEdge = tuple[int, int, tuple[int, ...]]
"""Edge: first byte, last byte, items after the edge (ascending)."""

_MAX_FOLLOWERS = 1 << 15
"""Bound of the followers of all leaves together: `(a?b?){10000}` is quadratic. One mask may need
all followers, and a step would wait for the search."""


class Words:
    """Choice of many texts: a trie over their bytes that makes only visited nodes. A node is a run
    of the sorted texts (the texts with the node's prefix) and the prefix's length."""

    __slots__ = ("_nodes", "_numbers", "texts", "width")

    def __init__(self, texts: list[bytes]) -> None:
        self.texts = texts
        self.width = sum(map(len, texts)) + 1
        self._nodes = [(0, len(texts), 0)]
        self._numbers = {(0, len(texts), 0): 0}

    def edges(self, number: int) -> list[tuple[int, bool, int]]:
        """Return the edges of a node: byte, whether a text ends there, node after it or -1."""
        texts = self.texts
        begin, end, depth = self._nodes[number]
        edges = []
        while begin < end:
            head = texts[begin][: depth + 1]
            byte = head[depth]
            stop = end
            if byte < 255:
                stop = bisect_left(texts, head[:depth] + bytes([byte + 1]), begin, end)
            ends = len(texts[begin]) == depth + 1
            inner = begin + ends
            edges.append((byte, ends, self._number(inner, stop, depth + 1) if inner < stop else -1))
            begin = stop
        return edges

    def _number(self, begin: int, end: int, depth: int) -> int:
        node = (begin, end, depth)
        number = self._numbers.get(node)
        if number is None:
            number = self._numbers[node] = len(self._nodes)
            self._nodes.append(node)
        return number


Leaf = bytes | CharAutomaton | Words
_MAX_RUN = 64
"""Most bytes of a repeated text that is one leaf."""


class Nfa:
    """Nodes and items of one regex. Not thread-safe: `edges` remembers what it has made.

    `start`: the items at the beginning; empty if the language is. Every item can be reached from
    there and can reach `ACCEPT`. Raises `TooLarge` beyond `max_leaves` leaves.
    """

    def __init__(self, max_leaves: int) -> None:
        self._max_leaves = max_leaves
        self._forks: dict[int, Sequence[int]] = {}
        self._leaves: dict[int, Leaf] = {}
        self._next: dict[int, int] = {}
        self._leaf_nodes: list[int] = []
        self._bases: list[int] = []
        self._items = 1
        self._nodes = 1
        self._followers = 0
        self._entries: dict[int, tuple[int, ...]] = {ACCEPT: (ACCEPT,)}
        self._edges: dict[int, tuple[ByteEdge, ...]] = {ACCEPT: ()}
        self.start: tuple[int, ...] = ()

    def fork(self, targets: list[int]) -> int:
        """Return a node that continues as any of `targets`, a list that may still grow."""
        node = self._nodes
        self._nodes += 1
        self._forks[node] = targets
        return node

    def leaf(self, leaf: Leaf, following: int) -> int:
        """Return a node that reads `leaf`, then goes on with the node `following`."""
        node = self._nodes
        self._nodes += 1
        self._leaves[node] = leaf
        self._next[node] = following
        self._leaf_nodes.append(node)
        self._bases.append(self._items)
        if isinstance(leaf, bytes):
            self._items += len(leaf)
            if len(leaf) > self._max_leaves:
                raise TooLarge(f"the pattern has a text of more than {self._max_leaves} bytes")
        elif isinstance(leaf, CharAutomaton):
            self._items += len(leaf.edges)
        else:
            self._items += leaf.width
        if len(self._bases) > self._max_leaves:
            raise TooLarge(f"the pattern has more than {self._max_leaves} positions")
        return node

    def begin(self, node: int) -> None:
        """Begin at `node`, after all nodes are built. Lists become tuples: a garbage collection
        visits each list, but a tuple of numbers only once."""
        self._forks = {fork: tuple(targets) for fork, targets in self._forks.items()}
        self.start = self.entries(node)

    def entries(self, node: int) -> tuple[int, ...]:
        """Return the items that `node` stands for, ascending: the first items behind all forks."""
        known = self._entries.get(node)
        if known is not None:
            return known
        found: set[int] = set()
        seen = {node}
        stack = [node]
        while stack:
            current = stack.pop()
            if current in self._leaves:
                found.add(self._bases[bisect_left(self._leaf_nodes, current)])
            elif current == ACCEPT:
                found.add(ACCEPT)
            else:
                for target in self._forks[current]:
                    if target not in seen:
                        seen.add(target)
                        stack.append(target)
        self._followers += len(found)
        if self._followers > _MAX_FOLLOWERS:
            raise TooLarge("the positions of the pattern have too many followers")
        entries = self._entries[node] = tuple(sorted(found))
        return entries

    def edges(self, item: int) -> tuple[ByteEdge, ...]:
        """Return the edges of `item`: ascending, disjoint byte ranges."""
        known = self._edges.get(item)
        if known is not None:
            return known
        index = bisect_right(self._bases, item) - 1
        node, base = self._leaf_nodes[index], self._bases[index]
        leaf, local = self._leaves[node], item - base
        edges: list[ByteEdge]
        if isinstance(leaf, bytes):
            byte = leaf[local]
            last = local + 1 == len(leaf)
            edges = [(byte, byte, self.entries(self._next[node]) if last else (item + 1,))]
        elif isinstance(leaf, CharAutomaton):
            edges = [
                (low, high, self.entries(self._next[node]) if to == DONE else (base + to,))
                for low, high, to in leaf.edges[local]
            ]
        else:
            edges = []
            for byte, ends, to in leaf.edges(local):
                after = set(self.entries(self._next[node])) if ends else set()
                if to >= 0:
                    after.add(base + to)
                edges.append((byte, byte, tuple(sorted(after))))
        known = self._edges[item] = tuple(edges)
        return known

    def borders(self) -> set[int]:
        """Return the bytes at which some edge of some item begins, or the edge before ends."""
        borders = {0}
        singles: set[int] = set()
        seen: set[int] = set()
        for leaf in self._leaves.values():
            if id(leaf) in seen:
                continue
            seen.add(id(leaf))
            if isinstance(leaf, bytes):
                singles.update(leaf)
            elif isinstance(leaf, Words):
                singles.update(*leaf.texts)
            else:
                for edges in leaf.edges:
                    for low, high, _ in edges:
                        borders.update((low, high + 1))
        for byte in singles:
            borders.update((byte, byte + 1))
        borders.discard(256)
        return borders

    @property
    def nbytes(self) -> int:
        """Return the approximate memory of the nodes and remembered edges."""
        return 250 * self._nodes + 300 * len(self._edges)


def nfa_of(regex: Regex, max_leaves: int) -> Nfa:
    """Return the automaton of `regex`, built by `trees` and without look-around. Raises `TooLarge`
    if it has more than `max_leaves` leaves, or a text of more bytes than that."""
    nfa = Nfa(max_leaves)
    try:
        if regex != NOTHING:
            nfa.begin(_Builder(nfa).build(regex, ACCEPT))
    except RecursionError:
        raise TooLarge("the pattern is nested too deeply") from None
    return nfa


class _Builder:
    """Builder of nodes from the end of a regex to its beginning.

    No part of a tree matches nothing, so every node can reach the end, and so can every state of
    the deterministic automaton: a text never runs into a dead end.
    """

    def __init__(self, nfa: Nfa) -> None:
        self._nfa = nfa
        self._parted: dict[int, tuple[list[bytes], Words | None, list[Regex]]] = {}
        self._runs: dict[tuple[str, int, int], Words] = {}

    def build(self, regex: Regex, following: int) -> int:
        """Return the node at which `regex`, then `following`, begins."""
        nfa = self._nfa
        match regex:
            case Literal(text):
                return nfa.leaf(_bytes(text), following) if text else following
            case Chars(ranges):
                if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
                    return nfa.leaf(chr(ranges[0][0]).encode(), following)
                return nfa.leaf(char_automaton(ranges), following)
            case Concat(parts):
                for part in reversed(parts):
                    following = self.build(part, following)
                return following
            case Either():
                return self._either(regex, following)
            case Repeat(Literal(text), least, int(most)) if 1 < most * len(text) <= _MAX_RUN:
                return self._run(text, least, most, following)
            case Repeat(item, least, most):
                item, least, most = flat(item, least, most)
                return repeats(
                    least, most, following, lambda after: self.build(item, after), nfa.fork
                )
            case Graph(edges, accepting):
                targets: list[list[int]] = [[following] if ends else [] for ends in accepting]
                heads = list(map(nfa.fork, targets))
                for of_state, those in zip(targets, edges, strict=True):
                    of_state += [self.build(label, heads[to]) for label, to in those]
                return heads[0]
            case Look() | LookBehind() | Reference():
                raise ValueError(f"{type(regex).__name__} is not for this automaton")

    def _run(self, text: str, least: int, most: int, following: int) -> int:
        """Build `least` to `most` copies of a text as one leaf, shared by equal repeats."""
        key = (text, least, most)
        if key not in self._runs:
            self._runs[key] = Words([(text * n).encode() for n in range(max(least, 1), most + 1)])
        leaf = self._nfa.leaf(self._runs[key], following)
        return leaf if least else self._nfa.fork([leaf, following])

    def _either(self, regex: Either, following: int) -> int:
        key = id(regex)
        if key not in self._parted:
            # Copies of a repeat share their trie: there may be many copies of many texts.
            words, others = _words(regex.options)
            inner = [word for word in words if word]
            self._parted[key] = words, Words(inner) if len(inner) > 1 else None, others
        words, trie, others = self._parted[key]
        targets = [self.build(option, following) for option in others]
        if trie is not None:
            targets.append(self._nfa.leaf(trie, following))
        elif words and words[-1]:
            targets.append(self._nfa.leaf(words[-1], following))
        if words and not words[0]:
            targets.append(following)
        return targets[0] if len(targets) == 1 else self._nfa.fork(targets)


def repeats(
    least: int,
    most: int | None,
    following: int,
    copy: Callable[[int], int],
    fork: Callable[[list[int]], int],
) -> int:
    """Return the node at which `least` to `most` copies, then `following`, begin. `copy(after)`
    makes a copy of the repeated part, before the node `after`."""
    if most is None:
        loop: list[int] = []
        head = fork(loop)
        body = copy(head)
        loop += [body, following]
        # The loop's own copy is one of the `least`.
        entry = body if least else head
        copies = max(least - 1, 0)
    else:
        entry = following
        for _ in range(most - least):
            body = copy(entry)
            if body == entry:
                break
            entry = fork([body, following])
        copies = least
    for _ in range(copies):
        body = copy(entry)
        if body == entry:
            # Further copies are empty, and there may be a thousand million: make no more.
            break
        entry = body
    return entry


def _words(options: tuple[Regex, ...]) -> tuple[list[bytes], list[Regex]]:
    """Split options into texts, as ascending distinct UTF-8, and other regexes."""
    texts = {option.text for option in options if isinstance(option, Literal)}
    others: list[Regex] = [option for option in options if not isinstance(option, Literal)]
    return sorted(map(_bytes, texts)), others


def _bytes(text: str) -> bytes:
    """Encode a text as UTF-8; a surrogate escape stands for a lone byte of a character."""
    return text.encode(errors="surrogateescape")


def flat(item: Regex, least: int, most: int | None) -> tuple[Regex, int, int | None]:
    """Return the same language with a repeat of a repeat joined, in simple cases. `(a*)*` and
    `(a?){1000}` would otherwise have items that lead to all later ones."""
    while isinstance(item, Repeat) and item.least <= 1 and item.most in (None, 1) and most != 0:
        inner = item
        item, least, most = inner.item, least * inner.least, None if inner.most is None else most
    return item, least, most
