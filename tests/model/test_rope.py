"""Angles are transformers' to the bit, and scaling extends the context as its users expect."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from rootlace.kernels.native.packed import FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.decoder.rope import frequencies, query_factors
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.families.reading import OF_KIND
from rootlace.wire.errors import InvalidRequest, UnsupportedModel
from rootlace.wire.protocol import SamplingParams
from tests.model.checkpoints import configs, reference, reference_logprobs, save
from tests.model.plans import Blocks, Row, Work, make_plan

CONTEXT = 4096
ORIGINAL = "original_max_position_embeddings"
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.3},
    {
        "rope_type": "llama3",
        "factor": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        ORIGINAL: 512,
    },
    {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 1024},
    {"rope_type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 1.0, ORIGINAL: 100},
    {"rope_type": "yarn", "factor": 1.5, "truncate": False, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25},
    {
        "rope_type": "longrope",
        ORIGINAL: 128,
        "short_factor": [1.0 + i / 8 for i in range(32)],
        "long_factor": [2.0 + i for i in range(32)],
    },
    {
        "rope_type": "longrope",
        ORIGINAL: 128,
        "attention_factor": 1.1,
        "factor": 9.0,
        "short_factor": [1.0] * 32,
        "long_factor": [3.0] * 32,
    },
]


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SETS = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}


def saved(folder: Path, **fields: Any) -> LlamaConfig:
    """Write a configuration of heads of 64 numbers, as transformers does, with these keys."""
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=CONTEXT)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    del raw["rope_parameters"]
    file.write_text(json.dumps(raw | fields))
    return LlamaConfig.from_pretrained(folder)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("index", range(len(SCALINGS)))
def test_angles(index: int, key: str, tmp_path: Path) -> None:
    theta = 10000.0 if index % 2 else 500000
    theirs = saved(tmp_path, rope_theta=theta, **{key: SCALINGS[index]})
    rope = ModelConfig.read(tmp_path).spec.rope
    for context in (64, CONTEXT):
        expected, factor = ROPE_INIT_FUNCTIONS[rope.kind](theirs, torch.device("cpu"), context)
        found, scale = frequencies(rope, 64, context)
        assert torch.equal(found, expected)
        assert scale == factor


def test_every_type_is_tried() -> None:
    assert {scaling["rope_type"] for scaling in SCALINGS} | {"default"} == OF_KIND.keys()


# The keys that say how long the context is, and the length that results.
LENGTHS: list[tuple[dict[str, Any], int]] = [
    ({}, 4096),
    # As Qwen's model cards say to extend the context fourfold, and as transformers 5 saves that.
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 4096}}, 16384),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 3072}}, 12288),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 16384),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, ORIGINAL: 4000}, 8000),
    # The file has the length after extending it already.
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 1024}}, 4096),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, ORIGINAL: 1024}}, 4096),
    ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 10240),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 4096),
    ({"rope_scaling": SCALINGS[3]}, 4096),
]


def test_length_of_the_context(tmp_path: Path) -> None:
    for fields, length in LENGTHS:
        saved(tmp_path, **fields)
        assert ModelConfig.read(tmp_path).spec.max_context == length, fields


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "yarn", "factor": None}, "needs factor"),
        ({"rope_type": "yarn", "factor": 0}, "factor is not a positive number"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs low_freq_factor"),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": None}, "rope_theta is not"),
        ({"rope_type": "linear", "factor": 2.0, "mystery": 1}, "mystery is not known"),
        ({"rope_type": "proportional"}, "'proportional' is not supported"),
        ({"rope_type": ["yarn"]}, "rope_type is not a text"),
        ({"factor": 4.0, ORIGINAL: 64}, "factor is not known with rope_type 'default'"),
        ({"rope_type": "default", "factor": 2.0}, "factor is not known with"),
        ({"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0}, "low_freq_factor is not"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "contradict"),
        ({"rope_type": "yarn", "factor": 2.0, "max_position_embeddings": 9}, "max_position_embed"),
        (
            {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419},
            r"\(1\), for what",
        ),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "a rope_theta of 1"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}, "beta_fast is not"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 0}, "low_freq_factor is not"),
        ({"rope_type": "longrope", **SETS, ORIGINAL: 1}, f"{ORIGINAL} is 1"),
        ({"rope_type": "longrope", **SETS, "long_factor": [0.0]}, "long_factor is not"),
    ],
)
def test_a_scaling_that_is_refused(scaling: Any, words: str, tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_scaling": scaling}))
    with pytest.raises(UnsupportedModel, match=f"rope_scaling .*{words}"):
        ModelConfig.read(tmp_path)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_yarn_beyond_the_original_context(kernels: Any, tmp_path: Path) -> None:
    """Added to a trained model's configuration, and to no other key, as model cards say."""
    save(configs()["llama"], tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    del raw["rope_parameters"]
    raw["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 256}
    file.write_text(json.dumps(raw))
    executor = ExecutorConfig(model=str(tmp_path), kernels=kernels)
    runner = ModelRunner.load(executor, CacheConfig(16, 40), 1024, 4)
    assert runner.context_length == 4 * raw["max_position_embeddings"]
    params = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=8, seed=0)
    row = Row(Blocks(40, 16), [3 + i * 7 % 190 for i in range(500)])
    runner.run(make_plan([Work(row, 400)]))
    scores = runner.run(make_plan([Work(row, params=params, score_from=401)]))
    expected = reference_logprobs(reference(tmp_path, torch.float32), row.token_ids)
    prompt = torch.from_numpy(scores.prompt_scores[0].logprobs)
    wanted = expected[400:-1].gather(1, torch.tensor(row.token_ids[401:]).unsqueeze(1))[:, 0]
    assert (prompt - wanted).abs().max() < 1e-4
    assert scores.token_ids[0] == expected[-1].argmax()
    with pytest.raises(InvalidRequest, match="context_length 1025"):
        longer = ExecutorConfig(model=str(tmp_path), context_length=1025)
        ModelRunner.load(longer, CacheConfig(16, 40), 1024, 4)


@pytest.mark.parametrize(
    ("asked", "context", "words"),
    [
        (None, 128, "with short_factor, which serves up to 128; for texts of up to 256"),
        (100, 100, "with short_factor, which serves up to 128; for texts of up to 256"),
        (200, 200, "long_factor is used for texts of every length, also for those of up to 128"),
    ],
)
def test_which_set_of_longrope_serves_is_said(
    asked: int | None, context: int, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configs()["phi3-partial"]
    config.architectures = ["Phi3ForCausalLM"]
    config.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        executor = ExecutorConfig(model=str(tmp_path), context_length=asked)
        setup = ModelSetup(ModelConfig.read(tmp_path), executor, CacheConfig(), FLOAT32)
        assert setup.context_length == setup.rotary.context_length == context
    (said,) = caplog.messages  # once
    assert words in said


def test_queries_grow_as_transformers_has_them_grow() -> None:
    """All positions of Ministral 3's context are checked; its queries grow from 16,384 on."""
    positions = torch.arange(262144)
    found = query_factors((0.1, 16384), positions)
    assert torch.equal(found, get_llama_4_attn_scale(positions[None], 0.1, 16384)[0, 0, :, 0])
    assert found[16383] == 1 < found[16384] == found[32767] < found[32768]
