"""Masks in place, and steps of automata, in Triton against the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rootlace.kernels.interface import AutomatonTables
from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.triton import TRITON

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def words(*shape: int, seed: int = 0) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(-(2**31), 2**31, shape).astype(np.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "count"), [(31, 1), (64, 2), (100, 2), (100, 9), (2500, 79)])
def test_masks(vocab: int, count: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, vocab + 7).to(dtype)[:, :vocab]
    mask = words(5, count)
    expected, found = logits.clone(), logits.clone().to(DEVICE)
    REFERENCE.apply_bitmask(expected, mask)
    TRITON.apply_bitmask(found, mask.to(DEVICE))
    assert torch.equal(found.cpu(), expected)
    table = words(7, count, seed=1)
    for index in (torch.int32, torch.int64):
        rows = torch.tensor([6, 0, 6, 3, 1], dtype=index)
        expected, found = logits.clone(), logits.clone().to(DEVICE)
        REFERENCE.apply_mask_rows(expected, table, rows)
        TRITON.apply_mask_rows(found, table.to(DEVICE), rows.to(DEVICE))
        assert torch.equal(found.cpu(), expected)


def test_rows_of_a_wider_tensor_are_masked_where_they_are() -> None:
    wide = torch.zeros(3, 50, device=DEVICE)
    TRITON.apply_bitmask(wide[:, :40], torch.zeros(3, 2, dtype=torch.int32, device=DEVICE))
    assert (wide[:, :40] == float("-inf")).all() and not wide[:, 40:].any()
    TRITON.apply_bitmask(wide[:0, :40], torch.zeros(0, 2, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("count", [0, 1, 128, 300])
def test_steps_of_automata(count: int) -> None:
    random = np.random.default_rng(count)
    vocab, states, entries = 40, 30, 500

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(random.integers(low, high, shape).astype(np.int32))

    tables = AutomatonTables(
        mask_of=numbers(0, 9, states),
        class_row=numbers(0, 3, states),
        next_start=numbers(0, entries - 6, states),
        next_state=numbers(0, states, entries),
        token_class=numbers(0, 6, 3, vocab),
        masks=numbers(0, 9, 9, 2),
    )
    given = (
        numbers(-1, states, count),
        numbers(-1, 20, count),
        numbers(-1, vocab + 1, 20),
        numbers(-1, 9, count),
    )
    moved = {f.name: getattr(tables, f.name).to(DEVICE) for f in dataclasses.fields(tables)}
    found = TRITON.step_automata(*(x.to(DEVICE) for x in given), AutomatonTables(**moved))
    for one, other in zip(found, REFERENCE.step_automata(*given, tables), strict=True):
        assert one.dtype == torch.int32 and torch.equal(one.cpu(), other)
