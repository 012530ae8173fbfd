"""Eviction policies: each under random use of the tree, and what tells it from the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rootlace.runtime.cache.node import Node
from rootlace.runtime.cache.radix_tree import BlockPool, RadixTree
from rootlace.runtime.config import Eviction
from tests.cache.test_radix_tree import Cache

BLOCKS = 24
TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=14)
NAMES = st.sampled_from(["", "p", "q"])


def cache_with(eviction: str, block_size: int = 4, num_blocks: int = 64) -> Cache:
    cache = Cache(block_size, num_blocks)
    cache.tree = RadixTree(BlockPool(num_blocks, block_size), eviction)
    cache.pool = cache.tree.pool
    return cache


def nodes_of(tree: RadixTree) -> Iterator[Node]:
    stack = list(tree.roots.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        if not node.is_root:
            yield node


def text_of(node: Node) -> list[int]:
    tokens: list[int] = []
    while node.parent is not None:
        tokens[:0] = node.tokens.tolist()
        node = node.parent
    return tokens


class RandomUse(RuleBasedStateMachine):
    """Handles, programs and evictions at random. `check` after every rule; a prefix is lost only by
    eviction, and then it is one that ranks lowest of all that could go."""

    eviction: Eviction

    @initialize(block_size=st.sampled_from([1, 3, 4]))
    def start(self, block_size: int) -> None:
        self.cache = cache_with(self.eviction, block_size, BLOCKS)
        self.held: list[tuple[Node, list[int], int]] = []

    @rule(tokens=TOKENS, name=NAMES)
    def store(self, tokens: list[int], name: str) -> None:
        cache = self.cache
        if cache.pool.available < BLOCKS - 8 or len(self.held) > 3:
            return
        cache.tree.evict(max(len(tokens) + 2 - cache.pool.free, 0))
        if cache.pool.free < len(tokens) + 2:
            return
        program = cache.tree.programs.open(name)
        self.held.append((cache.store(tokens, program), tokens, program))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def unlock(self, which: int) -> None:
        node, tokens, program = self.held.pop(which % len(self.held))
        self.cache.unlock(node, program)
        assert self.cache.match(tokens) == len(tokens)

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        self.cache.tree.close_program(name)

    @rule()
    def evict_one(self) -> None:
        """The heap's choice is that of a scan of the whole tree."""
        tree = self.cache.tree
        leaves = {node: node.end for node in nodes_of(tree) if node.is_evictable}
        rank = tree._policy.rank
        lowest = min(leaves, key=lambda node: (*rank(node), node.uid), default=None)
        before = text_of(lowest) if lowest is not None else []
        tree.evict(1)
        if lowest is not None:
            assert not lowest.alive or lowest.end < leaves[lowest]
            assert self.cache.match(before) < len(before)

    @rule(count=st.integers(2, 9))
    def evict(self, count: int) -> None:
        evictable = self.cache.pool.evictable
        assert self.cache.tree.evict(count) >= min(count, evictable)

    @rule()
    def flush(self) -> None:
        self.cache.tree.flush()
        assert self.cache.pool.evictable == 0

    @precondition(lambda self: not self.held)
    @rule()
    def reset(self) -> None:
        self.cache.tree.reset()
        self.cache.handles.clear()

    @invariant()
    def what_is_held_stays(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for _, tokens, _ in self.held:
            assert self.cache.match(tokens) == len(tokens)


@pytest.mark.parametrize("eviction", get_args(Eviction))
def test_random_use(eviction: str) -> None:
    machine = type("Machine", (RandomUse,), {"eviction": eviction})
    case = machine.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
    case("runTest").runTest()


def test_what_a_policy_may_rely_on() -> None:
    """Uses are counted per request that matched or added a node, and survive splits and merges."""
    cache = cache_with("lfuda")
    cache.keep([1] * 8)
    for _ in range(3):
        cache.keep([1] * 8)
    (node,) = nodes_of(cache.tree)
    assert node.uses == 4
    half = cache.lock([1] * 5)  # split: a request for the upper half
    (lower,) = half.children.values()
    assert (half.uses, lower.uses) == (5, 4)
    cache.unlock(half)  # merged again
    (node,) = nodes_of(cache.tree)
    assert node.uses == 5
    cache.check()


def burst(eviction: str) -> int:
    """How much is left of a prompt that came five times, after ten that came once each."""
    cache = cache_with(eviction, num_blocks=10)
    for _ in range(5):
        cache.keep([9] * 12)
    for first in range(10, 20):
        cache.tree.evict(max(3 - cache.pool.free, 0))
        cache.keep([first] * 12)
    return cache.match([9] * 12)


def test_a_burst_evicts_what_is_older_under_lru_and_what_is_rarer_under_lfuda() -> None:
    assert burst("lru") == 0
    assert burst("lfuda") == 12


def test_lfuda_forgets_what_was_popular_once() -> None:
    cache = cache_with("lfuda", num_blocks=10)
    for _ in range(5):
        cache.keep([9] * 12)
    for first in range(10, 40):
        cache.tree.evict(max(3 - cache.pool.free, 0))
        cache.keep([first] * 12)
    assert cache.match([9] * 12) == 0


def test_tiers_come_before_frequency() -> None:
    """What only a closed program used goes first, however often it did."""
    for eviction in get_args(Eviction):
        cache = cache_with(eviction)
        program = cache.tree.programs.open("p")
        cache.keep([5] * 8)
        for _ in range(5):
            cache.keep([7] * 8, program)
        cache.tree.close_program("p")
        cache.check()
        cache.tree.evict(2)
        assert (cache.match([7] * 8), cache.match([5] * 8)) == (0, 8), eviction


def test_what_is_still_wanted_counts_as_that_of_no_program() -> None:
    cache = cache_with("lru")
    for first, wanted in ((5, True), (7, False)):
        program = cache.tree.programs.open("p")
        cache.keep([first] * 8, program)
        cache.keep([first] * 8 + [1] * 8, program)
        cache.keep([3] * 8)
        cache.tree.close_program("p", wanted)
        cache.check()
    cache.tree.evict(4)
    assert [cache.match([one] * 8 + [1] * 8) for one in (7, 5)] == [0, 16]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="mru"):
        cache_with("mru")


def test_ranks_are_comparable() -> None:
    """All as long as each other, and numbers."""
    for eviction in get_args(Eviction):
        cache = cache_with(eviction)
        cache.keep([1] * 4)
        cache.keep([1] * 2 + [2] * 4)
        ranks = [cache.tree._policy.rank(node) for node in nodes_of(cache.tree)]
        assert len({len(rank) for rank in ranks}) == 1
        assert np.isfinite(ranks).all()
