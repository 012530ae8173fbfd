"""The loads are what they say, and the ideal hit rate is right."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import percentile
from benchmarks.ideal_cache import IdealCache
from benchmarks.loads import LOADS

VOCAB = 1000
Request = tuple[list[int], list[int]]


def play(name: str, seed: str, scale: float = 1.0) -> list[Request]:
    """The requests of a load, in order of submission, answered at random."""
    requests: list[Request] = []
    answers = random.Random(f"answers/{seed}")

    async def ask(prompt: list[int], count: int) -> list[int]:
        output = [answers.randrange(VOCAB) for _ in range(count)]
        requests.append((list(prompt), output))
        await asyncio.sleep(0)
        return output

    async def run() -> None:
        await asyncio.gather(*LOADS[name].start(seed, VOCAB, ask, scale))

    asyncio.run(run())
    return requests


@pytest.mark.parametrize("name", LOADS)
def test_seeded(name: str) -> None:
    assert play(name, "1", 0.25) == play(name, "1", 0.25)
    assert play(name, "1", 0.25) != play(name, "2", 0.25)


@pytest.mark.parametrize(
    ("name", "requests", "longest"),
    [
        ("few-shot", 64, 1060),
        ("chat", 8 * 4, 200 + 4 * 100 + 3 * 32),
        ("tree-search", 4 * (4 + 16), 400 + 20 + 32 + 20),
        ("long-docs", 4 * 6, 4030),
        ("no-sharing", 32, 256),
    ],
)
def test_sizes(name: str, requests: int, longest: int) -> None:
    played = play(name, "1")
    assert len(played) == requests
    assert max(len(prompt) for prompt, _ in played) == longest


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
    for prompt, output in play("no-sharing", "1"):
        ideal.submit(prompt)
        ideal.finish(prompt, output)
    assert ideal.hit_rate < 0.01


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(0, 1))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(np.quantile(values, q), rel=1e-9, abs=1e-6)
