"""Copies of parts of blocks, compared with the layout that `laid_out` makes of plain rows."""

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from rootlace.kernels.native import library as native
from rootlace.kernels.native.attention import NativeAttention
from rootlace.kernels.native.library import Team, Workspace
from rootlace.kernels.native.linear import DTYPES
from tests.kernels.native.layouts import laid_out
from tests.native import native_library

LAYERS, BLOCKS, KV_HEADS = 2, 5, 3


@pytest.fixture(scope="module")
def team() -> Team:
    return Team(native_library(), 2)


def copied(team: Team, cache: Tensor, copies: list[tuple[int, int, int]]) -> Tensor:
    """`cache` [layers, 2, blocks, size, heads, dim] after a step that only copies."""
    library = native_library()
    cache = cache.clone()
    layers, _, blocks, size, heads, dim = cache.shape
    model = native.Model(
        dtype=DTYPES[cache.dtype], hidden=dim, heads=heads, kv_heads=heads, head_dim=dim, inner=dim,
        num_layers=layers, vocab=1, cache=cache.data_ptr(), num_blocks=blocks, block_size=size,
    )  # fmt: skip
    numbers = np.array(copies, np.int32)
    step = native.Step(copies=len(copies), copied=numbers.ctypes.data)
    workspace = Workspace(library)
    library.rl_forward(
        team.handle, workspace.handle, ctypes.addressof(model), ctypes.addressof(step)
    )
    return cache


def laid(plain: Tensor) -> Tensor:
    keys, values = laid_out(plain[:, 0], plain[:, 1])
    return torch.stack((keys, values), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 24, 80])
@pytest.mark.parametrize("size", [1, 8, 16, 24, 32, 48])
def test_the_first_slots_of_a_block_are_copied(
    team: Team, size: int, dim: int, dtype: torch.dtype
) -> None:
    """Exactly the requested slots are copied, at any place in panels and pairs."""
    generator = torch.Generator().manual_seed(size * dim)
    shape = (LAYERS, 2, BLOCKS, size, KV_HEADS, dim)
    plain = torch.randn(shape, generator=generator).to(dtype)
    for slots in range(size + 1):
        expected = plain.clone()
        expected[:, :, 3, :slots] = plain[:, :, 1, :slots]
        expected[:, :, 0, : size - slots] = plain[:, :, 4, : size - slots]
        found = copied(team, laid(plain), [(1, 3, slots), (4, 0, size - slots)])
        assert torch.equal(found, laid(expected)), slots


def test_what_fits_no_panels_lies_as_it_is() -> None:
    for size, dim in ((8, 64), (24, 64), (16, 24), (1, 16)):
        plain = torch.randn(BLOCKS, size, KV_HEADS, dim)
        keys, values = laid_out(plain, plain + 1)
        assert torch.equal(keys, plain) and torch.equal(values, plain + 1)


def test_where_keys_and_values_lie() -> None:
    """The comment of `src/kv_layout.h`, number by number."""
    size, dim = 32, 16
    for dtype, step in ((torch.float32, 1), (torch.bfloat16, 2)):
        plain = torch.randn(BLOCKS, size, KV_HEADS, dim).to(dtype)
        keys, values = laid_out(plain, plain)
        keys = keys.view(BLOCKS, KV_HEADS, size // 16, dim // step, 16, step)
        values = values.view(BLOCKS, KV_HEADS, size // step, dim, step)
        for slot in range(size):
            panel, lane = divmod(slot, 16)
            assert torch.equal(keys[:, :, panel, :, lane].flatten(-2), plain[:, slot])
            pair, half = divmod(slot, step)
            assert torch.equal(values[:, :, pair, :, half], plain[:, slot])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [4, 16])  # plain rows, panels
def test_a_copied_slot_is_as_one_that_was_written(
    team: Team, block_size: int, dtype: torch.dtype
) -> None:
    kernels = NativeAttention(native_library(), team)
    k, v = torch.randn(2, 9, 3, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted, found = torch.zeros(2, 2, 64 // block_size, block_size, 3, 32, dtype=dtype)
    for cache in (wanted, found):
        kernels.write(cache[0], cache[1], k, v, torch.arange(9))
    source, target = torch.tensor([3, 8]), torch.tensor([21, 34])
    kernels.write(wanted[0], wanted[1], k, v, target, source)
    kernels.copy(found, source, target)
    assert torch.equal(found, wanted)
