"""Traces as requests: repeated, accelerated, in units of several tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.simulation.trace import FIRST_OUTPUT, Load, Trace, Workload, read_trace
from tests.simulation.traces import token_trace, write_azure, write_mooncake


def _common(a: np.ndarray, b: np.ndarray) -> int:
    shared = 0
    for x, y in zip(a.tolist(), b.tolist(), strict=False):
        if x != y:
            break
        shared += 1
    return shared


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    rows = [
        (0, 1200, 40, [0, 1, 2]),
        (2, 1200, 1, [0, 1, 2]),
        (3, 1536, 9, [0, 1, 3]),
        (6, 513, 0, [7, 8]),
    ]
    return read_trace(write_mooncake(tmp_path / "t.jsonl", rows))


@pytest.mark.parametrize("granularity", [1, 16, 64, 512])
def test_prompts_agree_as_far_as_their_blocks(trace: Trace, granularity: int) -> None:
    workload = Workload(trace, Load(granularity=granularity))
    prompts = [workload.prompt(number) for number in range(4)]
    assert [len(p) for p in prompts] == [-(-n // granularity) for n in (1200, 1200, 1536, 513)]
    assert all(p.dtype == np.int32 and p.min() >= 0 and p.max() < FIRST_OUTPUT for p in prompts)
    assert _common(prompts[0], prompts[1]) == len(prompts[0])
    assert _common(prompts[0], prompts[2]) == 1024 // granularity
    assert _common(prompts[0], prompts[3]) == 0
    assert workload.outputs.tolist() == [40, 1, 9, 1]


def test_copies_have_their_own_blocks_but_for_those_many_share(tmp_path: Path) -> None:
    # Block 0 is in all 300 requests, block 1 in three, which is 1 %, and block 2 in two.
    rows = [
        (n, 1025, 1, [0, [1, 1, 1, 2, 2][n] if n < 5 else 10 + n, 1000 + n]) for n in range(300)
    ]
    trace = read_trace(write_mooncake(tmp_path / "t.jsonl", rows))
    workload = Workload(trace, Load(repeat=3, granularity=64))
    assert len(workload) == 900
    for number, blocks in ((0, 2), (3, 1), (200, 1)):
        first, second, third = (workload.prompt(number + 300 * copy) for copy in range(3))
        assert _common(first, second) == _common(second, third) == blocks * 8
    within = [
        _common(workload.prompt(300 + a), workload.prompt(300 + b)) for a, b in ((0, 1), (3, 4))
    ]
    assert within == [16, 16]


def test_when_copies_arrive(trace: Trace) -> None:
    assert Workload(trace, Load(rate=2)).arrivals.tolist() == [0, 1, 1.5, 3]
    arrivals = Workload(trace, Load(repeat=2)).arrivals.tolist()
    assert arrivals == [0, 2, 3, 6, 8, 10, 11, 14]  # a mean gap of 2 behind the last
    assert Workload(trace, Load(requests=6)).arrivals.tolist() == arrivals[:6]
    assert Workload(trace, Load(requests=3)).arrivals.tolist() == arrivals[:3]


@pytest.mark.parametrize("requests", [3, 4, 7, 12])
def test_all_blocks_are_those_of_each(trace: Trace, requests: int) -> None:
    workload = Workload(trace, Load(requests=requests, granularity=32))
    blocks, units, starts = workload.all_blocks()
    assert len(starts) == requests + 1 and starts[-1] == len(blocks) == len(units)
    for number in range(requests):
        mine = slice(starts[number], starts[number + 1])
        assert blocks[mine].tolist() == workload.blocks(number).tolist()
        assert units[mine].sum() == workload.prompt_units[number] == len(workload.prompt(number))


def test_prompts_of_azure_share_nothing(tmp_path: Path) -> None:
    path = write_azure(tmp_path / "t.csv", [(0, 100, 1), (1, 37, 1), (2, 100, 1)])
    workload = Workload(read_trace(path), Load(repeat=2, granularity=16))
    prompts = [workload.prompt(number) for number in range(6)]
    assert [len(prompt) for prompt in prompts] == [7, 3, 7] * 2
    assert len({int(prompt[0]) for prompt in prompts}) == 6


@pytest.mark.parametrize(
    "load",
    [
        Load(granularity=0),
        Load(rate=0),
        Load(rate=float("nan")),
        Load(rate=float("inf")),
        Load(repeat=0),
        Load(requests=0),
        Load(requests=2**31),
        Load(granularity=100),
    ],
)
def test_a_load_that_does_not_fit(trace: Trace, load: Load) -> None:
    with pytest.raises(ValueError):
        Workload(trace, load)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=2, max_size=6))
def test_token_by_token(prompts: list[list[int]]) -> None:
    workload = Workload(token_trace(prompts), Load(granularity=1))
    units = [workload.prompt(number) for number in range(len(prompts))]
    for a in range(len(prompts)):
        for b in range(len(prompts)):
            same = _common(np.array(prompts[a]), np.array(prompts[b]))
            assert _common(units[a], units[b]) == same
