"""Launches of a served model equal the launches compiled ahead of time, down to every constant.
Nothing runs here: launches are recorded, on tensors without memory, with the sizes of models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.interface import (
    AttentionBatch,
    AutomatonTables,
    Choice,
    LogitEdits,
    PickRows,
)
from rootlace.kernels.triton import TRITON
from rootlace.kernels.triton.logits import PENALTIES
from scripts.kernel_launches import (
    META,
    NAMES,
    Launch,
    Variant,
    cache_of,
    tensor,
    variants,
    written_down,
)

ARCH = 90
VOCAB = 128256


@dataclass(frozen=True)
class Model:
    """Sizes, and how keys and values are stored."""

    hidden: int
    wide: int
    heads: int
    kv_heads: int
    head_dim: int
    stored: str = "plain"


MODELS = {
    "Llama-1B": Model(2048, 8192, 32, 8, 64),
    "Llama-8B": Model(4096, 14336, 32, 8, 128),
    "Llama-8B, fp8": Model(4096, 14336, 32, 8, 128, "fp8"),
    "Llama-8B, int8": Model(4096, 14336, 32, 8, 128, "int8"),
    "Llama-8B, int4": Model(4096, 14336, 32, 8, 128, "int4"),
}


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    with written_down(ARCH) as found:
        yield found


def check(launches: list[Launch]) -> None:
    """Each is in some variant."""
    known = [variant for found in variants(ARCH).values() for variant in found]
    assert launches
    for launch in list(launches):
        same = [each for each in known if each.kernel is launch.kernel]
        name = launch.kernel.fn.__name__
        differences = {each.name: differing(each, launch) for each in same}
        assert any(not found for found in differences.values()), (name, differences)


def differing(variant: Variant, launch: Launch) -> list[str]:
    found = []
    for name, value in launch.values.items():
        kind = variant.kinds[name]
        if isinstance(value, torch.Tensor):
            # What is given twice is not read under this name: it only has to be there.
            twice = sum(value is other for other in launch.values.values()) > 1
            fits = kind == f"*{NAMES[value.dtype]}" or (twice and kind[0] == "*")
        elif kind == "constexpr":
            fits = variant.constants[name] == value
        else:
            fits = kind.startswith("fp" if isinstance(value, float) else "i")
        if not fits:
            found.append(f"{name}: {value} for {variant.constants.get(name, kind)}")
    compiled = {
        "num_warps": (variant.num_warps, 4),
        "num_stages": (variant.num_stages, 3),
        "enable_fp_fusion": (variant.fp_fusion, True),
    }
    for option, (value, default) in compiled.items():
        if launch.options.get(option, default) != value:
            found.append(f"{option}: {launch.options.get(option, default)} for {value}")
    assert launch.options.keys() <= compiled.keys()
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [(1,) * 64, (1,), (1, 700, 3)], ids=["batch", "row", "mixed"])
def test_layers(launches: list[Launch], name: str, lengths: tuple[int, ...]) -> None:
    model = MODELS[name]
    rows, tokens = len(lengths), sum(lengths)
    context = np.array([5000 + new for new in lengths], np.int32)
    batch = AttentionBatch(
        row_start=np.cumsum([0, *lengths]).astype(np.int32),
        context_len=context,
        block_tables=np.arange(rows * 400, dtype=np.int32).reshape(rows, 400),
        block_size=16,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=torch.bfloat16,
        device=META,
    )
    family = None if tokens > rows else rows
    plan = TRITON.plan_attention(batch, None, family)
    bound = plan.bind([torch.from_numpy(array).to(META) for array in plan.arrays])
    heads = (model.kv_heads, model.head_dim)
    cache, scales = cache_of(model.stored, rows * 400, 16, *heads, torch.bfloat16)

    ids = tensor(tokens, dtype=torch.int64)
    ids = TRITON.feed_tokens(ids, ids, tensor(rows, dtype=torch.int32))
    residual = TRITON.embedding(tensor(VOCAB, model.hidden), ids)
    TRITON.rms_norm(residual, tensor(model.hidden), 1e-5)
    qkv = tensor(tokens, model.heads + 2 * model.kv_heads, model.head_dim)
    angles = tensor(tokens, model.head_dim // 2)
    q = TRITON.rope_and_write(qkv, angles, angles, cache, cache, ids, scales=scales)
    TRITON.paged_attention(q, cache, cache, bound, scales=scales)
    TRITON.add_rms_norm(residual, residual, tensor(model.hidden), 1e-5)
    TRITON.silu_mul(tensor(tokens, 2 * model.wide))
    TRITON.copy_slots(torch.stack((cache, cache)), ids, ids)
    check(launches)
    attention = {"decode_kernel"} if 1 in lengths else set()
    attention |= {"tree_kernel"} if lengths == (1,) * 64 else set()
    attention |= {"_extend_kernel"} if max(lengths) > 1 else set()
    assert attention <= {launch.kernel.fn.__name__ for launch in launches}


def params_of(real: torch.Tensor, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"temperature": real, "top_k": numbers, "top_p": real, "min_p": real}


@pytest.mark.parametrize("choice", ["greedy", "random", "cut"])
@pytest.mark.parametrize("masked", [False, True])
def test_sampling(launches: list[Launch], choice: Choice, masked: bool) -> None:
    rows = 64
    numbers = tensor(rows, dtype=torch.int32)
    real, large = tensor(rows, dtype=torch.float64), tensor(rows, dtype=torch.int64)
    table = tensor(100, -(-VOCAB // 32), dtype=torch.int32)
    tables = AutomatonTables(
        numbers, numbers, numbers, numbers, tensor(3, VOCAB, dtype=torch.int32), table
    )
    asked = PickRows(params_of(real, numbers), large, large)
    if masked:
        _, mask_row = TRITON.step_automata(numbers, numbers, numbers, numbers, tables)
        asked = replace(asked, mask_table=table, mask_row=mask_row)
    logits = tensor(rows, VOCAB)
    TRITON.pick_tokens(logits, asked, choice)
    TRITON.token_logprobs(logits, numbers)
    check(launches)


@pytest.mark.parametrize("masked", [False, True])
def test_sampling_with_lists(launches: list[Launch], masked: bool) -> None:
    rows = 64
    numbers, real = tensor(rows, dtype=torch.int32), tensor(rows, dtype=torch.float64)
    single, large = tensor(rows, dtype=torch.float32), tensor(rows, dtype=torch.int64)
    start = tensor(rows + 1, dtype=torch.int32)
    edits = LogitEdits(
        bias_start=start,
        bias_token=numbers,
        bias=single,
        mask_table=tensor(100, -(-VOCAB // 32), dtype=torch.int32) if masked else None,
        mask_row=numbers if masked else None,
        seen_start=start,
        seen_token=numbers,
        seen_count=numbers,
        penalties=dict.fromkeys(PENALTIES, real),
    )
    edited = TRITON.edit_logits(tensor(rows, VOCAB), edits)
    TRITON.pick_tokens(edited, PickRows(params_of(real, numbers), large, large), "cut")
    check(launches)
