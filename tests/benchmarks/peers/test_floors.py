"""The floor: what a workload is made of, against brute force, and seconds worked out by hand."""

import itertools
import json
from pathlib import Path

import pytest

from benchmarks.peers.floors import floor_of, work_of
from benchmarks.peers.workloads import WORKLOADS, Request, Workload
from benchmarks.random_models import CONFIGS
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.families.spec import ModelSpec
from tests.benchmarks.peers.test_workloads import SIZES, answer

STEPS = {"W1": 15, "W2": 4 * 31, "W3": 2 * 31, "W4": 63, "W5": 15}


def waves(name: str, scale: float) -> list[list[Request]]:
    workload = Workload(name, 0, scale)
    found, todo = [], workload.start()
    while todo:
        found.append(todo)
        todo = [
            following
            for request in todo
            for following in workload.answered(request, answer(request.name, request.wanted))
        ]
    return found


def replies(name: str, scale: float) -> dict[str, list[int]]:
    requests = itertools.chain(*waves(name, scale))
    return {request.name: answer(request.name, request.wanted) for request in requests}


def prefixes(tokens: list[int]) -> list[int]:
    """What stands for each prefix of `tokens`, the shortest first."""
    return list(itertools.accumulate(tokens, lambda known, token: hash((known, token)), initial=0))


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_work_against_sets_of_prefixes(name: str) -> None:
    scale = 0.05
    work = work_of(Workload(name, 0, scale), replies(name, scale))
    have: set[int] = set()
    computed = context = 0
    tokens, rows = [], []
    for wave in waves(name, scale):
        for request in wave:
            length = len(request.prompt)
            marks = prefixes(request.prompt)
            new = [end for end in range(1, length + 1) if marks[end] not in have or end == length]
            computed += len(new)
            context += sum(new)
            have.update(marks)
        wholes = [prefixes(r.prompt + answer(r.name, r.wanted)) for r in wave]
        for step in range(1, wave[0].wanted):
            ends = [len(r.prompt) + step for r in wave]
            held = {m for whole, end in zip(wholes, ends, strict=True) for m in whole[1 : end + 1]}
            tokens.append(len(held))
            rows.append(len(wave))
        for whole in wholes:
            have.update(whole[:-1])
    new_tokens = sum(prompt.new for prompt in work.prompts)
    attended = sum(sum(range(p.context - p.new + 1, p.context + 1)) for p in work.prompts)
    assert (new_tokens, attended) == (computed, context)
    assert (work.step_tokens, [len(step) for step in work.steps]) == (tokens, rows)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_the_whole_workloads(name: str) -> None:
    work = work_of(Workload(name), replies(name, 1.0))
    prompt_tokens = sum(prompt.context for prompt in work.prompts)
    assert (len(work.prompts), prompt_tokens) == SIZES[name][:2]
    assert len(work.step_tokens) == STEPS[name]
    if name == "W1":
        new_tokens = sum(prompt.new for prompt in work.prompts)
        assert prompt_tokens - new_tokens == 63_000  # as the issue has it


@pytest.fixture
def model_b(tmp_path: Path) -> ModelSpec:
    """The bigger model of `benchmarks.random_models`."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["b"]))
    return ModelConfig.read(tmp_path).spec


LAYERS, HEAD = 12 * (2 * 768 * 768 + 2 * 256 * 768 + 3 * 768 * 3072), 32_000 * 768
NORMS = (2 * 12 + 1) * 768


def test_seconds_by_hand(model_b: ModelSpec) -> None:
    """Nothing shared, one request of 256 tokens and 64 out."""
    work = work_of(Workload("W4", 0, 0.01), {"0": answer("0", 64)})
    floor = floor_of(work, model_b, "bfloat16", rate=1e12, bandwidth=1e11)
    assert floor.prefill_s == pytest.approx((2 * LAYERS * 256 + 2 * HEAD) / 1e12)
    size = [2 * (LAYERS + HEAD + NORMS) + 12_288 * (256 + step) for step in range(1, 64)]
    assert pytest.approx(257e6, rel=0.002) == 2 * (LAYERS + HEAD)  # as the issue has it
    assert floor.decode_s == pytest.approx(sum(size) / 1e11)
    assert floor.floor_s == floor.prefill_s + floor.decode_s
    # One row: bytes, not flops, bound a step. A prompt's token attends to all up to itself.
    attention = 4 * 12 * 12 * 64 * (256 * 257 // 2) / 1e12
    assert floor.arithmetic_s == pytest.approx(floor.floor_s + attention)


def test_many_rows_are_bound_by_arithmetic(model_b: ModelSpec) -> None:
    work = work_of(Workload("W4"), replies("W4", 1.0))
    floor = floor_of(work, model_b, "bfloat16", rate=1e12, bandwidth=1e14)
    flops = 2 * (LAYERS + HEAD) * 32 * 63
    assert floor.arithmetic_s - floor.prefill_s > flops / 1e12 > floor.decode_s
