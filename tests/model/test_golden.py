"""Greedy decoding of trained checkpoints against files made with transformers."""

import json
from pathlib import Path

import numpy as np
import pytest

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from tests.model.plans import GREEDY, Blocks, Row, Work, make_plan

MARGIN = 1e-3
"""Where the two best tokens are closer than this another kernel may choose the other one."""


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("name", ["stories3M", "stories260K"])
def test_greedy_equals_transformers(shared_dir: Path, name: str, block_size: int) -> None:
    folder = shared_dir / "data" / "models" / name
    golden = json.loads((folder / "golden_greedy.json").read_text())["results"]
    runner = ModelRunner.load(
        ExecutorConfig(model=str(folder)), CacheConfig(block_size, 1024 // block_size), 512, 8
    )
    blocks = Blocks(runner.num_blocks, block_size)
    # All prompts in one batch; what is generated is forced to the golden tokens, so that a flip at
    # a tiny margin is judged once and does not derail the rest.
    rows = [Row(blocks, list(entry["prompt_ids"])) for entry in golden]
    for step in range(len(golden[0]["output_ids"])):
        result = runner.run(make_plan([Work(row) for row in rows]))
        for entry, row, token, scores in zip(
            golden, rows, result.token_ids, result.scores, strict=True
        ):
            expected = entry["output_ids"][step]
            assert scores is not None
            margin = float(scores.top_logprobs[0, 0] - scores.top_logprobs[0, 1])
            if margin > MARGIN:
                assert token == expected, (entry["prompt"], step)
                assert abs(scores.logprobs[0] - entry["output_logprobs"][step]) < 1e-4
            else:
                near = np.flatnonzero(scores.top_ids[0] == expected)
                assert len(near)
                found = scores.top_logprobs[0, near[0]]
                assert abs(found - entry["output_logprobs"][step]) < 1e-4
            row.token_ids.append(expected)


def test_sampled_tokens_of_a_step_are_plain_numpy(shared_dir: Path) -> None:
    folder = shared_dir / "data" / "models" / "stories260K"
    runner = ModelRunner.load(ExecutorConfig(model=str(folder)), CacheConfig(16, 8), 512, 8)
    assert runner.eos_token_ids == (1, 2)
    assert (runner.context_length, runner.vocab_size, runner.num_blocks) == (512, 512, 8)
    result = runner.run(make_plan([Work(Row(Blocks(8, 16), [1, 403]), params=GREEDY)]))
    assert result.token_ids.dtype == np.int32
    assert result.token_ids.shape == (1,)
