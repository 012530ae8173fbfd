"""Changes of a cache that are lost on the way."""

import math
import random
import sys

import numpy as np
import pytest

from rootlace.runtime.cache.journal import Change
from rootlace.runtime.cache.tier import Label
from rootlace.runtime.contracts.messages import (
    CacheChanged,
    decode_from_engine,
    encode,
)
from rootlace.runtime.engine.process import Telling
from rootlace.runtime.replicas.dispatch import Hearing
from rootlace.runtime.routing.index import PrefixIndex
from rootlace.runtime.routing.router import BelowPools
from rootlace.runtime.scheduler.inspection import CacheControl
from rootlace.runtime.scheduler.offload.levels import Level
from rootlace.runtime.scheduler.pacing import MeasuredCost
from tests.cache.test_radix_tree import Cache
from tests.simulated_store import SimulatedStore


class _Kv:
    """Also its own `tiering`, with one level."""

    def __init__(self, cache: Cache) -> None:
        self.tree = cache.tree
        self.store = SimulatedStore(30)
        self.tier = self.store.tier
        self.levels = (Level("disk", self.tier, self.store),)
        self.tiering = self


def changed(number: int, *added: int, fresh: bool = False) -> CacheChanged:
    return CacheChanged(number, np.array(added, np.uint64), np.empty(0, np.uint64), fresh)


def test_after_a_gap_nothing_counts_until_all_is_told() -> None:
    asked: list[int] = []
    heard: list[list[int]] = []
    hearing = Hearing(lambda: asked.append(1), lambda change: heard.append(change.added.tolist()))
    hearing.hear(changed(1, 5, fresh=True))
    hearing.hear(changed(2, 6))
    hearing.hear(changed(4, 8))  # the third is lost
    hearing.hear(changed(5, 9))
    assert heard == [[5], [6]] and len(asked) == 1 and hearing.gaps == 1
    hearing.hear(changed(6, 5, 6, 7, 8, 9, fresh=True))
    hearing.hear(changed(7, 10))
    assert heard[2:] == [[5, 6, 7, 8, 9], [10]] and hearing.gaps == 1


def test_an_engine_that_does_not_answer_is_asked_again() -> None:
    asked: list[int] = []
    hearing = Hearing(lambda: asked.append(1), lambda change: None)
    for number in range(3, 200):
        hearing.hear(changed(number))
    assert 2 <= len(asked) <= 5 and hearing.gaps == 1


def test_a_table_is_right_again_after_any_loss() -> None:
    """A real tree and its journal, a line that loses every fifth message, questions included."""
    dice = random.Random(3)
    cache, index = Cache(block_size=4, num_blocks=60), PrefixIndex(1000)
    kv, below = _Kv(cache), BelowPools(1, 1000)
    telling = Telling(CacheControl(kv, {}, lambda: None), MeasuredCost(64))  # type: ignore[arg-type]

    def ask() -> None:
        if dice.random() < 0.8:
            telling.tell_all()

    def heard(said: CacheChanged) -> None:
        index.apply(0, Change(said.added, said.removed, said.fresh))
        below.apply(0, said.below, said.fresh)

    hearing = Hearing(ask, heard)

    def tell(lossy: bool) -> None:
        for message in decode_from_engine(encode(telling.take())):
            assert isinstance(message, CacheChanged)
            if not lossy or dice.random() < 0.8:
                hearing.hear(message)

    known: list[list[int]] = []
    for turn in range(300):
        base = dice.choice(known) if known and dice.random() < 0.6 else []
        tokens = base[: dice.randrange(min(len(base), 60) + 1)] + [
            dice.randrange(5) for _ in range(dice.randrange(1, 20))
        ]
        if cache.pool.free < 24:
            cache.tree.evict(30)
        cache.keep(tokens)
        known.append(tokens)
        if entry := kv.tier.add(Label(turn.to_bytes(16, "little"), b"")):
            kv.tier.written(entry.slot, turn % 10 > 0)
            kv.tier.prove(entry)
        if turn % 3 == 0 and (entry := kv.tier.next_dropped()):
            kv.tier.discard(entry)
        tell(lossy=turn < 250)
    assert hearing.gaps >= 5
    journal = cache.tree.journal
    assert journal is not None
    whole: Change = journal.snapshot(cache.tree.roots.values())
    assert index.entries() == dict.fromkeys(whole.added.tolist(), 1)
    keys = [int.from_bytes(one.label.key[:8], sys.byteorder) for one in kv.tier.entries()]
    assert len(keys) > 10 and below._levels[0].entries() == dict.fromkeys(keys, 1)


def test_a_level_that_reads_nothing_any_more_is_told() -> None:
    kv = _Kv(Cache(block_size=4, num_blocks=60))
    telling = Telling(CacheControl(kv, {}, lambda: None), MeasuredCost(64))  # type: ignore[arg-type]
    assert [said.below[0].seconds for said in telling.take()] == [pytest.approx(1e-6)]  # type: ignore[union-attr]
    kv.store.working = False
    assert [said.below[0].seconds for said in telling.take()] == [math.inf]  # type: ignore[union-attr]
    assert not telling.take()
