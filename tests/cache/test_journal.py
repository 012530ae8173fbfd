"""What the tree says that it holds, against what it holds."""

import random

import numpy as np
import pytest

from rootlace.runtime.cache.journal import Change, Evicted, Journal, PrefixDigests
from tests.cache.test_radix_tree import Cache


def held(cache: Cache, known: list[list[int]], digests: PrefixDigests) -> set[int]:
    """Digests of all prefixes of `known` that end at a block bound and are in the tree."""
    size, found = cache.pool.block_size, set()
    for tokens in known:
        reach = cache.match(tokens) // size * size
        all_of_them = digests.of_all("", np.array(tokens, np.int32)).tolist()
        found.update(all_of_them[size : reach + 1 : size])
    return found


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
    cache = Cache(block_size=4, num_blocks=40)
    tree, digests = cache.tree, cache.tree.evicted.digests
    tree.journal = Journal(4, digests)
    known: list[list[int]] = []
    now: set[int] = set()
    for _ in range(80):
        base = dice.choice(known) if known and dice.random() < 0.7 else []
        tokens = base[: dice.randrange(len(base) + 1)]
        tokens = tokens + [dice.randrange(3) for _ in range(dice.randrange(1, 14))]
        if cache.pool.free < 6:
            tree.evict(dice.randrange(6, 12))
        cache.keep(tokens)
        known.append(tokens)
        if dice.random() < 0.05:
            tree.flush()
        if dice.random() < 0.05:
            tree.forget_namespace("")
        if dice.random() < 0.05:
            tree.reset()
        if dice.random() < 0.3:
            now = taken(now, tree.journal.take())
            assert now == held(cache, known, digests)
        if dice.random() < 0.1:
            now = taken(now, tree.journal.snapshot(tree.roots.values()))
            assert now == held(cache, known, digests)


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


@pytest.mark.parametrize("size", [1, 4, 16])
def test_digests_at_bounds_are_those_of_all_prefixes(size: int) -> None:
    digests, dice = PrefixDigests(b"key"), np.random.default_rng(size)
    for length in (0, size - 1, size, 5 * size + 3, 5000):
        tokens = dice.integers(-(2**31), 2**31, size=length).astype(np.int32)
        wanted = digests.of_all("space", tokens)[size::size]
        assert digests.at_bounds("space", tokens, size).tolist() == wanted.tolist()
