"""The radix tree alone: CPU microseconds per operation, memory per node, in trees of any size."""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import psutil

from benchmarks.peers.workloads import WORKLOADS, Workload
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
    bytes_per_node: float
    bytes_per_token: float


@dataclass(frozen=True)
class LoadCost:
    """Means of CPU microseconds per request of a load: to match its prompt and lock what is cached,
    and to put the rest and the output in."""

    load: str
    requests: int
    tokens: int
    match: float
    insert: float


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
        gc.collect()
        before = psutil.Process().memory_info().rss
        while self.tree.num_nodes < nodes - 2 * FORKS * PROMPTS:
            self._family(SHORT)
        self.prompts = [self._family(PROMPT) for _ in range(PROMPTS)]
        gc.collect()
        self.bytes = psutil.Process().memory_info().rss - before

    def _family(self, length: int) -> np.ndarray:
        members = [self.fresh(length)]
        store(self.tree, members[0], length)
        for _ in range(FORKS):
            base = members[int(self.random.integers(len(members)))]
            cut = int(self.random.integers(1, len(base)))
            members.append(np.concatenate((base[:cut], self.fresh(TAIL))))
            store(self.tree, members[-1], len(members[-1]))
        return members[0]

    def fresh(self, count: int) -> np.ndarray:
        return self.random.integers(0, VOCAB, count, dtype=np.int32)


def store(tree: RadixTree, tokens: np.ndarray, known: int) -> tuple[float, float]:
    """What a request does to the tree. Returns the microseconds to lock what is cached of its first
    `known` tokens, and to insert the rest."""
    node: list[Node] = []
    match = microseconds(lambda: node.append(tree.advance(tree.enter(""), tokens, known)))
    first = node[0].end // BLOCK_SIZE
    table = np.zeros(-(-len(tokens) // BLOCK_SIZE), np.int32)
    mine = tree.pool.allocate(len(table) - first)
    table[first:] = mine
    insert = microseconds(lambda: node.append(tree.insert(node[0], tokens, len(tokens), table)))
    tree.pool.drop(mine, pinned=True)
    tree.leave(node[1])
    return match, insert


def measure_tree(nodes: int, repeats: int = 300) -> TreeCost:
    forest = Forest(nodes)
    tree = forest.tree
    size, tokens, used = tree.num_nodes, tree.num_tokens, forest.bytes
    cases: dict[str, list[float]] = {
        name: [] for name in ("match_full", "match_half", "lock", "split", "insert")
    }
    for i in range(repeats):
        known = forest.prompts[i % PROMPTS]
        half = np.concatenate((known[: PROMPT // 2], forest.fresh(PROMPT // 2)))
        cut = int(forest.random.integers(1, PROMPT))

        cases["match_full"].append(microseconds(partial(tree.match, "", known)))
        cases["match_half"].append(microseconds(partial(tree.match, "", half)))
        cases["lock"].append(microseconds(partial(_lock, tree, known, PROMPT)))
        cases["split"].append(microseconds(partial(_lock, tree, known, cut)))
        longer = np.concatenate((known[:cut], forest.fresh(TAIL)))
        cases["insert"].append(store(tree, longer, len(longer))[1])
    found = {name: statistics.median(values) for name, values in cases.items()}
    per_leaf = []
    for _ in range(repeats):
        leaves = tree.num_nodes
        spent = microseconds(lambda: tree.evict(16))
        if tree.num_nodes < leaves:
            per_leaf.append(spent / (leaves - tree.num_nodes))
    return TreeCost(
        nodes=size,
        tokens=tokens,
        **found,
        evict_leaf=statistics.median(per_leaf),
        bytes_per_node=used / size,
        bytes_per_token=used / tokens,
    )


def _lock(tree: RadixTree, tokens: np.ndarray, limit: int) -> None:
    tree.leave(tree.advance(tree.enter(""), tokens, limit))


def measure_tree_apart(nodes: int) -> TreeCost:
    """In a process of its own, whose memory holds nothing else."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(measure_tree, nodes).result()


def measure_loads(rounds: int = 3) -> list[LoadCost]:
    """The workloads of `benchmarks.peers`, one request after the other, on an empty tree."""
    return [
        min((_load_cost(make()) for _ in range(rounds)), key=lambda cost: cost.match + cost.insert)
        for make in WORKLOADS.values()
    ]


def _load_cost(load: Workload) -> LoadCost:
    tree = RadixTree(BlockPool(2**15, BLOCK_SIZE))
    random = np.random.default_rng(0)
    matches: list[float] = []
    inserts: list[float] = []
    total = 0
    waiting = load.start()
    while waiting:
        request = waiting.pop(0)
        output = random.integers(0, VOCAB, request.wanted, dtype=np.int32)
        tokens = np.concatenate((np.array(request.prompt, np.int32), output))
        total += len(tokens)
        match, insert = store(tree, tokens, len(request.prompt) - 1)
        matches.append(match)
        inserts.append(insert)
        waiting += load.answered(request, output.tolist())
    name = load.describe.partition(":")[0]
    return LoadCost(name, len(matches), total, statistics.fmean(matches), statistics.fmean(inserts))
