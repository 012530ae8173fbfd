"""A whole model on the Triton kernels: prompts, decode by graphs, shared prefixes, 8-bit caches.

The kernels run where they can: interpreted, or on a GPU by `tests/gpu`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from rootlace.kernels.triton import TRITON
from rootlace.kernels.triton.attention import AttentionRules, plan_attention
from rootlace.kernels.triton.attention_plan import SplitRule
from rootlace.kernels.triton.shared_nodes import SharingRule
from rootlace.protocol import SamplingParams
from rootlace.runtime.model.graphs import USES_BEFORE_CAPTURE
from tests.model.chains import next_plan, take_behind
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
    "llama": LlamaConfig(**SHAPE),
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
