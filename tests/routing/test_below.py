"""Where requests go whose prefixes lie on disks: prices worked out by hand."""

import math
import random
import sys

import numpy as np
import pytest

from rootlace.runtime.cache.journal import Change, LazyKeys, prefix_keys
from rootlace.runtime.contracts.messages import Below, kv_space
from rootlace.runtime.routing.router import BelowPools, Router
from tests.routing.test_router import BLOCK, holds, router, tokens

NONE = np.empty(0, np.uint64)
SAME = Change(NONE, NONE)
STEM = tokens((7, 40))
PROMPT = tokens((7, 40), (1, 8))
SECONDS = 0.8
"""To read a block, of ten. The prompt costs 96 where nothing is known of it, 16 where all of the
ten are in memory and 2 * (8 + 8) = 32 where they are read."""


def keys(namespace: str = "") -> np.ndarray:
    found = prefix_keys(kv_space(namespace), STEM, BLOCK)
    return np.frombuffer(b"".join(key[:8] for key in found), np.uint64)


def lies(added: np.ndarray, seconds: float = SECONDS, level: int = 0) -> Below:
    return Below(level, 1000, seconds, added, NONE)


def gone(removed: np.ndarray) -> Below:
    return Below(0, 1000, SECONDS, NONE, removed)


def went(one: Router, prompt: np.ndarray = PROMPT, namespace: str = "") -> int:
    """Where a prompt goes; nothing is left of it."""
    place = one.route("asked", namespace, prompt, 1, 0.0)
    one.ended("asked", 0.0)
    return place


def test_a_prompt_goes_where_it_lies_on_a_disk_until_it_does_no_longer() -> None:
    one = router()
    one.heard(1, SAME, [lies(keys())])
    assert [went(one) for _ in range(3)] == [1, 1, 1] and one.known_below == 10
    one.heard(1, SAME, [gone(keys())])
    assert [went(one) for _ in range(2)] == [0, 2] and not one.known_below


def test_memory_is_cheaper_than_a_disk_and_that_than_computing() -> None:
    one = router()
    one.heard(1, SAME, [lies(keys())])
    one.heard(2, holds(STEM))
    assert went(one) == 2
    one.heard(2, Change(NONE, holds(STEM).added))
    assert went(one) == 1


@pytest.mark.parametrize(("queued", "place"), [(60, 1), (68, 2)])
def test_a_longer_queue_costs_more_than_computing(queued: int, place: int) -> None:
    """32 and what is queued there, or 96."""
    one = router()
    one.route("busy 0", "", tokens((2, 100)), 1, 0.0)
    one.heard(1, holds(tokens((3, queued))))
    one.route("busy 1", "", tokens((3, queued), (4, queued)), 1, 0.0)
    one.heard(1, SAME, [lies(keys())])
    assert went(one) == place


@pytest.mark.parametrize("seconds", [5.0, math.inf])
def test_what_is_read_slower_than_computed_or_not_at_all_is_computed(seconds: float) -> None:
    one = router()
    one.heard(1, SAME, [lies(keys(), seconds)])
    assert [went(one) for _ in range(3)] == [0, 1, 2]


def test_what_is_read_is_waited_for() -> None:
    one = router(replicas=2)
    one.heard(0, SAME, [lies(keys())])
    assert one.route("a", "", PROMPT, 1, 0.0) == 0
    # 16 seconds are queued there: 8 to read and 8 to compute.
    assert one.route("b", "", tokens((3, 17)), 1, 0.0) == 1
    assert one.route("c", "", tokens((4, 4)), 1, 0.0) == 0


@pytest.mark.parametrize(("lacking", "place"), [(5, 1), (6, 2)])
def test_a_disk_goes_on_where_the_pool_ends(lacking: int, place: int) -> None:
    """Of ten blocks, the pool of 1 has five and its disk those from number `lacking` on: 24 for
    five that are read; replica 2 has eight, and costs 32."""
    one = router()
    one.heard(1, holds(STEM[: 5 * BLOCK]), [lies(keys()[lacking:])])
    one.heard(2, holds(STEM[: 8 * BLOCK]))
    assert went(one) == place


def test_each_level_has_its_own_speed() -> None:
    one = router()
    one.heard(1, SAME, [lies(keys()[:5], 0.1), lies(keys()[5:], 1.0, level=1)])  # 5.5 to read
    one.heard(2, SAME, [lies(keys(), 0.6, level=1)])  # 6
    assert went(one) == 1
    one.heard(1, SAME, [lies(NONE, 1.1, level=1)])  # 6
    one.heard(2, SAME, [lies(NONE, 0.5, level=1)])  # 5
    assert went(one) == 2


@pytest.mark.parametrize("held", [60, 64, 71, 131, 1000])
def test_what_lies_behind_a_pool_whose_end_is_not_told_is_read(held: int) -> None:
    one = router(capacity=100_000)
    prompt = tokens((7, 2 * held * BLOCK))
    one.heard(1, holds(prompt[: held * BLOCK]))
    found = prefix_keys(kv_space(""), prompt, BLOCK)
    behind = np.frombuffer(b"".join(key[:8] for key in found[held:]), np.uint64)
    one.heard(1, SAME, [lies(behind)])
    pool = one.held("", prompt)
    (read,) = one._below.match(LazyKeys(kv_space(""), prompt, BLOCK).item, 2 * held, pool)
    assert (read.end, read.replicas) == (2 * held, 0b10)


def test_namespaces_share_nothing_below() -> None:
    one = router()
    one.heard(1, SAME, [lies(keys("mine"))])
    assert went(one, namespace="mine") == 1
    assert [went(one) for _ in range(2)] == [0, 2]


def test_what_a_replica_says_anew_or_a_lost_one_held_replaces_what_it_said() -> None:
    one = router()
    one.heard(1, SAME, [lies(keys())])
    one.heard(1, Change(NONE, NONE, fresh=True), [lies(keys()[:2])])
    assert one.known_below == 2
    one.lost(1)
    one.heard(1, SAME, [lies(keys())])
    assert not one.known_below
    one.back(1)
    one.heard(1, Change(NONE, NONE, fresh=True), [lies(keys())])
    assert one.known_below == 10 and went(one) == 1


def test_no_more_is_kept_than_there_is_room_for() -> None:
    below = BelowPools(2, 3000)
    for replica in range(2):
        many = np.arange(2000 * replica + 1, 2000 * replica + 2001, dtype=np.uint64)
        below.apply(replica, [Below(0, 1 << 19, SECONDS, many, NONE)], fresh=True)
    assert len(below) == 3000


def test_keys_that_are_asked_for_are_the_same() -> None:
    prompt = np.random.default_rng(0).integers(1000, size=203).astype(np.int32)
    found = prefix_keys(b"space", prompt, BLOCK)
    lazy = LazyKeys(b"space", prompt, BLOCK)
    order = [*range(len(found)), *range(len(found))]
    random.Random(1).shuffle(order)
    for at in order:
        assert lazy.item(at) == int.from_bytes(found[at][:8], sys.byteorder)
