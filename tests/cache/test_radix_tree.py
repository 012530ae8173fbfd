"""The tree by itself: splitting, merging, growing, locking, eviction; random use against sets."""

import random

import numpy as np
import pytest

from rootlace.runtime.cache.node import Node
from rootlace.runtime.cache.radix_tree import BlockPool, PoolExhausted, RadixTree, check_cache


class Cache:
    """A tree whose handles and blocks are all known, so that everything can be checked."""

    def __init__(self, block_size: int = 4, num_blocks: int = 64) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.tree = RadixTree(self.pool)
        self.handles: list[Node] = []

    def lock(self, tokens: list[int], namespace: str = "") -> Node:
        node = self.tree.enter(namespace)
        node = self.tree.advance(node, np.array(tokens, np.int32), len(tokens))
        self.handles.append(node)
        return node

    def store(self, tokens: list[int], program: int = 0) -> Node:
        """As a sequence would: lock what is there, own blocks for the rest."""
        size, ids = self.pool.block_size, np.array(tokens, np.int32)
        node = self.tree.advance(self.tree.enter(""), ids, len(ids), program)
        table = np.full(-(-len(ids) // size), -1, np.int32)
        mine = self.pool.allocate(len(table) - node.end // size)
        table[node.end // size :] = mine
        node = self.tree.insert(node, ids, len(ids), table, program)
        self.pool.drop(mine, pinned=True)
        self.handles.append(node)
        self.check()
        return node

    def unlock(self, node: Node, program: int = 0) -> None:
        self.handles.remove(node)
        self.tree.leave(node, program)
        self.check()

    def keep(self, tokens: list[int], program: int = 0) -> None:
        self.unlock(self.store(tokens, program), program)

    def match(self, tokens: list[int]) -> int:
        return self.tree.match("", np.array(tokens, np.int32))

    def check(self) -> None:
        check_cache(self.tree, self.handles, [])


def test_match_is_exact_to_the_token() -> None:
    cache = Cache()
    cache.keep([1, 2, 3, 4, 5, 6, 7])
    for count in range(8):
        assert cache.match([*range(1, count + 1), 9]) == count
    assert cache.match([]) == 0


def test_a_split_inside_a_block_leaves_it_with_both_halves() -> None:
    cache = Cache()
    cache.keep([1, 2, 3, 4, 5, 6, 7])
    node = cache.lock([1, 2, 3, 4, 5])
    cache.check()
    (lower,) = node.children.values()
    assert node.end == lower.start == 5
    assert node.blocks[-1] == lower.blocks[0] and cache.pool.refs[lower.blocks[0]] == 2
    cache.unlock(node)  # nothing ends there any more
    assert cache.tree.num_nodes == 1


def test_the_deepest_block_of_an_index_counts() -> None:
    cache = Cache()
    cache.keep([1, 2, 3, 4, 5, 6, 7])
    node = cache.store([1, 2, 3, 4, 5, 8, 9, 10, 11])
    table = np.full(3, -1, np.int32)
    cache.tree.fill_table(node, table, 3)
    assert table[1:].tolist() == node.blocks.tolist()
    assert node.parent is not None
    assert table[0] == node.parent.blocks[0] and table[1] != node.parent.blocks[1]


def test_a_handle_keeps_its_end_whatever_others_do() -> None:
    cache = Cache()
    first = cache.store([1, 2, 3])
    second = cache.store([1, 2, 3, 4, 5])  # may not grow the edge: a handle ends at it
    assert first.end == 3 and second.parent is first
    cache.unlock(first)
    assert second.start == 0 and cache.tree.num_nodes == 1
    third = cache.lock([1])
    assert second.end == 5 and third.end == 1
    cache.unlock(second)
    cache.unlock(third)


def test_what_is_locked_stays() -> None:
    cache = Cache(num_blocks=8)
    node = cache.store([1] * 10)
    cache.keep([2] * 10)
    assert cache.tree.evict(100) == 3
    assert cache.match([1] * 10) == 10 and cache.match([2] * 10) == 0
    cache.unlock(node)
    cache.tree.flush()
    cache.check()
    assert cache.pool.free == 8 and not cache.tree.roots


def test_least_recently_used_goes_first_from_its_end() -> None:
    cache = Cache()
    cache.keep([1] * 12)
    cache.keep([2] * 12)
    cache.unlock(cache.lock([1] * 12))
    assert cache.tree.evict(1) == 1
    cache.check()
    assert (cache.match([1] * 12), cache.match([2] * 12)) == (12, 8)


def test_users_keep_edges_apart_so_that_private_suffixes_can_go() -> None:
    cache = Cache()
    program = cache.tree.programs.open("p")
    cache.keep([1] * 8)
    cache.keep([1] * 8 + [2] * 8, program)
    assert cache.tree.num_nodes == 2
    cache.keep([3] * 8)
    cache.tree.close_program("p")
    cache.check()
    cache.tree.evict(2)
    assert (cache.match([1] * 8 + [2] * 8), cache.match([3] * 8)) == (8, 8)
    assert cache.tree.programs.open("p") != program


def test_the_pool_counts() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(3)
    with pytest.raises(PoolExhausted):
        pool.allocate(2)
    pool.retain(blocks[:1], pinned=False)
    assert pool.drop(blocks, pinned=True) == 2
    assert (pool.free, pool.evictable, pool.available) == (3, 1, 4)
    with pytest.raises(AssertionError, match="refs"):
        pool.check(np.zeros(4, np.int32), np.zeros(4, np.int32))
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ValueError):
            BlockPool(*sizes)


def test_check_finds_faults() -> None:
    def spoil_end(cache: Cache) -> None:
        cache.handles[0].end += 1

    def spoil_refs(cache: Cache) -> None:
        cache.pool.refs[cache.handles[0].blocks[0]] += 1

    def spoil_locks(cache: Cache) -> None:
        cache.handles[0].locks += 1

    def spoil_queue(cache: Cache) -> None:
        cache.tree._queue.reset()

    for spoil in (spoil_end, spoil_refs, spoil_locks, spoil_queue):
        cache = Cache()
        cache.keep([5, 6, 7])
        cache.store([1, 2, 3, 4, 5])
        spoil(cache)
        with pytest.raises(AssertionError):
            cache.check()


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_random_use_against_a_set_of_prefixes(block_size: int) -> None:
    choose = random.Random(block_size)
    cache = Cache(block_size, 4000)
    prefixes: set[tuple[int, ...]] = {()}
    held: list[Node] = []
    for _ in range(150):
        known = choose.choice(sorted(prefixes, key=len)[-40:])
        tokens = [*known[: choose.randint(0, len(known))], *choose.choices([1, 2], k=6)]
        held.append(cache.store(tokens))
        prefixes.update(tuple(tokens[:i]) for i in range(len(tokens) + 1))
        if choose.random() < 0.8:
            cache.unlock(held.pop(choose.randrange(len(held))))
        probe = [*known, *choose.choices([1, 2], k=8)]
        longest = max(i for i in range(len(probe) + 1) if tuple(probe[:i]) in prefixes)
        assert cache.match(probe) == longest
    for node in held:
        cache.unlock(node)
    assert cache.tree.num_tokens == len(prefixes) - 1
    while cache.pool.evictable:
        assert cache.tree.evict(choose.randint(1, 9))
        cache.check()
    assert cache.pool.free == 4000 and cache.tree.num_tokens == 0


def test_uses_of_a_leaf_do_not_pile_up() -> None:
    """With room for everything nothing is evicted, and every use queues the leaf once more."""
    cache = Cache()
    for first in (1, 2, 3):
        cache.keep([first] * 6)
    for use in range(5000):
        cache.unlock(cache.lock([1 + use % 2] * 6))
    assert len(cache.tree._queue) < 2000
    assert cache.tree.evict(2) == 2
    assert (cache.match([3] * 6), cache.match([1] * 6), cache.match([2] * 6)) == (0, 6, 6)
