"""What a set of kernels provides, and the numbers attention is planned from.

One function per operation. `kernels/reference/` is the specification (each file states its
formula) and the CPU path; an accelerated set replaces functions one by one
(`dataclasses.replace(REFERENCE, rope=...)`) and is tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True)
class AttentionBatch:
    """One step's rows, as host numbers, the same for every layer.

    Row r owns the flat tokens `row_start[r] : row_start[r + 1]`, the last ones of its
    `context_len[r]` tokens; position p of it lives in slot
    `block_tables[r, p // block_size] * block_size + p % block_size`.
    """

    row_start: np.ndarray  # [R+1] int
    context_len: np.ndarray  # [R] int
    block_tables: np.ndarray  # [R, W] int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class PlanAttention(Protocol):
    """Host work of a step's attention that does not depend on the layer.

    `window`: a token sees itself and the `window - 1` tokens before it; None: all before it.
    What is returned is passed to every `paged_attention` of the step with that window.
    """

    def __call__(self, batch: AttentionBatch, window: int | None) -> Any: ...


class PagedAttention(Protocol):
    """Causal attention of the step's tokens over their rows' cached keys and values.

    q [T, Nq, D]; k_cache, v_cache [B, S, Nk, D] of one layer, with this step's tokens already
    written. Returns the output [T, Nq, D] and, with `want_lse`, the natural log-sum-exp of the
    scaled scores, float32 [T, Nq] (to merge attention over parts of a context).
    """

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
        *,
        want_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


class Embedding(Protocol):
    def __call__(self, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor: ...


class RmsNorm(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


class AddRmsNorm(Protocol):
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Rope(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class WriteKV(Protocol):
    def __call__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        tokens: torch.Tensor | None = None,
    ) -> None: ...


class CopySlots(Protocol):
    def __call__(self, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None: ...


class SiluMul(Protocol):
    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor: ...


class ApplyBitmask(Protocol):
    def __call__(self, logits: torch.Tensor, mask: torch.Tensor) -> None: ...


class ApplyMaskRows(Protocol):
    def __call__(self, logits: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None: ...


class AdvanceStates(Protocol):
    def __call__(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        token_class: torch.Tensor,
        next_state: torch.Tensor,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class KernelSet:
    """The operations of a decoder, for one kind of device."""

    name: str
    embedding: Embedding
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    rope: Rope
    write_kv: WriteKV
    copy_slots: CopySlots
    plan_attention: PlanAttention
    paged_attention: PagedAttention
    silu_mul: SiluMul
    apply_bitmask: ApplyBitmask
    apply_mask_rows: ApplyMaskRows
    advance_states: AdvanceStates
