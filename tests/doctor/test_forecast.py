"""Forecasts from given ceilings, against numbers worked out by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from rootlace.runtime.doctor.ceilings import Ceilings, Elements, Row, StepWork, step_work
from rootlace.runtime.doctor.report import (
    Capacity,
    Decoding,
    FirstToken,
    forecast,
    prompt_seconds,
    step_seconds,
)
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.checkpoint.sizes import foreseen_bytes, rounded_bytes
from rootlace.runtime.model.families.spec import (
    Attention,
    Experts,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
    WeightNames,
)
from tests.model.checkpoints import configs, save
from tests.model.weight_sizes import num_bytes
from tests.tiny_model import make_tiny_model

PARTS = ("input_norm", "qkv", "output", "post_norm", "gate_up", "down")
EXPERT_PARTS = ("router", "expert_gate_up", "expert_down", "shared_gate_up", "shared_down")

SPEC = ModelSpec(
    vocab_size=32,
    hidden_size=8,
    num_layers=2,
    max_context=64,
    norm=Norm(1e-6),
    attention=Attention(num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5, windows=(None, None)),
    mlp=Mlp(16, "silu", gated=True),
    rope=Rope("default", {"rope_theta": 1e4}),
    names=WeightNames("e", "l.{}.", {part: (part,) for part in PARTS}, "n", "h"),
)
"""A layer's products have 16 x 8 + 8 x 8 + 32 x 8 + 8 x 16 = 576 weights, its norms 2 x 8. The head
has 32 x 8 = 256."""
BFLOAT16 = Elements(weight=2, kv=2)


MIXTURE = replace(
    SPEC,
    experts=Experts(layers=(1,), count=4, chosen=2, inner_size=4, shared_size=8),
    names=WeightNames("e", "l.{}.", {part: (part,) for part in (*PARTS, *EXPERT_PARTS)}, "n", "h"),
)
"""Its second layer has 16 x 8 + 8 x 8 weights in attention, a router of 4 x 8, four experts of
3 x 4 x 8 each, and 3 x 8 x 8 for all tokens: 192 + 32 + 384 + 192 = 800."""


def test_a_token_has_some_of_the_experts() -> None:
    assert foreseen_bytes(MIXTURE, 2, head_apart=True) == (576 + 800 + 4 * 8 + 8 + 2 * 256) * 2
    one, two = (
        step_work(MIXTURE, [Row(new, 1)] if new == 1 else [Row(1, 1)] * 2, BFLOAT16)
        for new in (1, 2)
    )
    assert one.products == 2 * (576 + 800 - 192 + 256)
    assert two.products == 2 * one.products
    # One token leaves half of the experts alone, of two a quarter is left.
    assert one.read == (576 + 800 - 192 + 5 * 8 + 256) * 2 + 2 * 2 * 4 * 2
    assert two.read == (576 + 800 - 96 + 5 * 8 + 256) * 2 + 2 * (2 * 2 * 4 * 2)


def with_windows(*windows: int | None) -> ModelSpec:
    return replace(SPEC, attention=replace(SPEC.attention, windows=windows))


def test_memory_of_weights() -> None:
    layers_and_norm = 2 * (576 + 16) + 8
    assert foreseen_bytes(SPEC, 2, head_apart=False) == 2 * (layers_and_norm + 256 + 256)
    tied = replace(SPEC, tied_embeddings=True)
    assert foreseen_bytes(tied, 4, head_apart=False) == 4 * (layers_and_norm + 256)
    assert foreseen_bytes(tied, 4, head_apart=True) == 4 * (layers_and_norm + 256 + 256)


def test_memory_of_weights_is_that_of_a_loaded_model(tmp_path: Path) -> None:
    config = ModelConfig.read(make_tiny_model(tmp_path / "model"))
    loaded = load_weights(config, torch.float32, torch.device("cpu"))
    assert foreseen_bytes(config.spec, 4, head_apart=False) == num_bytes(loaded)


@pytest.mark.parametrize("name", ["gpt2", "starcoder2", "cohere2"])
def test_memory_of_norms_mlps_and_positions(name: str, tmp_path: Path) -> None:
    save(configs()[name], tmp_path)
    config = ModelConfig.read(tmp_path)
    loaded = load_weights(config, torch.float32, torch.device("cpu"))
    assert foreseen_bytes(config.spec, 4, head_apart=False) == num_bytes(loaded)


def test_memory_of_rounded_weights() -> None:
    others = 2 * (2 * 16 + 8 + 256)  # norms, the embedding
    assert rounded_bytes(SPEC, 2, "int8") == others + (2 * 576 + 256) // 8 * 9
    values = 2 * 8 * SPEC.attention.num_kv_heads * SPEC.attention.head_dim
    assert rounded_bytes(SPEC, 2, "int4") == others + 2 * (288 + 72) + values // 2 + 256


def test_work_of_a_step() -> None:
    # Three tokens, which attend to 3, 4 and 5: 12 pairs, at 4 x 2 heads x 4 numbers.
    products, attention = 2 * (3 * 1152 + 256), 2 * 12 * 32
    read = 2 * (1184 + 8 + 256) + 2 * 5 * 16  # two layers of 5 keys and values of 4 numbers
    assert (products, attention, read) == (7424, 768, 3056)
    assert step_work(SPEC, [Row(3, 5)], BFLOAT16) == StepWork(products, attention, read)


def test_work_of_a_step_of_several_rows_reads_the_weights_once() -> None:
    products, attention = 2 * (3 * 1152 + 2 * 256), 2 * (7 + (1 + 2)) * 32
    read = 2 * (1184 + 8 + 256) + 2 * (7 + 2) * 16
    assert step_work(SPEC, [Row(1, 7), Row(2, 2)], BFLOAT16) == StepWork(products, attention, read)


def test_a_cache_of_bytes_is_half_of_the_reading() -> None:
    whole, half = (step_work(SPEC, [Row(1, 40)], Elements(2, kv)).read for kv in (2, 1))
    assert whole - half == 2 * 40 * 8


@pytest.mark.parametrize("window", [1, 2, 3, 5, 6, 50])
@pytest.mark.parametrize(("new", "context"), [(1, 1), (1, 6), (4, 4), (3, 6), (6, 6)])
def test_work_within_a_window(window: int, new: int, context: int) -> None:
    """By counting: which tokens does each of the new ones see?"""
    seen = [
        set(range(max(0, position - window + 1), position + 1))
        for position in range(context - new, context)
    ]
    full = step_work(with_windows(None, None), [Row(new, context)], BFLOAT16)
    found = step_work(with_windows(None, window), [Row(new, context)], BFLOAT16)
    pairs = sum(context - new + i + 1 for i in range(new)) - sum(map(len, seen))
    assert full.attention - found.attention == 32 * pairs
    assert full.read - found.read == 16 * (context - len(set[int]().union(*seen)))


def seconds(products: float, attention: float, reading: float) -> float:
    ceilings = Ceilings(7424 / products, 768 / attention, 3056 / reading)
    return step_seconds(SPEC, BFLOAT16, ceilings, [Row(3, 5)])


def test_a_step_takes_as_long_as_computing_or_as_reading() -> None:
    assert seconds(products=2.0, attention=1.0, reading=0.5) == 3.0
    assert seconds(products=0.5, attention=0.25, reading=4.0) == 4.0


def test_a_prompt_is_computed_in_steps() -> None:
    fast = Ceilings(1.0, 1.0, math.inf)
    # 2 + 2 + 1 tokens, which attend to 1 + 2, 3 + 4 and 5.
    flops = (2 * (2304 + 256) + 3 * 64) + (2 * (2304 + 256) + 7 * 64) + (2 * 1408 + 5 * 64)
    assert flops == 14016
    assert prompt_seconds(SPEC, BFLOAT16, fast, 5, step_tokens=2) == flops
    whole = 2 * (5 * 1152 + 256) + 15 * 64
    assert prompt_seconds(SPEC, BFLOAT16, fast, 5, step_tokens=5) == whole


def test_a_forecast() -> None:
    ceilings = Ceilings(math.inf, math.inf, 1000.0)
    found = forecast(SPEC, BFLOAT16, ceilings, Capacity(context=40, cache=320, step=2048))
    # Prompts of 40 tokens are the longest, and just eight of them fit into the cache.
    read = 2 * (1184 + 8 + 256) + 2 * 40 * 16
    assert found.first_tokens == (FirstToken(40, read / 1000),)
    eight = 2 * (1184 + 8 + 256) + 8 * 2 * 40 * 16
    assert found.decoding == (
        Decoding(1, 40, 1 / (read / 1000)),
        Decoding(8, 40, 8 / (eight / 1000)),
    )


def test_requests_that_do_not_fit_are_left_out() -> None:
    capacity: dict[str, Any] = {"context": 40, "step": 2048}
    found = forecast(
        SPEC, BFLOAT16, Ceilings(1.0, 1.0, 1.0), Capacity(cache=40 * 8 - 1, **capacity)
    )
    assert [one.requests for one in found.decoding] == [1]
