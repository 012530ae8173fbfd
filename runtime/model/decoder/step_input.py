"""Turns a plan's numbers, which are not checked, into the device tensors of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from rootlace.kernels import AttentionBatch, KernelSet
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.model.decoder.interface import AdaptedRows, StepInput
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.lora import adapted_tokens

_ROW, _BACK = attrgetter("row"), attrgetter("back")
NOT_FED = -1
"""Stands for a token that the step before does not have to find."""


class StepInputBuilder:
    """Works out, once per step, everything that is the same for all layers."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: KernelSet,
        rotary: RotaryEmbedding,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._attention = spec.attention
        self._kernels = kernels
        self.rotary = rotary
        self.block_size = block_size
        self._dtype = dtype
        self._device = device
        self.windows = sorted(set(spec.attention.windows), key=lambda window: window or 0)

    def build(self, plan: StepPlan) -> StepInput:
        """Upload (in one transfer) and plan attention for each distinct sliding window."""
        arrays = self.arrays(plan)
        tensors = dict(zip(arrays, upload(list(arrays.values()), self._device), strict=True))
        batch = self.attention_batch(plan)
        attention = {window: self._kernels.plan_attention(batch, window) for window in self.windows}
        return self.on_device(plan, tensors, attention, tensors["token_ids"])

    def arrays(self, plan: StepPlan) -> dict[str, np.ndarray]:
        """The numbers of a step, int64, by the names that `on_device` reads them by."""
        arrays = {
            "token_ids": plan.token_ids.astype(np.int64),
            "positions": plan.positions.astype(np.int64),
            "slots": np.concatenate((plan.slots, plan.duplicate_slots)),
            "wanted": wanted_tokens(plan),
        }
        if len(plan.duplicate_tokens):
            tokens = (np.arange(plan.num_tokens), plan.duplicate_tokens)
            arrays["write_tokens"] = np.concatenate(tokens)
        for group in adapted_tokens(plan, arrays["wanted"]):
            arrays[f"adapter {group.adapter}"] = group.tokens
            arrays[f"adapter {group.adapter} wanted"] = group.wanted
        return arrays

    def on_device(
        self,
        plan: StepPlan,
        tensors: Mapping[str, torch.Tensor],
        attention: dict[int | None, Any],
        token_ids: torch.Tensor,
    ) -> StepInput:
        """What a decoder takes of a step whose `arrays` are on the device. Without "wanted" the
        hidden states of all tokens are."""
        positions = tensors["positions"]
        cos, sin = self.rotary(positions)
        return StepInput(
            token_ids=token_ids,
            positions=positions,
            cos=cos,
            sin=sin,
            write_slots=tensors["slots"],
            write_tokens=tensors.get("write_tokens"),
            attention=attention,
            wanted=tensors.get("wanted"),
            adapted=[
                AdaptedRows(n, tensors[f"adapter {n}"], tensors[f"adapter {n} wanted"])
                for n in sorted(set(plan.adapters.tolist()) - {-1})
            ],
        )

    def attention_batch(self, plan: StepPlan) -> AttentionBatch:
        return AttentionBatch(
            row_start=plan.row_start,
            context_len=plan.context_len,
            block_tables=plan.block_tables,
            block_size=self.block_size,
            num_heads=self._attention.num_heads,
            num_kv_heads=self._attention.num_kv_heads,
            head_dim=self._attention.head_dim,
            dtype=self._dtype,
            device=self._device,
        )

    def copies(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """The plan's block copies as (source, target) slots, int64 each."""
        source, target = copied_slots(plan, self.block_size)
        first, second = upload([source, target], self._device)
        return first, second


def copied_slots(plan: StepPlan, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(source, target) slots of the plan's block copies, int64 each."""
    source, target, rows = plan.copies.astype(np.int64).T
    # Row i of copy c, for all c and all i < rows[c], flattened.
    which = np.repeat(np.arange(len(rows)), rows)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(rows) - rows, rows)
    return source[which] * block_size + offset, target[which] * block_size + offset


def wanted_tokens(plan: StepPlan) -> np.ndarray:
    """Flat tokens whose hidden states are needed, int64: those before samples, then scored ranges,
    then pooled ones."""
    count = len(plan.samples)
    rows = np.fromiter(map(_ROW, plan.samples), np.int64, count)
    back = np.fromiter(map(_BACK, plan.samples), np.int64, count)
    wanted = [plan.row_start[rows + 1] - 1 - back]
    for score in plan.prompt_scores:
        wanted.append(np.arange(score.flat_start, score.flat_start + len(score.targets)))
    for row in plan.pooled:
        wanted.append(np.arange(row.flat_start, row.flat_start + row.count))
    return np.concatenate(wanted)


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """One int64 device tensor per array, by a single transfer."""
    joined = torch.from_numpy(np.concatenate([np.asarray(one, dtype=np.int64) for one in arrays]))
    if device.type == "cuda":
        joined = joined.pin_memory()
    return list(joined.to(device, non_blocking=True).split([len(one) for one in arrays]))
