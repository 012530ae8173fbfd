"""The executor of a device, run on the CPU: fixed places, padding, graphs, feeds, late rows.

Whatever way a step takes, it finds what the plain executor finds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import AutomatonState, ExecutorLost, StepPlan, StepResult
from rootlace.runtime.model.executor.device_steps import DeviceSteps, GraphKey
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.executor.staging import USES_BEFORE_CAPTURE
from rootlace.wire.protocol import SamplingParams
from tests.model.chains import first_plan, next_plan, run_ahead, run_plain, with_automata
from tests.model.checkpoints import SHAPE, configs, save
from tests.model.device_runner import device_runner
from tests.model.fake_device import FakeDevice, RecordingDevice
from tests.model.fixed_kernels import FixedAttention, fixed_kernels
from tests.model.plans import Blocks, Row, Work, make_plan
from tests.model.test_launched_steps import EVEN_ODD, same

VOCAB = SHAPE["vocab_size"]
BLOCKS, SIZE, MAX_ROWS = 96, 4, 12
PLAIN = [
    SamplingParams(temperature=0.0, seed=0, logprobs=True),
    SamplingParams(temperature=1.3, seed=7),
    SamplingParams(temperature=0.8, seed=8, logprobs=True),
]
PENALISED = SamplingParams(temperature=0.7, seed=9, repetition_penalty=1.3, frequency_penalty=0.5)
CUT = SamplingParams(temperature=0.9, seed=8, top_k=9, top_p=0.8)
SCORED = SamplingParams(temperature=0.0, seed=0, logprobs=True, top_logprobs=3)


@dataclass
class Subject:
    """A device's executor and the plain one of the same model."""

    steps: DeviceSteps
    plain: ModelRunner
    device: FakeDevice
    attention: FixedAttention

    num_blocks = BLOCKS

    def run(self, plan: StepPlan) -> StepResult:
        return self.steps.collect(self.steps.launch(plan))


def subject(folder: Path, device: FakeDevice, *, graphs: bool = True) -> Subject:
    plain = ModelRunner.load(
        ExecutorConfig(model=str(folder)), CacheConfig(SIZE, BLOCKS), 512, MAX_ROWS
    )
    with torch.inference_mode():
        plain.kv_cache.fill_(float("nan"))
    kernels, attention = fixed_kernels(SHAPE["max_position_embeddings"] // SIZE)
    runner = device_runner(
        folder,
        device,
        kernels,
        blocks=BLOCKS,
        block_size=SIZE,
        max_rows=MAX_ROWS,
        graphs=graphs,
    )
    steps = runner._steps
    assert isinstance(steps, DeviceSteps)
    return Subject(steps, plain, device, attention)


@pytest.fixture(scope="module", params=["llama", "qwen2-sliding", "qwen3", "opt"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save(configs()[request.param], folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save(configs()["llama"], folder)
    return folder


def rows(count: int, seed: int = 1) -> list[Row]:
    blocks = Blocks(BLOCKS, SIZE, seed)
    rng = np.random.default_rng(seed)
    return [Row(blocks, rng.integers(3, VOCAB, 2 + 3 * (i % 5)).tolist()) for i in range(count)]


@pytest.mark.parametrize("device", [FakeDevice, RecordingDevice])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_decode_by_graphs_equals_the_plain_executor(
    folder: Path, device: type[FakeDevice], count: int
) -> None:
    it = subject(folder, device())
    params = (PLAIN * 3)[:count]
    expected = run_plain(it.plain, rows(count), params, 6)
    found = run_ahead(it.steps, rows(count), params, 6)
    same(found, expected)
    graphs = it.steps.graphs.count
    assert graphs.captured == 1 == it.device.captures
    assert graphs.replayed == 6 - USES_BEFORE_CAPTURE
    assert it.steps.eager_steps == 1 + USES_BEFORE_CAPTURE  # the prompts, and before there was one
    bucket = {1: 1, 3: 4, 9: 12}[count]
    assert set(it.attention.planned) == {None, bucket}


def test_without_graphs_everything_is_the_same(llama: Path) -> None:
    it = subject(llama, FakeDevice(), graphs=False)
    expected = run_plain(it.plain, rows(3), PLAIN, 5)
    same(run_ahead(it.steps, rows(3), PLAIN, 5), expected)
    assert it.device.captures == 0 and it.steps.eager_steps == 6


@pytest.mark.parametrize("late", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("device", [FakeDevice, RecordingDevice])
def test_late_rows_are_sampled_behind_the_forward_graph(
    llama: Path, device: type[FakeDevice], late: tuple[int, ...]
) -> None:
    it = subject(llama, device())
    expected = run_plain(it.plain, rows(3), PLAIN, 8)
    found = run_ahead(it.steps, rows(3), PLAIN, 8, lambda step: late if step % 2 else ())
    same(found, expected)
    drawn = ("random", True, None)
    keys = {GraphKey(4, True, drawn)}
    if late:
        keys |= {GraphKey(4, True, None), GraphKey(4, False, drawn)}
    assert all(key in it.steps.graphs for key in keys)
    assert it.steps.graphs.count.captured == len(keys)


def test_rows_that_cannot_be_captured_are_sampled_behind_the_forward_graph(llama: Path) -> None:
    it = subject(llama, RecordingDevice())
    params = [PLAIN[0], PENALISED, CUT, SCORED]
    expected = run_plain(it.plain, rows(4), params, 6)
    found = run_ahead(it.steps, rows(4), params, 6, lambda step: (1,))
    same(found, expected)
    assert it.steps.graphs.count.captured == 1
    assert GraphKey(4, True, None) in it.steps.graphs


def test_masks_are_waited_for_behind_the_forward_graph(llama: Path) -> None:
    it = subject(llama, FakeDevice())
    mask = np.zeros(7, np.int32)
    mine, theirs = rows(2), rows(2)
    it.run(first_plan(mine, PLAIN[:2]))
    it.plain.run(first_plan(theirs, PLAIN[:2]))
    plan = make_plan([Work(row) for row in _grown(mine)])
    reference = make_plan([Work(row) for row in _grown(theirs)])
    samples = [replace(plan.samples[0], mask=mask), plan.samples[1]]
    waits = []

    def wait() -> None:
        waits.append(bool(torch.isfinite(it.steps._logits[:2]).all()))
        mask[2] = 1 << 5

    found = it.run(replace(plan, samples=samples, wait_for_masks=wait))
    assert waits == [True]
    assert found.token_ids[0] == 69
    assert found.token_ids[1] == it.plain.run(reference).token_ids[1]


def _grown(rows: list[Row]) -> list[Row]:
    for row in rows:
        row.token_ids.append(17)
    return rows


def test_mixed_steps_feed_and_are_fed(llama: Path) -> None:
    """Prompts in chunks beside decode rows, with prompt scores, tokens unknown as above."""
    it = subject(llama, RecordingDevice())
    results = []
    for executor in (it.plain, it.steps):
        first, second = rows(2, seed=5)
        long = Row(first.blocks, np.random.default_rng(3).integers(3, VOCAB, 30).tolist())
        found = []
        launched = executor.launch(
            make_plan([Work(first), Work(long, 7, score_from=1, score_top=2), Work(second)])
        )
        for chunk in (9, 14):
            for row in (first, second):
                row.token_ids.append(0)
            plan = make_plan(
                [Work(first), Work(long, chunk, params=SCORED, score_from=3), Work(second)]
            )
            # Samples of the step before: first and second, whatever `long` did there.
            ids = [sample.row for sample in plan.samples]
            feeds, samples = [], []
            for sample in plan.samples:
                if sample.row != 1:
                    source = 0 if sample.row == 0 else 1
                    sample = replace(sample, token_ids=sample.token_ids[:-1], source=source)
                    feeds.append((int(plan.row_start[sample.row]), source))
                samples.append(sample)
            plan = replace(plan, samples=samples, feeds=np.array(feeds, np.int32))
            after = executor.launch(plan)
            found.append(executor.collect(launched))
            first.token_ids[-1] = int(found[-1].token_ids[0])
            second.token_ids[-1] = int(found[-1].token_ids[1])
            launched = after
            assert ids == [0, 2] or chunk == 14
        found.append(executor.collect(launched))
        results.append(found)
    same(results[1], results[0])
    for one, other in zip(results[1], results[0], strict=True):
        for a, b in zip(one.prompt_scores, other.prompt_scores, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-5, atol=5e-5)
            assert a.top_ids.tolist() == b.top_ids.tolist()


def test_copies_and_duplicates(llama: Path) -> None:
    """A decode step with a copied block goes through its graph; duplicates take the other way."""
    it = subject(llama, RecordingDevice())
    results = []
    for executor in (it.plain, it):
        found = []
        blocks = Blocks(BLOCKS, SIZE, 9)
        row = Row(blocks, list(range(20, 26)))
        found.append(executor.run(make_plan([Work(row)])))
        for step in range(4):
            # A branch shares the row's first block and copies its second, partial one.
            branch = Row(blocks, [*row.token_ids[:6], 30 + step], computed=6, table=row.table[:1])
            branch.reserve(7)
            copies = [(row.table[1], branch.table[1], 2)]
            found.append(executor.run(make_plan([Work(branch)], copies)))
        other = Row(blocks, [*row.token_ids[:6], 40, 41], computed=6, table=row.table[:1])
        other.reserve(8)
        twin = Row(blocks, [*other.token_ids, 50], computed=8, table=row.table[:1])
        twin.reserve(9)
        copies = [(row.table[1], target.table[1], 2) for target in (other, twin)]
        duplicates = [(0, twin.slot(6)), (1, twin.slot(7))]
        found.append(executor.run(make_plan([Work(other), Work(twin)], copies, duplicates)))
        results.append(found)
    same(results[1], results[0])
    assert it.steps.graphs.count.replayed == 4 - USES_BEFORE_CAPTURE


def test_rows_without_samples_and_in_any_order(llama: Path) -> None:
    it = subject(llama, RecordingDevice())
    results = []
    for executor in (it.plain, it):
        mine = rows(5)
        executor.run(first_plan(mine, [PLAIN[0]] * 5))
        found = []
        for _ in range(4):
            plan = make_plan([Work(row, params=SCORED) for row in _grown(mine)])
            plan = replace(plan, samples=[plan.samples[i] for i in (3, 0, 4)])
            found.append(executor.run(plan))
        results.append(found)
    same(results[1], results[0])
    assert it.steps.graphs.count.replayed == 4 - USES_BEFORE_CAPTURE


def test_more_rows_than_any_bucket_are_run_without_graphs(llama: Path) -> None:
    it = subject(llama, FakeDevice())
    mine = rows(MAX_ROWS)
    assert it.steps._decode is not None
    it.steps._decode.buckets.pop()
    expected = run_plain(it.plain, rows(MAX_ROWS), [PLAIN[1]] * MAX_ROWS, 3)
    same(run_ahead(it.steps, mine, [PLAIN[1]] * MAX_ROWS, 3), expected)
    assert not it.device.captures


def test_what_cannot_be_captured_goes_on_without(llama: Path) -> None:
    class Broken(FakeDevice):
        def capture(self, work: object) -> object:  # type: ignore[override]
            raise RuntimeError("operation not permitted when stream is capturing")

    it = subject(llama, Broken())
    expected = run_plain(it.plain, rows(3), PLAIN, 5)
    same(run_ahead(it.steps, rows(3), PLAIN, 5), expected)
    count = it.steps.graphs.count
    assert (count.captured, count.failed) == (0, 1) and it.steps.eager_steps == 6


@pytest.mark.parametrize("late", [(), (3,)])
def test_the_device_sampler_in_graphs_equals_the_plain_one(
    llama: Path, late: tuple[int, ...]
) -> None:
    it = subject(llama, FakeDevice())
    params = [*PLAIN, PENALISED, CUT, SCORED] if late else [*PLAIN, CUT, SCORED, PLAIN[1]]
    expected = run_plain(it.plain, rows(6), params, 6)
    same(run_ahead(it.steps, rows(6), params, 6, lambda step: late), expected)
    assert it.steps.graphs.count.captured == 1
    assert it.steps.graphs.count.replayed == 6 - USES_BEFORE_CAPTURE


def test_automata_are_stepped_by_tokens_that_only_the_device_knows(llama: Path) -> None:
    it = subject(llama, FakeDevice())
    mine = rows(3)
    start = AutomatonState(EVEN_ODD, 0)
    launched = it.steps.launch(with_automata(first_plan(mine, PLAIN), [start, None, start]))
    results = []
    for step in range(6):
        state = AutomatonState(EVEN_ODD, step % 2)  # before the token that is not known
        following = it.steps.launch(with_automata(next_plan(mine, PLAIN), [state, None, state]))
        results.append(it.steps.collect(launched))
        launched = following
    results.append(it.steps.collect(launched))
    for step, result in enumerate(results):
        assert (result.token_ids[[0, 2]] % 2 == step % 2).all()
    assert it.steps.graphs.count.replayed == 6 - USES_BEFORE_CAPTURE
    assert it.steps.stats()["automaton_rows"] == 2 * 7


def test_graphs_are_prepared_for_what_is_asked_for(llama: Path) -> None:
    it = subject(llama, FakeDevice())
    mine = rows(2)
    it.run(first_plan(mine, PLAIN[:2]))
    start = AutomatonState(EVEN_ODD, 0)
    it.run(with_automata(next_plan(mine, [CUT, CUT]), [start, None]))
    while it.steps.prepare():
        pass
    assert it.steps._decode is not None
    # What was asked for last, and what everything begins with: greedy rows.
    assert it.steps.graphs.count.captured == 2 * len(it.steps._decode.buckets)
    before = it.steps.eager_steps
    for row in mine:
        row.token_ids[-1] = 5
    work = [Work(row, params=CUT) for row in _grown(mine)]
    found = it.run(with_automata(make_plan(work), [None, start]))
    assert it.steps.eager_steps == before and found.token_ids[1] % 2 == 0
    greedy = it.steps._sampler.plan([], 1)
    it.steps._capture(it.steps._decode, GraphKey(1, True, greedy.kind), greedy)
    with pytest.raises(RuntimeError, match="there was none"):  # its tokens were overwritten
        it.run(next_plan(mine, [CUT, CUT]))


def test_idle_time_is_used_to_capture(llama: Path) -> None:
    it = subject(llama, RecordingDevice())
    captured = 0
    while it.steps.prepare():
        captured += 1
    assert it.steps._decode is not None
    assert captured == len(it.steps._decode.buckets) == it.device.captures
    params = [SamplingParams(temperature=0.0, seed=0)] * 3  # what most ask for
    expected = run_plain(it.plain, rows(3), params, 3)
    same(run_ahead(it.steps, rows(3), params, 3), expected)
    assert it.steps.graphs.count.replayed == 3 and it.steps.eager_steps == 1


def test_what_cannot_be_prepared_is_left_alone(llama: Path) -> None:
    """No request asked for the capture, so its failure ends neither the loop nor further
    captures."""
    it = subject(llama, FakeDevice())
    decode = it.steps._decode
    assert decode is not None
    stage = decode.stage

    def full(plan: StepPlan, rows: int, arrays: Any) -> Any:
        if rows == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return None if rows == 4 else stage(plan, rows, arrays)

    decode.stage = full  # type: ignore[method-assign]
    prepared = 0
    while it.steps.prepare():
        prepared += 1
    count = it.steps.graphs.count
    assert prepared == len(decode.buckets) and count.failed == 2
    assert count.captured == len(decode.buckets) - 2
    decode.stage = stage  # type: ignore[method-assign]
    same(run_ahead(it.steps, rows(2), PLAIN[:2], 3), run_plain(it.plain, rows(2), PLAIN[:2], 3))


@pytest.mark.parametrize("where", ["launch", "collect", "prepare"])
def test_a_device_that_is_lost_ends_its_executor(llama: Path, where: str) -> None:
    class Faulty(FakeDevice):
        lost = False

        def works(self) -> bool:
            return not self.lost

    device = Faulty()
    it = subject(llama, device)

    def fault(*_: object, **__: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if where != "collect":
        device.lost = True
        it.steps._decoder.forward = fault  # type: ignore[method-assign]
    launched = it.steps.launch(first_plan(rows(1), PLAIN[:1]))
    if where == "collect":
        device.lost = True
        assert launched.fetched is not None
        launched.fetched = fault
    with pytest.raises(ExecutorLost, match="illegal memory access"):
        if where == "prepare":
            it.steps.prepare()
        else:
            it.steps.collect(launched)


def test_alternatives_of_many_rows_are_scored_in_parts(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootlace.runtime.model.sampler.LOGITS_BYTES", VOCAB * 2)
    it = subject(llama, FakeDevice())
    params = [SCORED, PLAIN[1], SCORED, SCORED, PLAIN[0]]
    same(run_ahead(it.steps, rows(5), params, 3), run_plain(it.plain, rows(5), params, 3))


def test_a_failed_step_is_raised_where_it_is_collected(llama: Path) -> None:
    it = subject(llama, FakeDevice())

    def wait() -> None:
        raise OSError("no masks")

    (row,) = rows(1)
    launched = it.steps.launch(replace(first_plan([row], PLAIN[:1]), wait_for_masks=wait))
    following = it.steps.launch(next_plan([row], PLAIN[:1]))
    with pytest.raises(OSError, match="no masks"):
        it.steps.collect(launched)
    with pytest.raises(RuntimeError, match="the step before failed"):
        it.steps.collect(following)
    assert it.run(first_plan(rows(1), PLAIN[:1])).token_ids[0] >= 0
