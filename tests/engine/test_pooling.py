"""Vectors of texts and scores of labels: equal to those of transformers, in any company."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.messages import Pooling
from rootlace.runtime.model.executor.runner import ModelRunner
from tests.engine.harness import Harness, greedy
from tests.model.checkpoints import configs, save
from tests.native import skip_without

NONE = greedy(0)


def load(folder: Path, kernels: str) -> ModelRunner:
    skip_without(kernels)
    return ModelRunner.load(
        ExecutorConfig(model=str(folder), kernels=kernels, dtype="float32"),  # type: ignore[arg-type]
        CacheConfig(block_size=4, num_blocks=200),
        max_step_tokens=512,
        max_running=16,
    )


def prompts() -> list[list[int]]:
    """The second goes on from the first."""
    rng = np.random.default_rng(5)
    drawn = [rng.integers(3, 199, count).tolist() for count in (19, 14, 1, 30)]
    return [drawn[0], drawn[0] + drawn[1], drawn[2], drawn[3]]


def vectors(
    runner: ModelRunner, asked: list[tuple[list[int], Pooling]], **more
) -> list[np.ndarray]:
    harness = Harness(runner, block_size=4, labels=runner.config.spec.labels, **more)
    rids = [harness.add(prompt, NONE, pooling=pooling) for prompt, pooling in asked]
    harness.finish()
    assert all(harness.outcomes[rid].finish == "length" for rid in rids)
    return [harness.outcomes[rid].vector for rid in rids]  # type: ignore[misc]


def states(model: PreTrainedModel, prompt: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_pooled_hidden_states_are_those_of_transformers(kernels, tmp_path) -> None:
    save(configs()["qwen3"], tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    runner = load(tmp_path, kernels)
    asked: list[tuple[list[int], Pooling]] = [
        (prompt, pooling) for prompt in prompts() for pooling in ("mean", "last")
    ]
    together = vectors(runner, asked)
    for (prompt, pooling), found in zip(asked, together, strict=True):
        wanted = states(model, prompt)
        wanted = wanted.mean(axis=0) if pooling == "mean" else wanted[-1]
        assert np.abs(found - wanted).max() < 1e-4
    if kernels == "native":  # the very bits, cached or not, in chunks and alone
        ways = [vectors(runner, asked, max_step_tokens=7), vectors(runner, asked, enabled=False)]
        ways += [[vectors(runner, [one])[0] for one in asked], vectors(runner, asked * 2)[8:]]
        for way in ways:
            for one, other in zip(together, way, strict=True):
                assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("family", "kernels"), [("llama", "native"), ("qwen2", "reference"), ("gpt2", "reference")]
)
def test_labels_are_scored_as_by_transformers(family, kernels, tmp_path) -> None:
    config = configs()[family]
    config.num_labels = 3
    model = save(config, tmp_path, kind=AutoModelForSequenceClassification)
    runner = load(tmp_path, kernels)
    assert runner.config.spec.labels == 3
    found = vectors(runner, [(prompt, "labels") for prompt in prompts()])
    for prompt, scores in zip(prompts(), found, strict=True):
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt])).logits[0].numpy()
        assert scores.shape == (3,) and np.abs(scores - wanted).max() < 1e-4


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_model_saved_without_a_head_embeds(family, tmp_path) -> None:
    model = save(configs()[family], tmp_path, kind=AutoModel)
    runner = load(tmp_path, "native" if family == "qwen3" else "reference")
    assert runner.config.spec.labels == 0
    prompt = prompts()[0]
    (found,) = vectors(runner, [(prompt, "last")])
    assert np.abs(found - states(model, prompt)[-1]).max() < 1e-4
