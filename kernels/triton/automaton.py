"""Steps of automata by tokens that are on the device: `reference/sampling.py`.

A chain of five dependent loads per row, one program for all rows of a small batch: what counts is
that nothing waits for the host, and that the launch is one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.interface import AutomatonTables
from rootlace.kernels.triton.launching import Variant

ROWS = 128


@triton.jit
def step_automata_kernel(
    state_ptr,
    source_ptr,
    token_ptr,
    row_ptr,
    mask_of_ptr,
    class_row_ptr,
    next_start_ptr,
    next_state_ptr,
    token_class_ptr,
    after_ptr,
    mask_ptr,
    count,
    vocab,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    state = tl.load(state_ptr + row, mask=inside, other=-1)
    source = tl.load(source_ptr + row, mask=inside, other=-1)
    steps = (state >= 0) & (source >= 0)
    token = tl.load(token_ptr + source, mask=steps, other=-1)
    known = steps & (token >= 0) & (token < vocab)
    classes = tl.load(class_row_ptr + state, mask=known, other=0).to(tl.int64)
    token_class = tl.load(token_class_ptr + classes * vocab + token, mask=known, other=0)
    start = tl.load(next_start_ptr + state, mask=known, other=0)
    after = tl.load(next_state_ptr + start + token_class, mask=known, other=0)  # 0: dead
    state = tl.where(steps, after, state)
    mask = tl.load(mask_of_ptr + state, mask=state >= 0, other=0)
    given = tl.load(row_ptr + row, mask=inside, other=-1)
    tl.store(after_ptr + row, state, mask=inside)
    tl.store(mask_ptr + row, tl.where(state >= 0, mask, given), mask=inside)


def step_automata(
    states: torch.Tensor,
    source: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    tables: AutomatonTables,
) -> tuple[torch.Tensor, torch.Tensor]:
    """states, source, rows int32 [R], tokens int32 [P] -> (states, rows), int32 [R] each."""
    count = len(states)
    found = torch.empty_like(states)
    masks = torch.empty_like(states)
    if count:
        step_automata_kernel[(triton.cdiv(count, ROWS),)](
            states,
            source,
            tokens,
            rows,
            tables.mask_of,
            tables.class_row,
            tables.next_start,
            tables.next_state,
            tables.token_class,
            found,
            masks,
            count,
            tables.token_class.shape[1],
            ROWS=ROWS,
            num_warps=4,
        )
    return found, masks


def variants(arch: int) -> list[Variant]:
    names = step_automata_kernel.arg_names
    pointers = tuple(name for name in names if name.endswith("_ptr"))
    return [Variant("", step_automata_kernel, {}, {"ROWS": ROWS}, pointers, num_warps=4)]
