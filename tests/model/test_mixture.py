"""Mixtures of experts: who is chosen, and sums that do not depend on a token's company."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.reference.layers import quantise
from rootlace.kernels.weights import Dense, Scheme, Weight
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights, rounded
from rootlace.runtime.model.checkpoint.weights import ExpertWeights, LayerWeights, ModelWeights
from rootlace.runtime.model.decoder.torch_decoder import added_up, choose
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.families.spec import Experts
from tests.model.checkpoints import configs, save
from tests.model.plans import Blocks, Row, Work, make_plan
from tests.native import skip_without

COUNT, HIDDEN = 7, 5


def experts(chosen: int, normalised: bool = False) -> Experts:
    return Experts((0,), COUNT, chosen, HIDDEN, normalised)


def scaled(x: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
    """Compute an MLP whose rows have the same bits in any company."""
    assert isinstance(gate_up, Dense) and isinstance(down, Dense)
    return torch.tanh(x * gate_up.matrix[0]) * down.matrix[0]


def test_a_token_gets_the_sum_of_its_experts_in_their_order() -> None:
    torch.manual_seed(0)
    x, scores = torch.randn(40, HIDDEN), torch.randn(40, COUNT)
    weights = [
        ExpertWeights(*(Dense(torch.randn(HIDDEN, HIDDEN)) for _ in range(2))) for _ in range(COUNT)
    ]
    found = choose(scores, experts(3))

    def of_expert(rows: torch.Tensor, number: int, tokens: torch.Tensor) -> torch.Tensor:
        return scaled(rows, weights[number].gate_up, weights[number].down)

    out = added_up(x, found, COUNT, of_expert)
    for token in range(len(x)):
        expected = torch.zeros(HIDDEN)
        for expert, share in zip(found[0][token].tolist(), found[1][token], strict=True):
            one = weights[expert]
            expected += share * scaled(x[token], one.gate_up, one.down)
        torch.testing.assert_close(out[token], expected)
        alone = choose(scores[token : token + 1], experts(3))
        one_row = added_up(x[token : token + 1], alone, COUNT, of_expert)
        assert torch.equal(one_row[0], out[token])


def test_who_is_chosen() -> None:
    scores = torch.tensor([[0.0, 3.0, 1.0, 3.0, -1.0, 3.0, 2.0]])
    chosen, shares = choose(scores, experts(4))
    assert chosen.tolist() == [[1, 3, 5, 6]]  # the first of equals first
    torch.testing.assert_close(shares, torch.softmax(scores, dim=1)[:, [1, 3, 5, 6]])
    _, normalised = choose(scores, experts(4, normalised=True))
    torch.testing.assert_close(normalised, shares / shares.sum())
    # Of bfloat16 scores the shares are float32 all the same.
    assert choose(scores.bfloat16(), experts(4))[1].dtype == torch.float32


def test_steps_of_more_tokens_than_the_native_kernels_take_at_a_time(tmp_path: Path) -> None:
    skip_without("native")
    save(configs()["qwen2_moe"], tmp_path)
    executor = ExecutorConfig(model=str(tmp_path), kernels="native", threads=2)
    runner = ModelRunner.load(executor, CacheConfig(16, 160), 2048, 16)
    prompts = [np.random.default_rng(i).integers(3, 199, 230).tolist() for i in range(5)]

    def scores(some: list[list[int]]) -> list[list[float]]:
        blocks = Blocks(runner.num_blocks, 16)
        result = runner.run(make_plan([Work(Row(blocks, list(one)), score_from=1) for one in some]))
        return [part.logprobs.tolist() for part in result.prompt_scores]

    together = scores(prompts)
    assert sum(map(len, together)) > 1024
    assert together == [scores([one])[0] for one in prompts]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_are_read_one_by_one(name: str, tmp_path: Path) -> None:
    """So packing takes the memory of one more expert; a layer's experts are most of the model."""
    save(configs()[name], tmp_path)
    weights = load_weights(ModelConfig.read(tmp_path), torch.float32, torch.device("cpu"))
    read = []
    for expert in weights.layers[0].experts:
        read += [weakref.ref(weight.matrix) for weight in (expert.gate_up, expert.down)]
        assert sum(matrix() is not None for matrix in read) <= 4
    assert len(read) == 2 * len(weights.layers[0].experts)


def test_experts_of_unlike_codes(tmp_path: Path) -> None:
    """In bfloat16, one expert's codes are unpacked, the others' are multiplied directly."""
    skip_without("native")
    save(configs()["qwen2_moe"], tmp_path)

    def unlike(*given: Any) -> ModelWeights:
        weights = rounded(load_weights, "int8")(*given)
        exact = load_weights(*given)

        def layer(index: int) -> LayerWeights:
            first, *others = weights.layers[index].experts
            of = exact.layers[index].experts[0]
            parts = {
                name: quantise(getattr(of, name).matrix, Scheme("int8", 16))
                for name in ("gate_up", "down")
            }
            experts = (replace(first, **parts), *others)
            return replace(weights.layers[index], experts=experts)

        return replace(weights, layers=tuple(map(layer, range(len(weights.layers)))))

    def scores(dtype: str, weights_of: Any, lengths: list[int]) -> list[np.ndarray]:
        executor = ExecutorConfig(model=str(tmp_path), kernels="native", threads=2, dtype=dtype)
        runner = ModelRunner.load(executor, CacheConfig(16, 60), 512, 16, weights_of=weights_of)
        blocks = Blocks(runner.num_blocks, 16)
        tokens = np.random.default_rng(0).integers(3, 199, 90).tolist()
        work = [Work(Row(blocks, tokens[:length]), score_from=1) for length in lengths]
        return [part.logprobs for part in runner.run(make_plan(work)).prompt_scores]

    alone = scores("bfloat16", unlike, [90])[0]
    long, short = scores("bfloat16", unlike, [90, 40])
    assert np.array_equal(long, alone) and np.array_equal(short, alone[:39])
    exact = scores("float32", unlike, [90])[0]
    assert np.abs(alone - exact).mean() < 0.3  # of numbers between -25 and -4
