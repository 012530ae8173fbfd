"""W1 to W5: how much work they are, and that a seed means the same work everywhere."""

import random

import pytest

from benchmarks.peers.workloads import WORKLOADS, Workload

SIZES = {  # requests, prompt tokens, output tokens: as the issue that asks for them has it
    "W1": (64, 67_840, 1024),
    "W2": (32, 15_936, 1024),
    "W3": (80, 36_928, 2560),
    "W4": (32, 8192, 2048),
    "W5": (24, 96_720, 384),
}


def answer(name: str, wanted: int) -> list[int]:
    source = random.Random(name)
    return [source.randrange(300, 32_000) for _ in range(wanted)]


def play(workload: Workload, fixed: bool = False) -> dict[str, tuple[list[int], int]]:
    """Every request, each answered in its turn."""
    seen, todo = {}, workload.start()
    while todo:
        request = todo.pop(0)
        assert request.name not in seen
        seen[request.name] = (list(request.prompt), request.wanted)
        reply = workload.fixed_reply(request) if fixed else answer(request.name, request.wanted)
        todo += workload.answered(request, reply)
    return seen


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_sizes(name: str) -> None:
    seen = play(Workload(name))
    found = (len(seen), sum(len(p) for p, _ in seen.values()), sum(n for _, n in seen.values()))
    assert found == SIZES[name]


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_seed_is_a_workload(name: str) -> None:
    first, again, other = (play(Workload(name, seed)) for seed in (3, 3, 4))
    assert first == again
    assert not any(first[request] == other[request] for request in first)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_scale_takes_units_away_and_leaves_lengths(name: str) -> None:
    whole, part = Workload(name, 1), Workload(name, 1, 0.01)
    lengths = {len(request.prompt) for request in whole.start()}
    assert {len(request.prompt) for request in part.start()} == lengths
    assert 0 < len(part.start()) < len(whole.start())


def test_a_small_vocabulary_is_kept_to() -> None:
    for name in WORKLOADS:
        prompts = [p for p, _ in play(Workload(name, 0, 0.1, 260), fixed=True).values()]
        assert all(130 <= token < 260 for prompt in prompts for token in prompt)
