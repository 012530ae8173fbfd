"""A step of any rows: everything it needs in one piece of device memory of its own, in one copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rootlace.kernels import KernelSet
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.model.adapters.rows import adapted_tokens
from rootlace.runtime.model.decoder.interface import AdaptedRows, StepInput
from rootlace.runtime.model.decoder.step_input import (
    NOT_FED,
    StepInputBuilder,
    copied_slots,
    wanted_tokens,
)
from rootlace.runtime.model.executor.staging import HostBuffers, StagingLayout


@dataclass(frozen=True)
class StagedArrays:
    """Named arrays on the device."""

    layout: StagingLayout
    buffer: torch.Tensor

    def __contains__(self, name: str) -> bool:
        return name in self.layout

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.layout.device(self.buffer, name)


class MixedStaging:
    """Lays out steps that are not captured as graphs."""

    def __init__(
        self,
        inputs: StepInputBuilder,
        kernels: KernelSet,
        buffers: HostBuffers,
        device: torch.device,
    ) -> None:
        self._inputs = inputs
        self._kernels = kernels
        self._buffers = buffers
        self._device = device

    def send(self, arrays: dict[str, np.ndarray]) -> StagedArrays:
        """Arrays to the device in one copy."""
        layout = StagingLayout()
        for name, array in arrays.items():
            layout.add(name, array.dtype, array.shape)
        host = self._buffers.take(layout.stop)
        layout.write(host.numpy(), arrays)
        # A new buffer each time: the allocator does not reuse a queued step's memory before the
        # stream has passed that step.
        buffer = torch.empty(layout.stop, dtype=torch.uint8, device=self._device)
        buffer.copy_(host[: layout.stop], non_blocking=True)
        self._buffers.sent()
        return StagedArrays(layout, buffer)

    def copies(self, plan: StepPlan) -> dict[str, np.ndarray]:
        """Slots of the plan's block copies; nothing, if it has none."""
        if not len(plan.copies):
            return {}
        source, target = copied_slots(plan, self._inputs.block_size)
        return {"copy_source": source, "copy_target": target}

    def stage(
        self, plan: StepPlan, sampling: dict[str, np.ndarray], found: torch.Tensor
    ) -> tuple[StepInput, StagedArrays]:
        """What the decoder takes, and all arrays: those of `copies` and `sampling`, and "targets",
        the tokens that prompt scores are of. `found` int32: tokens of the step before."""
        arrays = {
            "token_ids": plan.token_ids.astype(np.int64),
            "positions": plan.positions.astype(np.int64),
            "slots": np.concatenate((plan.slots, plan.duplicate_slots)),
            "wanted": np.concatenate(wanted_tokens(plan)),
        }
        if len(plan.feeds):
            arrays["feeds"] = np.full(plan.num_tokens, NOT_FED, np.int64)
            arrays["feeds"][plan.feeds[:, 0]] = plan.feeds[:, 1]
        duplicates = bool(len(plan.duplicate_tokens))
        if duplicates:
            arrays["write_tokens"] = np.concatenate(
                (np.arange(plan.num_tokens), plan.duplicate_tokens)
            )
        if plan.prompt_scores:
            arrays["targets"] = np.concatenate(
                [row.targets.astype(np.int64) for row in plan.prompt_scores]
            )
        arrays |= self.copies(plan)
        arrays |= sampling
        groups = adapted_tokens(plan, arrays["wanted"])
        for group in groups:
            arrays[f"adapter {group.adapter}"] = group.tokens
            arrays[f"adapter {group.adapter} wanted"] = group.wanted
        batch = self._inputs.attention_batch(plan)
        plans = {w: self._kernels.plan_attention(batch, w) for w in self._inputs.windows}
        names = {
            window: [f"attention {window} {i}" for i in range(len(attention.arrays))]
            for window, attention in plans.items()
        }
        for window, attention in plans.items():
            arrays |= zip(names[window], attention.arrays, strict=True)
        staged = self.send(arrays)
        token_ids = staged["token_ids"]
        if len(plan.feeds):
            token_ids = self._kernels.feed_tokens(token_ids, staged["feeds"], found)
        cos, sin = self._inputs.rotary(staged["positions"])
        step = StepInput(
            token_ids=token_ids,
            positions=staged["positions"],
            cos=cos,
            sin=sin,
            write_slots=staged["slots"],
            write_tokens=staged["write_tokens"] if duplicates else None,
            attention={
                window: attention.bind([staged[name] for name in names[window]])
                for window, attention in plans.items()
            },
            wanted=staged["wanted"],
            adapted=[
                AdaptedRows(
                    group.adapter,
                    staged[f"adapter {group.adapter}"],
                    staged[f"adapter {group.adapter} wanted"],
                )
                for group in groups
            ],
        )
        return step, staged
