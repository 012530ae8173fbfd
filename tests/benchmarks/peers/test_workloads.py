"""W1 to W5: the same tokens as the peers' drivers, and how much work they are."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.peers_parts.workloads import WORKLOADS, Workload, fingerprint

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
    seen = play(WORKLOADS[name]())
    found = (len(seen), sum(len(p) for p, _ in seen.values()), sum(n for _, n in seen.values()))
    assert found == SIZES[name]


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_seed_is_a_workload(name: str) -> None:
    first, again, other = (play(WORKLOADS[name](seed)) for seed in (3, 3, 4))
    assert first == again
    assert not any(first[request] == other[request] for request in first)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_scale_takes_units_away_and_leaves_lengths(name: str) -> None:
    whole, part = WORKLOADS[name](1), WORKLOADS[name](1, 0.01)
    lengths = {len(request.prompt) for request in whole.start()}
    assert {len(request.prompt) for request in part.start()} == lengths
    assert 0 < len(part.start()) < len(whole.start())


def test_a_small_vocabulary_is_kept_to() -> None:
    for make in WORKLOADS.values():
        prompts = [p for p, _ in play(make(0, 0.1, 260), fixed=True).values()]
        assert all(130 <= token < 260 for prompt in prompts for token in prompt)


@pytest.fixture(scope="module")
def drivers_workloads(shared_dir: Path) -> ModuleType:
    path = shared_dir / "bench" / "workloads.py"
    if not path.exists():
        pytest.skip(f"needs the peers' drivers ({path})")
    spec = importlib.util.spec_from_file_location("drivers_workloads", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("reply", ["engine", "fixed"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("seed", [0, 7, "warm"])
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_token_for_token_those_of_the_drivers(
    name: str, seed: int | str, scale: float, reply: str, drivers_workloads: ModuleType
) -> None:
    theirs = drivers_workloads.make(name, seed=seed, scale=scale, reply=reply)
    todo = theirs.start()
    ours = WORKLOADS[name](seed, scale)
    said = fingerprint([(r.rid, r.prompt, r.max_new) for r in todo])
    assert fingerprint([(r.name, r.prompt, r.wanted) for r in ours.start()]) == said
    assert [r.name for r in ours.start()] == [r.rid for r in todo]
    expected = {}
    while todo:
        request = todo.pop(0)
        expected[request.rid] = (list(request.prompt), request.max_new)
        todo += theirs.done(request, answer(request.rid, request.max_new))
    assert play(ours, fixed=reply == "fixed") == expected
