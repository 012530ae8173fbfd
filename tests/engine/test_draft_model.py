"""A draft model changes no bit, however right it is, and its KV is what it would compute alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.scheduler.draft_model import ModelSource
from rootlace.wire.protocol import SamplingParams
from tests.engine.harness import Harness
from tests.engine.test_exactness import PROMPTS, add_all, found, one_by_one
from tests.model.checkpoints import SHAPE, configs, save
from tests.native import native_library

TOKENIZER = '{"model": {"vocab": {"a": 0, "b": 1}}}'


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, another one of other sizes, and one with a smaller padded vocabulary."""
    native_library()
    others: dict[str, Any] = {
        "model": {},
        "small": {"num_hidden_layers": 1, "num_key_value_heads": 4, "max_position_embeddings": 80},
        "padded": {"vocab_size": 250, "num_hidden_layers": 1},
    }
    found = {}
    for name, changes in others.items():
        found[name] = tmp_path_factory.mktemp(name)
        config = LlamaConfig(**{**SHAPE, **changes}) if changes else configs()["qwen3"]
        save(config, found[name], seed=len(changes))
        (found[name] / "tokenizer.json").write_text(TOKENIZER)
    return found


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Callable[..., ModelRunner]:
    def loaded(draft: str = "", blocks: int = 512, **options: Any) -> ModelRunner:
        return ModelRunner.load(
            ExecutorConfig(
                model=str(folders["model"]),
                draft_model=str(folders[draft]) if draft else "",
                kernels="native",
                threads=2,
                **{"dtype": "float32", **options},
            ),
            CacheConfig(4, blocks),
            64,
            16,
        )

    return loaded


@pytest.fixture(scope="module")
def cold(load: Callable[..., ModelRunner]) -> list[tuple[object, ...]]:
    return one_by_one(load())


def always(monkeypatch: pytest.MonkeyPatch, dice: random.Random) -> None:
    """Have every row drafted for, whatever that costs."""
    monkeypatch.setattr(ModelSource, "worth", lambda *_: (dice.randrange(1, 7), 1e9))


@pytest.mark.parametrize("draft", ["model", "small", "padded"])
@pytest.mark.parametrize("overlap", [False, True])
@settings(max_examples=4)
@given(dice=st.randoms(use_true_random=False), blocks=st.sampled_from([512, 40]))
def test_the_text_is_the_same_to_the_bit(
    load: Callable[..., ModelRunner],
    cold: list[tuple[object, ...]],
    draft: str,
    overlap: bool,
    dice: random.Random,
    blocks: int,
) -> None:
    """Greedy and seeded, constrained, penalised, with log-probabilities; with preemption."""
    runner = load(draft)
    with pytest.MonkeyPatch.context() as patch:
        always(patch, dice)
        harness = Harness(
            *(runner,),
            block_size=4,
            num_blocks=blocks,
            max_step_tokens=64,
            overlap=overlap,
            spot_seconds=1e9,
            speculation_tokens=dice.choice([0, 4096]),
        )
        for _ in range(2):
            rids = add_all(harness)
            harness.finish()
            assert found(harness, rids) == cold
    stats = harness.scheduler.stats()
    assert overlap or stats["drafted_model_tokens"] > 0
    harness.scheduler.cache.flush()
    assert harness.scheduler.stats()["blocks_used"] == 0


def test_a_draft_of_the_model_itself_is_always_right(
    load: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded, penalised, behind cached and forked prefixes, after preemption: so no
    stale key or value of the draft model is read."""
    always(monkeypatch, random.Random(1))
    harness = Harness(load("model"), block_size=4, num_blocks=48, max_step_tokens=64)
    for turn in range(3):
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(
                max_tokens=30,
                temperature=0.9 * (i % 2),
                seed=turn * 10 + i,
                frequency_penalty=0.3 * (i % 3),
                logprobs=i == 3,
                ignore_eos=True,
            )
            harness.add(prompt, params)
        harness.finish()
    stats = harness.scheduler.stats()
    assert stats["retractions"] and stats["evicted_blocks"] and stats["copies"]
    assert stats["drafted_model_tokens"] > 100
    assert stats["accepted_model_tokens"] == stats["drafted_model_tokens"]
