"""A whole model on the Triton kernels: prompts, decode by graphs, shared prefixes, 8-bit caches.

The kernels run where they can: interpreted, or on a GPU by `tests/gpu`.
"""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from rootlace.kernels.triton import TRITON
from rootlace.kernels.triton.attention import AttentionRules, plan_attention
from rootlace.kernels.triton.attention_plan import SharingRule, SplitRule
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import AutomatonState, SteppedAutomaton, StepResult
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.executor.staging import USES_BEFORE_CAPTURE
from rootlace.wire.protocol import SamplingParams
from tests.model.chains import first_plan, next_plan, run_ahead, take_behind, with_automata
from tests.model.checkpoints import reference_logprobs, save
from tests.model.device_runner import device_runner
from tests.model.fake_device import FakeDevice
from tests.model.plans import Blocks, Row, Work, make_plan

BLOCKS, SIZE, CONTEXT = 24, 16, 256
SHAPE = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "head_dim": 16,
}
GREEDY = SamplingParams(temperature=0.0, seed=0, logprobs=True)
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**(SHAPE | {"num_hidden_layers": 1})),
    "qwen3-sliding": Qwen3Config(
        **SHAPE, use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
}
# Contexts of a test are short: what is worth it on a GPU never is.
SHARING = SharingRule(node_bytes=0, step_bytes=0, least_segment=16, unit=16)
RULES = AttentionRules(split=SplitRule(least=32, most=4), sharing=SHARING)


class Counting:
    """`plan_attention` with rules for short contexts; how many plans share anything."""

    shared = 0

    def __call__(self, *given: object, **options: object) -> object:
        plan = plan_attention(*given, **options, rules=RULES)  # type: ignore[arg-type]
        if plan.decode is not None:
            self.shared += int(plan.decode.numbers[1] > 0)
        return plan


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_greedy_decoding_is_transformers_own(name: str, tmp_path: Path) -> None:
    """Three rows below one prefix, one alone: prompts in two steps, then decode launched ahead."""
    model = save(CONFIGS[name], tmp_path)
    planning = Counting()
    kernels = replace(TRITON, plan_attention=planning)
    steps = device_runner(
        tmp_path, FakeDevice(), kernels, blocks=BLOCKS, block_size=SIZE, max_rows=8
    )
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(3, SHAPE["vocab_size"], count)]

    blocks = Blocks(BLOCKS, SIZE)
    prefix, alone = Row(blocks, tokens(48)), Row(blocks, tokens(37))
    steps.collect(steps.launch(make_plan([Work(prefix, params=None), Work(alone, 20, None)])))
    rows = [
        Row(blocks, prefix.token_ids + tokens(count), computed=48, table=list(prefix.table))
        for count in (1, 3, 9)
    ]
    rows.append(alone)
    launched = steps.launch(make_plan([Work(row, params=GREEDY) for row in rows]))
    results = []
    for _ in range(USES_BEFORE_CAPTURE + 2):
        following = steps.launch(next_plan(rows, [GREEDY] * 4))
        results.append(steps.collect(launched))
        take_behind(rows, results[-1])
        launched = following
    results.append(steps.collect(launched))
    assert steps.stats()["graph_replays"] == 2
    assert planning.shared >= 4
    for index, row in enumerate(rows):
        expected = reference_logprobs(model, row.token_ids).numpy()
        for step, result in enumerate(results):
            at = len(row.token_ids) - len(results) + step
            scores = result.scores[index]
            assert scores is not None
            assert result.token_ids[index] == expected[at].argmax()
            assert abs(scores.logprobs[0] - expected[at].max()) < 1e-4


EVEN_ODD = SteppedAutomaton(
    key=2**42,
    # Even tokens are of class 0, odd ones of class 1; after an even one comes an odd one.
    token_class=np.arange(SHAPE["vocab_size"], dtype=np.int32) % 2,
    next_state=np.array([[1, -1], [-1, 0]], np.int32),
    mask_of=np.array([0, 1], np.int32),
    masks=np.array([[0x55555555] * 3, [-0x55555556] * 3], np.int32),
)


def test_sampling_on_the_device_is_the_plain_runners(tmp_path: Path) -> None:
    """Drawn, cut, penalised, scored and constrained rows, launched ahead."""
    save(CONFIGS["llama"], tmp_path)
    plain = ModelRunner.load(
        ExecutorConfig(model=str(tmp_path), device="cpu"), CacheConfig(SIZE, BLOCKS), 64, 8
    )
    runner = device_runner(
        tmp_path, FakeDevice(), TRITON, blocks=BLOCKS, block_size=SIZE, max_rows=8
    )
    params = [
        SamplingParams(temperature=1.1, seed=3, logprobs=True),
        SamplingParams(temperature=0.8, seed=4, top_k=9, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.0, seed=5, logprobs=True, top_logprobs=2),
        SamplingParams(temperature=0.9, seed=6, repetition_penalty=1.3, presence_penalty=0.2),
    ]

    def chain(executor: ModelRunner, count: int, late: tuple[int, ...]) -> list[StepResult]:
        blocks = Blocks(BLOCKS, SIZE)
        rng = np.random.default_rng(2)
        rows = [
            Row(blocks, rng.integers(3, SHAPE["vocab_size"], 4 + 5 * i).tolist())
            for i in range(count)
        ]
        return run_ahead(executor, rows, params[:count], 3, lambda step: late)

    for count, late in ((3, ()), (4, (3,))):
        pairs = zip(chain(runner, count, late), chain(plain, count, late), strict=True)
        for found, expected in pairs:
            assert found.token_ids.tolist() == expected.token_ids.tolist()
            for one, other in zip(found.scores, expected.scores, strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
                    assert one.top_ids.tolist() == other.top_ids.tolist()
    assert runner.stats()["graph_replays"] == 2 * (3 - USES_BEFORE_CAPTURE)

    blocks = Blocks(BLOCKS, SIZE)
    rows = [Row(blocks, [5, 6, 7]), Row(blocks, [9, 8])]
    state = AutomatonState(EVEN_ODD, 0)
    launched = runner.launch(with_automata(first_plan(rows, params[1:3]), [state, None]))
    for step in range(2):
        state = AutomatonState(EVEN_ODD, step % 2)  # before the token that is not known
        following = runner.launch(with_automata(next_plan(rows, params[1:3]), [state, None]))
        assert runner.collect(launched).token_ids[0] % 2 == step % 2
        launched = following
    assert runner.collect(launched).token_ids[0] % 2 == 0


def test_graphs_are_prepared_on_empty_rows(tmp_path: Path) -> None:
    save(CONFIGS["qwen3-sliding"], tmp_path)
    runner = device_runner(
        tmp_path, FakeDevice(), TRITON, blocks=BLOCKS, block_size=SIZE, max_rows=2
    )
    assert runner.prepare() and runner.prepare() and not runner.prepare()
    assert runner.stats()["graphs_captured"] == 2
    # Nothing was written where plans may look.
    assert runner.kv_cache.isnan().all()
