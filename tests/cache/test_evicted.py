"""What is remembered of evictions, against a set of all prefixes that were ever cached."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.cache import journal as module
from rootlace.runtime.cache.journal import Cause, Evicted
from rootlace.runtime.cache.node import Node
from rootlace.runtime.cache.radix_tree import RadixTree
from tests.cache.test_radix_tree import Cache

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
STEPS = st.lists(PROMPTS | st.integers(1, 6) | st.none(), min_size=1, max_size=25)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


@settings(max_examples=60, deadline=None)
@given(STEPS, PROMPTS)
def test_how_far_a_prompt_would_be_known_without_evictions(steps: list, prompt: list[int]) -> None:
    """A list is cached, a number of blocks is evicted, None flushes."""
    cache = Cache(block_size=2, num_blocks=200)
    ever: set[tuple[int, ...]] = {()}
    for step in steps:
        if isinstance(step, list):
            cache.keep(step)
            ever |= {tuple(step[:end]) for end in range(len(step) + 1)}
        elif step is None:
            cache.tree.flush()
        else:
            cache.tree.evict(step)
        cache.check()
        known = cache.match(prompt)
        reach, first = cache.tree.evicted.beyond("", array(prompt), known)
        longest = max(end for end in range(len(prompt) + 1) if tuple(prompt[:end]) in ever)
        assert reach == longest
        assert (first is not None) == (reach > known)


def test_an_eviction_is_told_with_its_time_and_cause() -> None:
    now = [10.0]
    cache = Cache()
    cache.tree = RadixTree(cache.pool, evicted=Evicted(lambda: now[0]))
    cache.keep([1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.tree.evicted.cause = Cause("ours", "agent")
    cache.tree.evict(1)
    now[0] = 12.5
    reach, eviction = cache.tree.evicted.beyond("", array([1, 2, 3, 4, 5, 6, 7, 8, 9, 1]), 8)
    assert reach == 9 and eviction is not None
    assert eviction.cause == Cause("ours", "agent")
    assert cache.tree.evicted.seconds_since(eviction) == 2.5
    # Evicted once more, it is the last time that counts.
    cache.keep([1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.tree.evicted.cause = Cause("ours", "other")
    cache.tree.evict(1)
    now[0] = 13.0
    _, eviction = cache.tree.evicted.beyond("", array([1, 2, 3, 4, 5, 6, 7, 8, 9, 1]), 8)
    assert eviction is not None and eviction.cause.program == "other"
    assert cache.tree.evicted.seconds_since(eviction) == 0.5
    # What stood in one namespace says nothing of another.
    assert cache.tree.evicted.beyond("theirs", array([1, 2, 3, 4, 5, 6, 7, 8, 9]), 0) == (0, None)


def test_memory_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 10)
    monkeypatch.setattr(module, "MAX_RECORDS", 3)
    evicted = Evicted()
    root = Node.root(1, "")
    for first in range(20):
        tokens = array([first, *range(1, 1 + first % 5)])
        evicted.note(Node(2 + first, root, 0, len(tokens), tokens, array([0])), 0)
        assert len(evicted._records) <= 3
        assert sum(len(record.tokens) for record in evicted._records) == evicted._tokens <= 10
    assert evicted.beyond("", array([19, 1, 2, 3, 4]), 0)[0] == 5
    assert evicted.beyond("", array([0]), 0)[0] == 0
