"""Steps launched ahead, on tokens that are not known yet, equal steps run one by one."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import AutomatonState, SteppedAutomaton, StepPlan, StepResult
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.protocol import SamplingParams
from tests.model.chains import first_plan, next_plan, run_ahead, run_plain, with_automata
from tests.model.checkpoints import SHAPE, configs, save
from tests.model.plans import Blocks, Row, Work, make_plan

VOCAB = SHAPE["vocab_size"]
PARAMS = [
    SamplingParams(temperature=0.0, seed=0, logprobs=True, top_logprobs=2),
    SamplingParams(temperature=1.3, seed=7),
    SamplingParams(temperature=0.9, seed=8, top_k=9, top_p=0.8),
    SamplingParams(temperature=0.7, seed=9, repetition_penalty=1.3, frequency_penalty=0.5),
]
PENALISED = 3


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("llama")
    save(configs()["llama"], folder)
    runner = ModelRunner.load(ExecutorConfig(model=str(folder)), CacheConfig(4, 64), 512, 16)
    with torch.inference_mode():
        runner.kv_cache.fill_(float("nan"))
    return runner


def rows(runner: ModelRunner, count: int = len(PARAMS)) -> list[Row]:
    blocks = Blocks(runner.num_blocks, 4)
    rng = np.random.default_rng(1)
    return [Row(blocks, rng.integers(3, VOCAB, 5 + 3 * i).tolist()) for i in range(count)]


def same(found: Sequence[StepResult], expected: Sequence[StepResult]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        for a, b in zip(one.scores, other.scores, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-5, atol=5e-5)
                assert a.top_ids.tolist() == b.top_ids.tolist()


@pytest.mark.parametrize("also_late", [(), (0, 1)])
def test_a_chain_launched_ahead_equals_one_step_at_a_time(
    runner: ModelRunner, also_late: tuple[int, ...]
) -> None:
    expected = run_plain(runner, rows(runner), PARAMS, 6)
    found = run_ahead(runner, rows(runner), PARAMS, 6, lambda step: (PENALISED, *also_late))
    same(found, expected)


def test_only_some_steps_are_late(runner: ModelRunner) -> None:
    expected = run_plain(runner, rows(runner, 3), PARAMS[:3], 6)
    found = run_ahead(runner, rows(runner, 3), PARAMS[:3], 6, lambda step: (2,) * (step % 2))
    same(found, expected)


def test_feeds_come_from_any_sample_of_the_step_before(runner: ModelRunner) -> None:
    """Rows change places, one is gone."""
    params = PARAMS[:3]
    expected = run_plain(runner, rows(runner, 3), params, 1)
    first, second, third = rows(runner, 3)
    launched = runner.launch(first_plan([first, second, third], params))
    plan = next_plan([third, first], [params[2], params[0]])
    moved = replace(
        plan,
        samples=[replace(plan.samples[0], source=2), replace(plan.samples[1], source=0)],
        feeds=np.array([(0, 2), (1, 0)], np.int32),
    )
    result = runner.collect(runner.launch(moved))
    runner.collect(launched)
    assert result.token_ids.tolist() == expected[1].token_ids[[2, 0]].tolist()


EVEN_ODD = SteppedAutomaton(
    key=2**41,
    # Even tokens are of class 0, odd ones of class 1; after an even one comes an odd one.
    token_class=np.arange(VOCAB, dtype=np.int32) % 2,
    next_state=np.array([[1, -1], [-1, 0]], np.int32),
    mask_of=np.array([0, 1], np.int32),
    masks=np.array([[0x55555555] * 7, [-0x55555556] * 7], np.int32),
)


def test_an_automaton_is_stepped_by_the_token_before(runner: ModelRunner) -> None:
    params = PARAMS[:3]
    mine = rows(runner, 3)
    start = AutomatonState(EVEN_ODD, 0)
    launched = runner.launch(with_automata(first_plan(mine, params), [start, None, start]))
    results = []
    for step in range(4):
        state = AutomatonState(EVEN_ODD, step % 2)  # before the token that is not known
        following = runner.launch(with_automata(next_plan(mine, params), [state, None, state]))
        results.append(runner.collect(launched))
        launched = following
    results.append(runner.collect(launched))
    for step, result in enumerate(results):
        assert (result.token_ids[[0, 2]] % 2 == step % 2).all()


def test_a_failed_row_feeds_nothing_that_matters(runner: ModelRunner) -> None:
    """A row with no distribution is fed as some token; the row beside it goes on as ever."""
    params = [PARAMS[1], PARAMS[0]]
    (alone,) = rows(runner, 1)
    expected = run_plain(runner, [alone], [PARAMS[0]], 1)
    (mine,) = rows(runner, 1)
    beside = Row(mine.blocks, [9, 9, 9])
    plan = first_plan([beside, mine], params)
    nothing = np.zeros(7, np.int32)
    plan = replace(plan, samples=[replace(plan.samples[0], mask=nothing), plan.samples[1]])
    launched = runner.launch(plan)
    after = runner.collect(runner.launch(next_plan([beside, mine], params)))
    before = runner.collect(launched)
    assert before.token_ids[0] == -1
    assert before.token_ids[1] == expected[0].token_ids[0]
    assert after.token_ids[1] == expected[1].token_ids[0]


def test_what_a_step_raises_is_raised_where_it_is_collected(runner: ModelRunner) -> None:
    def wait() -> None:
        raise OSError("no masks")

    (row,) = rows(runner, 1)
    plan = replace(first_plan([row], PARAMS[:1]), wait_for_masks=wait)
    launched = runner.launch(plan)
    following = runner.launch(next_plan([row], PARAMS[:1]))
    with pytest.raises(OSError, match="no masks"):
        runner.collect(launched)
    with pytest.raises(RuntimeError, match="the step before failed"):
        runner.collect(following)
    # The executor itself goes on.
    (row,) = rows(runner, 1)
    assert runner.run(first_plan([row], PARAMS[:1])).token_ids[0] >= 0


def test_a_late_plan_is_sampled_before_anything_follows(runner: ModelRunner) -> None:
    mine = rows(runner, 1)
    launched = runner.launch(first_plan(mine, PARAMS[:1]))
    plan = next_plan(mine, PARAMS[:1])
    plan = replace(plan, samples=[replace(plan.samples[0], late=True)])
    late = runner.launch(plan)
    ahead = runner.launch(next_plan(mine, PARAMS[:1]))
    with pytest.raises(RuntimeError, match="sampled before the next one"):
        runner.collect(ahead)
    alone = [replace(sample, source=-1) for sample in plan.samples]
    late = runner.launch(replace(plan, feeds=plan.feeds[:0], samples=alone))
    with pytest.raises(RuntimeError, match="sampled before its result"):
        runner.collect(late)
    # Given up, it is in nobody's way.
    assert runner.run(first_plan(rows(runner, 1), PARAMS[:1])).token_ids[0] >= 0
    runner.collect(launched)
    with pytest.raises(RuntimeError, match="late"):
        runner.run(plan)


def test_a_plan_without_tokens_only_copies(runner: ModelRunner) -> None:
    (row,) = rows(runner, 1)
    runner.run(first_plan([row], PARAMS[:1]))
    source, target = row.table[0], 50
    empty = replace(plan_of_nothing(), copies=np.array([[source, target, 3]], np.int32))
    result = runner.run(empty)
    assert len(result.token_ids) == 0
    cache = runner.kv_cache
    assert torch.equal(cache[:, :, target, :3], cache[:, :, source, :3])


def plan_of_nothing() -> StepPlan:
    row = Row(Blocks(64, 4), [1, 2])
    plan = make_plan([Work(row)])
    return replace(
        plan,
        token_ids=plan.token_ids[:0],
        positions=plan.positions[:0],
        slots=plan.slots[:0],
        row_start=np.zeros(1, np.int32),
        context_len=plan.context_len[:0],
        block_tables=plan.block_tables[:0],
        samples=[],
    )
