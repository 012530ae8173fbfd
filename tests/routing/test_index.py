"""The table of all caches, against sets."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rootlace.runtime.cache.journal import Change
from rootlace.runtime.routing.index import PrefixIndex

REPLICAS = 5


def change(added: set[int], removed: set[int], fresh: bool = False) -> Change:
    return Change(np.array(sorted(added), np.uint64), np.array(sorted(removed), np.uint64), fresh)


def closed(dice: random.Random, parents: list[int], count: int) -> set[int]:
    """Some nodes of a trie, with all above them. `parents[i]` is above node i, 0 above none."""
    found: set[int] = set()
    for _ in range(count):
        node = dice.randrange(1, len(parents))
        while node:
            found.add(node)
            node = parents[node]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_replicas_match_as_far_as_they_hold(seed: int) -> None:
    dice = random.Random(seed)
    parents = [0, *(dice.choice([node - 1, dice.randrange(node)]) for node in range(1, 60))]
    index = PrefixIndex()
    held: list[set[int]] = [set() for _ in range(REPLICAS)]
    for _ in range(60):
        replica = dice.randrange(REPLICAS)
        now = closed(dice, parents, dice.randrange(6))
        fresh = dice.random() < 0.2
        before = held[replica]
        index.apply(replica, change(now if fresh else now - before, before - now, fresh))
        held[replica] = now
        assert len(index) == len(set().union(*held))
        path = [dice.randrange(1, len(parents))]
        while parents[path[0]]:
            path.insert(0, parents[path[0]])
        found = [0] * REPLICAS
        counts = [count for count, _ in index.match(path)]
        assert counts == sorted(set(counts)) and 0 not in counts
        for count, replicas in index.match(path):
            for number in range(REPLICAS):
                if replicas >> number & 1:
                    assert not found[number], "each is named once"
                    found[number] = count
        assert found == [sum(node in each for node in path) for each in held]
        if dice.random() < 0.1:
            index.drop(replica)
            held[replica] = set()


def test_it_is_bounded() -> None:
    index = PrefixIndex(most=3)
    index.add(0, [1, 2, 3, 4])
    index.add(1, [1, 4])
    assert len(index) == 3
    assert index.match([1, 2, 3, 4]) == [(1, 0b10), (3, 0b01)]
    index.remove(0, [2, 3])
    index.add(1, [5])
    assert index.match([5]) == [(1, 0b10)]
    assert index.match([]) == index.match([9]) == []


def test_looks_are_bounded_where_every_replica_holds_another_part() -> None:
    index = PrefixIndex()
    for replica in range(100):
        index.add(replica, range(1, replica + 2))
    found = index.match(list(range(1, 101)))
    assert len(found) < 30
    for count, replicas in found:
        for replica in range(100):
            if replicas >> replica & 1:
                assert count <= replica + 1, "never more than it holds"


@pytest.mark.parametrize("seed", range(4))
def test_what_dropped_replicas_held_is_taken_out_in_parts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootlace.runtime.routing.index._AT_ONCE", 7)
    dice = random.Random(seed)
    index = PrefixIndex()
    held: list[set[int]] = [set() for _ in range(REPLICAS)]
    for _ in range(400):
        replica = dice.randrange(REPLICAS)
        now, fresh = {dice.randrange(1, 80) for _ in range(20)}, dice.random() < 0.1
        before = held[replica]
        index.apply(replica, change(now if fresh else now - before, before - now, fresh))
        held[replica] = now
        if dice.random() < 0.1:
            index.drop(replica)
            held[replica] = set()
            assert all(not bits >> replica & 1 for d in range(80) for _, bits in index.match([d]))
        index.sweep()
        for digest in range(1, 80):
            for _, replicas in index.match([digest]):
                for number in range(REPLICAS):
                    if replicas >> number & 1:
                        assert digest in held[number], "never more than it holds"
    while index.sweep():
        pass
    wanted = {d: {r for r in range(REPLICAS) if d in held[r]} for d in set().union(*held)}
    found = {d: {r for r in range(REPLICAS) if bits >> r & 1} for d, bits in index._holders.items()}
    assert found == wanted
