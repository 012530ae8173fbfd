"""Kernels around attention at real shapes: the cases' own formulas in float64."""

import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.interface import KernelSet, slot_bytes
from tests.kernels.cases import poisoned_memory
from tests.kernels.pointwise_cases import (
    RopeCase,
    check_add_rms_norm,
    check_copy_slots,
    check_embedding,
    check_gated,
    check_rms_norm,
    check_rope_and_write,
)

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [2048, 4096, 5120, 8192, 3000]
TOKENS = [1, 7, 2000]


def tokens_of(real: bool, tokens: int) -> int:
    return tokens if real else min(tokens, 9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(
    kernels: KernelSet,
    device: torch.device,
    real: bool,
    width: int,
    tokens: int,
    dtype: torch.dtype,
) -> None:
    shape = (tokens_of(real, tokens), width if real else width // 64)
    with poisoned_memory():
        check_rms_norm(kernels, device, shape, dtype)
        check_add_rms_norm(kernels, device, shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [8192, 14336, 1111])
def test_gated_activations(
    kernels: KernelSet,
    device: torch.device,
    real: bool,
    width: int,
    tokens: int,
    dtype: torch.dtype,
) -> None:
    with poisoned_memory():
        check_gated(kernels, device, tokens_of(real, tokens), width if real else 48, dtype)


@pytest.mark.parametrize("tokens", TOKENS)
def test_embedding(kernels: KernelSet, device: torch.device, real: bool, tokens: int) -> None:
    shape = (128256, 2048) if real else (300, 64)
    with poisoned_memory():
        check_embedding(kernels, device, shape, tokens_of(real, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_copy_slots(
    kernels: KernelSet, device: torch.device, real: bool, dtype: torch.dtype
) -> None:
    row = (8, 128) if real else (2, 16)
    if dtype == torch.uint8:
        row = (1, slot_bytes(8, *row))
    shape = (32, 200, 16, *row) if real else (3, 8, 16, *row)
    check_copy_slots(kernels, device, shape, 1000 if real else 20, dtype)


LLAMA = RopeCase(tokens=500, heads=(32, 8), head_dim=128)


@pytest.mark.parametrize(
    "case",
    [
        LLAMA,
        replace(LLAMA, tokens=1),
        replace(LLAMA, tokens=64, head_dim=64),
        replace(LLAMA, norm=True),
        replace(LLAMA, fp8=True),
        replace(LLAMA, fp8=True, norm=True, duplicates=40),
        replace(LLAMA, duplicates=100),
        replace(LLAMA, dtype=torch.float32, norm=True),
        replace(LLAMA, heads=(28, 4)),
        replace(LLAMA, heads=(8, 1), head_dim=256),
        replace(LLAMA, heads=(16, 4), head_dim=80),
        replace(LLAMA, block_size=64),
        replace(LLAMA, bits=8),
        replace(LLAMA, bits=8, norm=True, head_dim=64, duplicates=100),
        replace(LLAMA, bits=4),
        replace(LLAMA, bits=4, norm=True, dtype=torch.float32),
        replace(LLAMA, bits=4, heads=(16, 4), head_dim=80, duplicates=40),
    ],
    ids=str,
)
def test_rope_and_write(
    kernels: KernelSet, device: torch.device, real: bool, case: RopeCase
) -> None:
    if not real:
        case = replace(
            case, tokens=min(case.tokens, 6), heads=(4, 2), duplicates=min(case.duplicates, 2)
        )
    with poisoned_memory():
        check_rope_and_write(kernels, device, case)
