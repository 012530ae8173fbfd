"""Pins and times to live, by themselves: what is held, what it counts for, and when it goes."""

import numpy as np
import pytest

from rootlace.runtime.cache import retention
from rootlace.runtime.cache.retention import Expiry, Pins
from tests.cache.test_radix_tree import Cache


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_pins_are_held_counted_once_and_let_go_in_time() -> None:
    cache, clock = Cache(num_blocks=16), Clock()
    pins = Pins(cache.tree, 8, clock)
    cache.keep([1] * 8)
    cache.keep([1] * 8 + [2] * 5)
    cache.keep([3] * 8)
    assert pins.needed("", _ids([1] * 8 + [2] * 9)) == 4 + 2  # a copy of the partial block
    pins.hold("long", "", _ids([1] * 8 + [2] * 5), 10.0)
    assert pins.blocks == 4 and pins.needed("", _ids([1] * 6)) == 0
    pins.hold("short", "", _ids([1] * 6), 5.0)  # inside the other one
    assert pins.blocks == 4 and len(pins) == 2
    cache.handles += pins.nodes()
    cache.check()
    cache.tree.flush()
    cache.check()
    assert cache.match([1] * 8 + [2] * 5) == 13 and cache.match([3] * 8) == 0
    clock.now = 6.0
    pins.expire()
    assert [pin.id for pin in pins.all()] == ["long"]
    pins.hold("long", "", _ids([1] * 8 + [2] * 5), 10.0)  # which renews it
    clock.now = 15.0
    pins.expire()
    assert len(pins) == 1 and pins.all()[0].until == 16.0
    clock.now = 16.0
    pins.expire()
    assert not pins.release("?") and (len(pins), pins.blocks) == (0, 0)
    cache.handles.clear()
    cache.check()
    cache.tree.flush()
    assert cache.pool.free == 16


def test_what_has_a_time_to_live_goes_when_nobody_uses_it() -> None:
    cache, clock = Cache(num_blocks=16), Clock()
    expiry = Expiry(cache.tree, clock)
    cache.keep([1] * 5)
    cache.keep([1] * 5 + [2] * 5)
    expiry.keep("", _ids([1] * 5 + [2] * 5), 5, 10.0)
    clock.now = 9.0
    cache.unlock(cache.lock([1] * 5 + [2] * 2))
    expiry.expire()
    clock.now = 11.0
    expiry.expire()  # it was used since
    assert cache.match([1] * 5 + [2] * 5) == 10
    clock.now = 22.0
    expiry.expire()
    cache.check()
    assert cache.match([1] * 5 + [2] * 5) == 5


def test_at_the_end_all_goes_that_has_a_time_to_live() -> None:
    cache, clock = Cache(num_blocks=16), Clock()
    expiry = Expiry(cache.tree, clock)
    for token in (1, 2):
        cache.keep([token] * 10)
        expiry.keep("", _ids([token] * 10), 5, 1000.0)
    cache.unlock(cache.lock([1] * 10))  # used since
    held = cache.lock([2] * 10)
    expiry.end()
    assert cache.match([1] * 10) == 5 and cache.match([2] * 10) == 10
    cache.unlock(held)
    cache.check()


def test_a_step_looks_at_so_many_times_to_live_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention, "LOOKED_AT", 2)
    cache, clock = Cache(), Clock()
    kept = Expiry(cache.tree, clock)
    for n in range(3):
        cache.keep([n] * 4)
        kept.keep("", _ids([n] * 4), 0, 1e-9)
    clock.now = 1.0
    left = []
    for _ in range(2):
        kept.expire()
        left.append(cache.tree.num_tokens)
    assert left == [4, 0]


def test_a_namespace_is_forgotten_but_for_what_is_held() -> None:
    cache = Cache()
    node = cache.store([1, 2, 3, 4, 5])
    for tail in ([6, 7], [8, 9, 9, 9], [8, 9, 1]):
        cache.keep([1, 2, 3, 4, 5, *tail])
    cache.tree.forget_namespace("")
    cache.check()
    assert cache.match([1, 2, 3, 4, 5, 8, 9]) == 5
    cache.unlock(node)
    cache.tree.forget_namespace("")
    cache.tree.forget_namespace("another")
    cache.check()
    assert not cache.tree.roots and cache.pool.free == 64
