"""Where requests go: prices worked out by hand."""

import numpy as np
import pytest

from rootlace.runtime.cache.journal import Change, PrefixDigests
from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.routing.router import Router, RouterConfig

BLOCK = 4
COST = StepCost(step=0.0, prefill=1.0, decode=0.5, max_step_tokens=4)


def router(replicas: int = 3, capacity: int = 10_000, spread: float = 1.0) -> Router:
    """`spread`: where pools are empty."""
    return Router(RouterConfig(replicas, BLOCK, capacity, COST, 8 * spread))


def tokens(*parts: tuple[int, int]) -> np.ndarray:
    """So many tokens of each number."""
    return np.concatenate([np.full(count, number, np.int32) for number, count in parts])


def holds(prompt: np.ndarray) -> Change:
    digests = PrefixDigests().reported("", prompt, BLOCK)
    return Change(digests, np.empty(0, np.uint64), blocks=len(prompt) // BLOCK)


def test_what_shares_nothing_is_spread_evenly() -> None:
    one = router()
    went = [one.route(i, "", tokens((i, 40)), 1, 0.0) for i in range(9)]
    assert sorted(went) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_prompt_goes_where_it_is_cached() -> None:
    one = router()
    one.heard(2, holds(tokens((7, 40))))
    assert one.route("a", "", tokens((7, 40), (1, 8)), 1, 0.0) == 2
    one.heard(2, Change(np.empty(0, np.uint64), holds(tokens((7, 40))).added))
    one.first_token("a", 1.0)
    one.ended("a", 1.0)
    assert one.route("b", "", tokens((7, 40), (1, 8)), 1, 1.0) != 2, "it was evicted"


@pytest.mark.parametrize("blocks", [63, 64, 65, 1000, 1023, 4100])
def test_of_a_long_prefix_at_most_a_32nd_is_not_known(blocks: int) -> None:
    one, prefix = router(), np.random.default_rng(blocks).integers(1 << 17, size=blocks * BLOCK)
    prefix = prefix.astype(np.int32)
    one.heard(2, holds(prefix))
    prompt = np.concatenate((prefix, tokens((7, 40))))
    assert one.route("a", "", prompt, 1, 0.0) == 2
    ((known, replicas),) = one.held("", prompt)
    assert replicas == 1 << 2 and blocks * 31 / 32 < known <= blocks


def test_namespaces_share_nothing() -> None:
    one = router()
    one.heard(2, holds(tokens((7, 40))))
    assert one.route("a", "other", tokens((7, 40)), 1, 0.0) == 0


def test_branches_that_come_together_stay_together() -> None:
    one = router()
    stem = (5, 400)
    went = {one.route(i, "", tokens(stem, (i, 4)), 1, 0.0) for i in range(10)}
    assert len(went) == 1, "the first is not computed yet, and counts"


def test_who_waits_behind_a_request_that_ends_computes_what_they_share() -> None:
    one = router()
    stem = (5, 400)
    home = one.route("first", "", tokens(stem, (1, 4)), 1, 0.0)
    assert one.route("second", "", tokens(stem, (2, 4)), 1, 0.0) == home
    one.ended("first", 1.0)  # before anything of it was computed
    assert one.route("third", "", tokens(stem, (3, 4)), 1, 1.0) == home
    one.ended("second", 1.0)
    assert one.route("fourth", "", tokens(stem, (4, 4)), 1, 1.0) == home
    assert one.route("all known", "", tokens(stem), 1, 1.0) == home
    one.ended("all known", 1.0)
    one.ended("third", 1.0)
    one.ended("fourth", 1.0)
    assert not len(one._coming)


def test_a_busy_owner_is_left_where_another_is_cheaper() -> None:
    one = router(replicas=2)
    one.heard(0, holds(tokens((7, 40))))
    one.route("busy", "", tokens((1, 100)), 1, 0.0)  # at 1, which holds nothing
    one.route("as busy", "", tokens((2, 100)), 1, 0.0)
    went = [one.route(i, "", tokens((7, 40), (10 + i, 8)), 1, 0.0) for i in range(24)]
    # The owner's price rises by 8 with each from 108 on; the other's is 100 + 48 + 40 for spread.
    first = went.index(1)
    assert went[:first] == [0] * first and 10 <= first <= 11
    assert set(went[first:]) == {0, 1}, "now both hold it"


def test_what_was_computed_since_is_not_waited_for() -> None:
    one = router(replicas=2)
    assert one.route("long", "", tokens((1, 100)), 1, 0.0) == 0
    assert one.route("short", "", tokens((2, 40)), 1, 0.0) == 1
    one.first_token("short", 40.0)
    assert one.route("a", "", tokens((3, 30)), 1, 95.0) == 1
    assert one.route("b", "", tokens((4, 4)), 1, 95.0) == 0, "5 seconds are left there, 30 here"
    one.ended("long", 96.0)  # its client went away
    assert one.route("c", "", tokens((5, 4)), 1, 96.0) == 0, "4 are left, 29 there"
    assert one.route("d", "", tokens((6, 40)), 1, 96.0) == 0
    assert one.route("e", "", tokens((7, 4)), 1, 96.0) == 1


def test_spread_says_what_it_takes_to_hold_a_prefix_twice() -> None:
    for spread, expected in ((0.0, 1), (4.0, 0)):
        one = router(replicas=2, spread=spread)
        one.heard(0, holds(tokens((7, 40))))
        one.route("busy", "", tokens((7, 40), (9, 60)), 1, 0.0)
        # 60 + 8 seconds at the owner, 48 at the other, and `spread` times 40.
        assert one.route("a", "", tokens((7, 40), (1, 8)), 1, 0.0) == expected


def test_a_prefix_is_held_twice_sooner_where_there_is_room() -> None:
    one, other = router(replicas=2, capacity=1000), holds(tokens((9, 1000)))
    nothing = Change(np.empty(0, np.uint64), np.empty(0, np.uint64), fresh=True, blocks=0)
    gone = Change(nothing.added, other.added, blocks=0)
    one.heard(0, holds(tokens((7, 40))))
    one.route("busy", "", tokens((7, 40), (9, 100)), 1, 0.0)
    # Some 118 seconds at the owner; at the other one 48, and 8 or 64 times as many for spread.
    for said, expected in ((other, 0), (gone, 1), (other, 0), (nothing, 1)):
        one.heard(1, said)
        assert one.route("a", "", tokens((7, 40), (1, 8)), 1, 0.0) == expected
        one.ended("a", 0.0)
    one.heard(1, other)
    one.lost(1)
    one.back(1)
    assert one.route("a", "", tokens((7, 40), (1, 8)), 1, 0.0) == 1


def test_a_full_pool_makes_wait() -> None:
    one = router(replicas=2, capacity=100)
    one.heard(0, holds(tokens((7, 40))))
    assert one.route("a", "", tokens((7, 40), (1, 8)), 50, 0.0) == 0
    one.first_token("a", 1.0)
    one.ended("a", 10_000.0)  # requests take long
    assert one.route("b", "", tokens((7, 40), (1, 8)), 50, 10_000.0) == 0
    one.first_token("b", 1.0)
    assert one.route("c", "", tokens((7, 40), (2, 8)), 50, 10_000.0) == 1


def test_rows_that_decode_slow_prompts_down() -> None:
    one = router(replicas=2)
    for i in range(4):
        one.route(i, "", tokens((i, 8)), 1, 0.0)
        one.first_token(i, 0.0)
    for i in (1, 3):  # both went to replica 1
        one.ended(i, 1.0)
    assert one.route("a", "", tokens((9, 8)), 1, 1.0) == 1


def test_what_a_lost_replica_had_can_be_sent_again() -> None:
    one = router(replicas=2)
    one.heard(0, holds(tokens((7, 40))))
    prompt = tokens((7, 40), (1, 8))
    assert one.route("a", "", prompt, 1, 0.0) == 0
    assert one.route("b", "", tokens((8, 40)), 1, 0.0) == 1
    assert one.lost(0) == ["a"]
    assert one.lost(0) == [], "it is no more lost than it was"
    one.heard(0, holds(tokens((7, 40))))  # its last words
    assert one.route("a", "", prompt, 1, 0.0) == 1
    one.first_token("a", 1.0)
    one.ended("a", 1.0)
    one.first_token("b", 1.0)
    one.ended("b", 1.0)
    one.back(0)
    went = {one.route(i, "", tokens((20 + i, 40)), 1, 2.0) for i in range(2)}
    assert went == {0, 1}


def test_nothing_is_sent_where_nobody_is_left() -> None:
    one = router(replicas=2)
    one.lost(0)
    one.lost(1)
    with pytest.raises(ValueError, match="all replicas are lost"):
        one.route("a", "", tokens((7, 40)), 1, 0.0)
    one.back(1)
    assert one.route("a", "", tokens((7, 40)), 1, 0.0) == 1


def test_who_is_late_is_left_alone() -> None:
    one = router(replicas=2)
    one.heard(0, holds(tokens((7, 40))))
    prompt = tokens((7, 40), (1, 8))
    assert one.route("a", "", prompt, 1, 0.0) == 0
    # Its first token was due at 4 * 8 + 0.5 seconds; 48 + 40 for spread is the other one's price.
    assert one.route("b", "", tokens((7, 40), (2, 8)), 1, 60.0) == 0
    assert one.route("c", "", tokens((7, 40), (3, 8)), 1, 120.0) == 1
    one.first_token("a", 1.0)
    one.first_token("b", 1.0)
    assert one.route("d", "", tokens((7, 40), (4, 8)), 1, 120.0) == 0, "it owes nothing"


def test_among_equals_the_preferred_one_is_taken() -> None:
    one = router(replicas=3)
    for i in range(5):
        assert one.route(i, "", tokens((i, 3)), 1, 0.0, prefer=2) == 2
        one.first_token(i, 0.0)
        one.ended(i, 0.0)
    one.heard(1, holds(tokens((7, 40))))
    assert one.route("a", "", tokens((7, 40)), 1, 0.0, prefer=2) == 1, "it is not equal"


def test_what_steps_cost_is_learnt() -> None:
    """Where computing costs nothing beside queues, a prefix is not worth waiting for."""
    one = router(replicas=2)
    one.heard(0, holds(tokens((7, 40))))
    one.route("busy", "", tokens((7, 40), (9, 60)), 1, 0.0)
    assert one.route("a", "", tokens((7, 40), (1, 8)), 1, 0.0) == 0
    one.ended("a", 0.0)
    one.learn(StepCost(step=1e-9, prefill=0.0, max_step_tokens=4))
    assert one.route("b", "", tokens((7, 40), (1, 8)), 1, 0.0) == 1


def test_what_nobody_holds_goes_to_a_full_pool_as_well() -> None:
    one = router(replicas=2, capacity=1000)
    one.heard(0, holds(tokens((9, 1000))))
    one.route("busy", "", tokens((1, 20)), 1, 0.0, prefer=1)
    assert one.route("a", "", tokens((2, 40)), 1, 0.0) == 0
