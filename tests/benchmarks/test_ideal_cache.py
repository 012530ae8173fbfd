"""The ideal hit rate and percentiles are right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import percentile
from benchmarks.ideal_cache import IdealCache
from benchmarks.peers.workloads import Workload

Request = tuple[list[int], list[int]]


def best_hits(played: list[Request]) -> tuple[int, int]:
    """By comparing every prompt with everything that came before it."""
    seen: list[list[int]] = []
    cached = total = 0
    for prompt, output in played:
        common = 0
        for other in seen:
            length = 0
            while length < min(len(other), len(prompt)) and other[length] == prompt[length]:
                length += 1
            common = max(common, length)
        cached += min(common, len(prompt) - 1)
        total += len(prompt)
        seen.append(prompt + output[:-1])
    return cached, total


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=8),
            st.lists(st.integers(0, 2), min_size=1, max_size=3),
        ),
        max_size=12,
    )
)
def test_ideal_cache_against_brute_force(played: list[Request]) -> None:
    ideal = IdealCache()
    for prompt, output in played:
        ideal.submit(prompt)
        ideal.finish(prompt, output)
    assert (ideal.cached_tokens, ideal.prompt_tokens) == best_hits(played)


def test_nothing_is_shared_where_nothing_is() -> None:
    ideal = IdealCache()
    for request in Workload("W4", 1).start():
        ideal.submit(request.prompt)
        ideal.finish(request.prompt, request.prompt[:64])
    assert ideal.cached_tokens < 0.01 * ideal.prompt_tokens


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(0, 1))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(np.quantile(values, q), rel=1e-9, abs=1e-6)
