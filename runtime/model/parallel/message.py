"""A step's plan as the numbers that the other ranks need of it: those of the forward pass.

Which token is sampled, and how, is rank 0's alone: a plan that is read back wants the same hidden
states, and samples and scores nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rootlace.runtime.contracts.plan import PooledRow, StepPlan
from rootlace.runtime.model.decoder.step_input import wanted_tokens

FIELDS: tuple[tuple[str, type[np.integer]], ...] = (
    ("token_ids", np.int32),
    ("positions", np.int32),
    ("slots", np.int64),
    ("row_start", np.int32),
    ("context_len", np.int32),
    ("block_tables", np.int32),
    ("copies", np.int32),
    ("duplicate_tokens", np.int32),
    ("duplicate_slots", np.int64),
    ("adapters", np.int32),
)
"""Of a plan, in this order, behind their shapes; `WANTED` behind them."""
WANTED = np.int64
AXES = 2
"""Numbers that say an array's shape; the second is 0 for a vector."""


def encode(plan: StepPlan, block_size: int) -> np.ndarray:
    """uint8 [n]. Of the block tables as much as any row uses."""
    used = -(-int(plan.context_len.max(initial=0)) // block_size)
    arrays = [np.asarray(getattr(plan, name), kind) for name, kind in FIELDS]
    names = [name for name, _ in FIELDS]
    arrays[names.index("block_tables")] = plan.block_tables[:, :used].astype(np.int32)
    arrays.append(np.concatenate(wanted_tokens(plan)).astype(WANTED))
    shapes = [(*array.shape, 0)[:AXES] for array in arrays]
    parts = [np.array(shapes, np.int64), *arrays]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts])


def decode(numbers: np.ndarray) -> StepPlan:
    """The plan that was encoded, as far as `Forward.run` reads it."""
    kinds = [*(kind for _, kind in FIELDS), WANTED]
    at = len(kinds) * AXES * np.dtype(np.int64).itemsize
    shapes = numbers[:at].view(np.int64).reshape(-1, AXES).tolist()
    arrays: list[np.ndarray] = []
    for kind, (rows, columns), in_rows in zip(kinds, shapes, _are_rows(), strict=True):
        count = rows * columns if in_rows else rows
        end = at + count * np.dtype(kind).itemsize
        # A copy: what follows a vector of four bytes may not be aligned.
        found: np.ndarray = np.frombuffer(numbers[at:end].tobytes(), kind)
        arrays.append(found.reshape(rows, columns) if in_rows else found)
        at = end
    *of_plan, wanted = arrays
    named: dict[str, Any] = {name: array for (name, _), array in zip(FIELDS, of_plan, strict=True)}
    return StepPlan(step=0, **named, pooled=[PooledRow(int(token), 1) for token in wanted])


def _are_rows() -> list[bool]:
    """Which arrays have two axes."""
    return [name in ("block_tables", "copies") for name, _ in FIELDS] + [False]
