"""The radix tree alone: CPU microseconds per operation, in trees of any size."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from rootlace.runtime.cache import BlockPool, Node, RadixTree

BLOCK_SIZE = 16
VOCAB = 32_000
PROMPT = 4096
"""Tokens of the prompts that are measured, and of the others:"""
SHORT = 512
TAIL = 32
"""Tokens that a fork adds."""
FORKS = 8
"""Of each prompt: forks of it, and of its forks."""
PROMPTS = 64
"""How many are measured."""


@dataclass(frozen=True)
class TreeCost:
    """Medians of CPU microseconds.

    `match_*`: how much of a 4,096-token prompt is cached (all of it, half of it), changing nothing.
    `lock`: a handle on all of it, and giving it up. `split`: the same where it ends inside an edge.
    `insert`: 32 tokens behind the end of a handle. `evict_leaf`: per leaf of 32 tokens.
    """

    nodes: int
    tokens: int
    match_full: float
    match_half: float
    lock: float
    split: float
    insert: float
    evict_leaf: float


def microseconds(action: Callable[[], object]) -> float:
    started = time.thread_time_ns()
    action()
    return (time.thread_time_ns() - started) / 1000


class Forest:
    """A tree of at least `nodes` nodes: families of a prompt, its forks, and forks of these.

    A path runs through a few nodes, however many there are in all. `prompts` are the long ones,
    which were put in last.
    """

    def __init__(self, nodes: int) -> None:
        self.random = np.random.default_rng(0)
        long = -(-PROMPT // BLOCK_SIZE) + FORKS * (TAIL // BLOCK_SIZE + 2)
        short = -(-SHORT // BLOCK_SIZE) + FORKS * (TAIL // BLOCK_SIZE + 2)
        blocks = 8 * PROMPTS * long + nodes // FORKS * short
        self.tree = RadixTree(BlockPool(blocks, BLOCK_SIZE))
        while self.tree.num_nodes < nodes - 2 * FORKS * PROMPTS:
            self._family(SHORT)
        self.prompts = [self._family(PROMPT) for _ in range(PROMPTS)]

    def _family(self, length: int) -> np.ndarray:
        members = [self.fresh(length)]
        self.store(members[0])
        for _ in range(FORKS):
            base = members[int(self.random.integers(len(members)))]
            cut = int(self.random.integers(1, len(base)))
            members.append(np.concatenate((base[:cut], self.fresh(TAIL))))
            self.store(members[-1])
        return members[0]

    def fresh(self, count: int) -> np.ndarray:
        return self.random.integers(0, VOCAB, count, dtype=np.int32)

    def lock(self, tokens: np.ndarray, limit: int) -> None:
        self.tree.leave(self.tree.advance(self.tree.enter(""), tokens, limit))

    def store(self, tokens: np.ndarray) -> float:
        """What a request does to the tree; the microseconds of inserting what is not cached."""
        tree, count = self.tree, len(tokens)
        cached = tree.advance(tree.enter(""), tokens, count)
        first = cached.end // BLOCK_SIZE
        table = np.zeros(-(-count // BLOCK_SIZE), np.int32)
        mine = tree.pool.allocate(len(table) - first)
        table[first:] = mine
        node: list[Node] = []
        spent = microseconds(lambda: node.append(tree.insert(cached, tokens, count, table)))
        tree.pool.drop(mine, pinned=True)
        tree.leave(node[0])
        return spent


def measure_tree(nodes: int, repeats: int = 300) -> TreeCost:
    forest = Forest(nodes)
    tree = forest.tree
    size, tokens = tree.num_nodes, tree.num_tokens
    spent: dict[str, list[float]] = defaultdict(list)
    for i in range(repeats):
        known = forest.prompts[i % PROMPTS]
        half = np.concatenate((known[: PROMPT // 2], forest.fresh(PROMPT // 2)))
        cut = int(forest.random.integers(1, PROMPT))
        spent["match_full"].append(microseconds(partial(tree.match, "", known)))
        spent["match_half"].append(microseconds(partial(tree.match, "", half)))
        spent["lock"].append(microseconds(partial(forest.lock, known, PROMPT)))
        spent["split"].append(microseconds(partial(forest.lock, known, cut)))
        spent["insert"].append(forest.store(np.concatenate((known[:cut], forest.fresh(TAIL)))))
    for _ in range(repeats):
        leaves = tree.num_nodes
        evicting = microseconds(lambda: tree.evict(16))
        if tree.num_nodes < leaves:
            spent["evict_leaf"].append(evicting / (leaves - tree.num_nodes))
    medians = {name: statistics.median(values) for name, values in spent.items()}
    return TreeCost(size, tokens, **medians)
