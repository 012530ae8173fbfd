"""What the tree says that it holds, against what it holds."""

import random

import numpy as np
import pytest

from rootlace.runtime.cache.journal import TOLD_BLOCKS, Change, Evicted, Journal, PrefixDigests
from tests.cache.test_radix_tree import Cache


def significant_bits(number: int) -> int:
    return len(f"{number:b}".strip("0"))


def held(cache: Cache, known: list[list[int]], digests: PrefixDigests) -> tuple[set[int], int]:
    """Digests of the told prefixes of `known` that are in the tree, and the count of all that end
    at a block bound."""
    size = cache.pool.block_size
    found: dict[int, int] = {}
    for tokens in known:
        all_of_them = digests.of_all("", np.array(tokens, np.int32)).tolist()
        ends = range(size, cache.match(tokens) + 1, size)
        found.update((all_of_them[end], end // size) for end in ends)
    told = {digest for digest, blocks in found.items() if significant_bits(blocks) <= 6}
    return told, len(found)


def taken(now: set[int], change: Change) -> set[int]:
    if change.fresh:
        assert not len(change.removed)
        now = set()
    added, removed = set(change.added.tolist()), set(change.removed.tolist())
    assert not added & removed
    return (now | added) - removed


@pytest.mark.parametrize("seed", range(6))
def test_changes_add_up_to_what_is_held(seed: int) -> None:
    dice = random.Random(seed)
    size, longest = ((4, 14), (1, 150))[seed % 2]
    cache = Cache(block_size=size, num_blocks=10 * longest // size)
    tree, digests = cache.tree, cache.tree.evicted.digests
    tree.journal = Journal(size, digests)
    known: list[list[int]] = []
    now: set[int] = set()
    for _ in range(80):
        base = dice.choice(known) if known and dice.random() < 0.7 else []
        tokens = base[: dice.randrange(len(base) + 1)]
        tokens = tokens[: 3 * longest]
        tokens = tokens + [dice.randrange(3) for _ in range(dice.randrange(1, longest))]
        if cache.pool.free < len(tokens) // size + 2:
            tree.evict(len(tokens) // size + dice.randrange(2, 8))
        cache.keep(tokens)
        known.append(tokens)
        if dice.random() < 0.05:
            tree.flush()
        if dice.random() < 0.05:
            tree.forget_namespace("")
        if dice.random() < 0.05:
            tree.reset()
        if dice.random() < 0.3:
            change = tree.journal.take()
            now = taken(now, change)
            assert (now, change.blocks) == held(cache, known, digests)
        if dice.random() < 0.1:
            change = tree.journal.snapshot(tree.roots.values())
            now = taken(now, change)
            assert (now, change.blocks) == held(cache, known, digests)


def test_a_digest_depends_on_the_namespace_and_on_every_token() -> None:
    digests = PrefixDigests()
    tokens = np.arange(100, dtype=np.int32)
    found = digests.of_all("a", tokens)
    assert len(set(found.tolist())) == 101
    assert not set(found.tolist()) & set(digests.of_all("b", tokens).tolist())
    for at in (0, 50, 99):
        other = tokens.copy()
        other[at] += 1
        same = digests.of_all("a", other) == found
        assert same.tolist() == [number <= at for number in range(101)]
    assert (PrefixDigests().of_all("a", tokens) == found).all(), "two processes agree"
    secret = PrefixDigests(b"secret")
    assert not (secret.of_all("a", tokens) == found).any(), "the key does not matter"
    assert Evicted().digests.of_all("a", tokens)[-1] != Evicted().digests.of_all("a", tokens)[-1]


def test_told_prefixes_have_block_counts_of_six_significant_bits() -> None:
    most = 1 << 18
    told = [count for count in range(most) if significant_bits(count) <= 6]
    assert [count for count in TOLD_BLOCKS if count < most] == told


@pytest.mark.parametrize("size", [1, 4, 16])
def test_told_digests_are_those_of_all_prefixes(size: int) -> None:
    digests, dice = PrefixDigests(b"key"), np.random.default_rng(size)
    for length in (0, size - 1, size, 5 * size + 3, 5000, 90 * size):
        tokens = dice.integers(-(2**31), 2**31, size=length).astype(np.int32)
        wanted = digests.of_all("space", tokens)[::size]
        ends = [count for count in TOLD_BLOCKS[1:] if count < len(wanted)]
        assert digests.reported("space", tokens, size).tolist() == wanted[ends].tolist()
