"""The table of all caches, against sets."""

import random
from collections.abc import Iterable

import numpy as np
import pytest

from rootlace.runtime.cache.journal import Change
from rootlace.runtime.routing.index import HolderSets, PrefixIndex

REPLICAS = 5


def array(digests: Iterable[int]) -> np.ndarray:
    return np.array(list(digests), np.uint64)


def change(added: set[int], removed: set[int], fresh: bool = False) -> Change:
    return Change(array(sorted(added)), array(sorted(removed)), fresh)


def closed(dice: random.Random, parents: list[int], count: int) -> set[int]:
    """Some nodes of a trie, with all above them. `parents[i]` is above node i, 0 above none."""
    found: set[int] = set()
    for _ in range(count):
        node = dice.randrange(1, len(parents))
        while node:
            found.add(node)
            node = parents[node]
    return found


def counts(index: PrefixIndex, path: Iterable[int], replicas: int) -> list[int]:
    """How many of a path's digests each replica holds, by the table."""
    found = [0] * replicas
    matched = index.match(array(path))
    assert [count for count, _ in matched] == sorted({count for count, _ in matched} - {0})
    for count, holders in matched:
        for number in range(replicas):
            if holders >> number & 1:
                assert not found[number], "each is named once"
                found[number] = count
    return found


@pytest.mark.parametrize("seed", range(8))
def test_replicas_match_as_far_as_they_hold(seed: int) -> None:
    dice = random.Random(seed)
    parents = [0, *(dice.choice([node - 1, dice.randrange(node)]) for node in range(1, 60))]
    index = PrefixIndex(dice.choice([60, 5000]))
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
        assert counts(index, path, REPLICAS) == [sum(n in each for n in path) for each in held]
        if dice.random() < 0.1:
            index.drop(replica)
            held[replica] = set()


def test_it_is_bounded() -> None:
    index = PrefixIndex(limit=3)
    index.add(0, array([1, 2, 3, 4]))
    index.add(1, array([1, 4]))
    assert len(index) == 3
    assert index.match(array([1, 2, 3, 4])) == [(1, 0b10), (3, 0b01)]
    index.apply(0, change(set(), {2, 3}))
    index.add(1, array([5]))
    assert index.match(array([5])) == [(1, 0b10)]
    assert index.match(array([])) == index.match(array([9])) == []


def test_a_bucket_that_is_full_takes_no_more() -> None:
    index = PrefixIndex(limit=1000)
    same = array(int(index._buckets) * n for n in range(1, 40))
    index.add(0, same[:16])
    index.add(0, same[16:])
    assert len(index) == 16 and index.match(same) == [(16, 1)]
    index.apply(0, Change(array([]), same[:4]))
    assert len(index) == 12
    index.add(1, same[30:])
    assert len(index) == 16 and index.match(same[:4]) == []
    known = [index.match(same[at : at + 1]) for at in range(30, 39)]
    assert sorted(known) == [[]] * 5 + [[(1, 0b10)]] * 4


@pytest.mark.parametrize("length", [255, 257, 1000, 1023])
def test_long_prompts_match_as_far_as_they_are_held(length: int) -> None:
    dice = random.Random(length)
    path = [dice.randrange(1, 1 << 63) for _ in range(length)]
    held = [0, 1, 13, length // 2, length // 2 + 1, length - 1, length, length, 300 % length]
    index = PrefixIndex(4 * length)
    for replica, count in enumerate(held):
        index.add(replica, array(path[:count]))
    assert counts(index, path, len(held)) == held


def test_looks_are_bounded_where_every_replica_holds_another_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, looked = PrefixIndex(5000), []
    path = array(range(1, 2002))
    for replica in range(100):
        index.add(replica, path[: 20 * replica + 7])
    find = index._holders_of

    def counting(digest: int) -> int:
        looked.append(digest)
        return find(digest)

    monkeypatch.setattr(index, "_holders_of", counting)
    found = counts(index, path.tolist(), 100)
    exact = [20 * replica + 7 for replica in range(100)]
    assert len(looked) == len(set(looked)) < 80
    assert all(0 < said <= have for said, have in zip(found, exact, strict=True))
    assert found[-3:] == exact[-3:], "those that hold most come first"


def test_many_replicas_hold_one_prefix() -> None:
    index, path = PrefixIndex(1000), array(range(1, 300))
    for replica in range(200):
        index.add(replica, path[: 250 + replica % 3])
    assert len(index) == 252 and len(index._holders) == 4
    for replica in range(199):
        index.apply(replica, Change(array([]), path[100:]))
    assert index.match(path) == [(100, 2**199 - 1), (251, 1 << 199)]


@pytest.mark.parametrize("seed", range(4))
def test_what_dropped_replicas_held_is_taken_out_in_parts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootlace.runtime.routing.index._SWEPT", 300)
    dice = random.Random(seed)
    index = PrefixIndex(160)
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
            assert all(not counts(index, [d], REPLICAS)[replica] for d in range(1, 80))
        index.sweep()
        for digest in range(1, 80):
            for number, found in enumerate(counts(index, [digest], REPLICAS)):
                assert not found or digest in held[number], "never more than it holds"
    while index.sweep():
        pass
    assert len(index) == len(set().union(*held))
    wanted = {d: sum(1 << r for r in range(REPLICAS) if d in held[r]) for d in set().union(*held)}
    assert index.entries() == wanted
    used = {number for number in index._sets.ravel().tolist() if number}
    assert len(index._holders) == len(used) + 1, "sets that nobody has are forgotten"


@pytest.mark.parametrize(("most", "buckets"), [(30, 60), (100, 3), (5000, 60)])
@pytest.mark.parametrize("seed", range(8))
def test_reports_that_wait_for_a_look_count_in_their_order(
    seed: int, most: int, buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a set for each replica. Where a table or its buckets are full, it never says more."""
    monkeypatch.setattr("rootlace.runtime.routing.index._MOST_NEWS", 100)
    monkeypatch.setattr("rootlace.runtime.routing.index._SWEPT", (300, 5000)[seed % 2])
    dice, index = random.Random(seed), PrefixIndex(most)
    digests = [int(index._buckets) * (at // buckets) + at % buckets for at in range(1, 61)]
    held: list[set[int]] = [set() for _ in range(REPLICAS)]
    for _ in range(150):
        for _ in range(dice.randrange(9)):
            replica, some = dice.randrange(REPLICAS), set(dice.sample(digests, dice.randrange(12)))
            if dice.random() < 0.03:
                index.drop(replica)
                held[replica] = set()
            before, fresh = held[replica], dice.random() < 0.05
            now = some if fresh else before ^ some
            index.apply(replica, change(now if fresh else now - before, before - now, fresh))
            held[replica] = now
        swept = dice.random() < 0.3
        while swept and index.sweep():
            pass
        known = {digest: replicas for digest, replicas in index.entries().items() if replicas}
        wanted = {d: sum(1 << r for r in range(REPLICAS) if d in held[r]) for d in digests}
        assert all(not replicas & ~wanted[digest] for digest, replicas in known.items())
        assert len(index) == np.count_nonzero(index._keys) <= min(most, 16 * buckets)
        if most > 100 and not index.sweep():
            assert index.entries() == {d: replicas for d, replicas in wanted.items() if replicas}


def _being_swept(monkeypatch: pytest.MonkeyPatch) -> PrefixIndex:
    """Two replicas that hold something; taking it out takes eleven goes."""
    monkeypatch.setattr("rootlace.runtime.routing.index._SWEPT", 100)
    index = PrefixIndex(100)
    for replica in range(3):
        index.add(replica, array(range(1, 40)))
    index.drop(0)
    return index


def test_engines_that_are_lost_again_and_again_do_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = _being_swept(monkeypatch)
    index.apply(0, change({50}, set()))
    for _ in range(12):  # more than all buckets
        index.sweep()
        index.apply(1, change({7}, set(), fresh=True))
    assert index.match(array([50])) == [(1, 1)], "what the first one said since counts"
    while index.sweep():
        pass
    assert index.entries() == {**dict.fromkeys(range(1, 40), 4), 7: 6, 50: 1}


def test_what_is_told_by_those_that_are_swept_takes_bounded_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = _being_swept(monkeypatch)
    for at in range(50, 90):
        index.apply(0, change({at}, set(range(50, at))))
        assert index._count == sum(len(one.digests) for one in index._news) <= 4096
        assert index._count_later == sum(len(one.digests) for one in index._later) <= 100
    assert index.match(array([89])) == [(1, 1)] and index.match(array([50])) == []


def test_where_there_are_too_many_sets_nobody_is_said_to_hold_what_it_does_not() -> None:
    index = PrefixIndex(100)
    index._holders = HolderSets(limit=4)  # the empty one, and three
    index.add(0, array([1, 2, 3]))
    index.add(1, array([2, 3]))
    index.add(2, array([3, 4]))
    assert [counts(index, [d], 3) for d in (1, 2, 3)] == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert counts(index, [4], 3) == [0, 0, 0]
    index.apply(1, change(set(), {3}))  # {0, 2} has no number
    assert [counts(index, [d], 3) for d in (1, 2, 3)] == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert len(index) == 2
    index.add(2, array([4]))
    assert counts(index, [4], 3) == [0, 0, 1]
