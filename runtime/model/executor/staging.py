"""What a step needs, in one piece of memory: laid out on the host, sent to the device in one copy.

A layout gives every array of a step a fixed place. Steps of one layout differ in contents alone, so
what a captured graph reads lies where it lay when the graph was captured.

Host memory rotates: a step is laid out while the copy of the one before may still be under way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rootlace.kernels import KernelSet
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.model.decoder.interface import AdaptedRows, StepInput
from rootlace.runtime.model.decoder.step_input import (
    NOT_FED,
    StepInputBuilder,
    copied_slots,
    wanted_tokens,
)
from rootlace.runtime.model.lora import adapted_tokens

ALIGNMENT = 256
"""Bytes: where an array begins. Kernels are specialised for addresses that are multiples of 16."""
ROTATION = 3
"""Host buffers. Two steps are under way at most; a third is laid out beside them."""
_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.bool_): torch.bool,
}


@dataclass(frozen=True)
class Field:
    """Bytes `start : stop` of the buffer, as an array."""

    start: int
    stop: int
    dtype: np.dtype
    shape: tuple[int, ...]


class StagingLayout:
    """Places of named arrays, one after the other."""

    def __init__(self, start: int = 0) -> None:
        self._fields: dict[str, Field] = {}
        self.start = start
        self.stop = start

    def add(self, name: str, dtype: np.dtype | type, shape: tuple[int, ...]) -> None:
        """Raises ValueError if there is an array of this name."""
        if name in self._fields:
            raise ValueError(f"{name} has a place already")
        kind = np.dtype(dtype)
        start = -(-self.stop // ALIGNMENT) * ALIGNMENT
        self.stop = start + kind.itemsize * math.prod(shape)
        self._fields[name] = Field(start, self.stop, kind, shape)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def field(self, name: str) -> Field:
        return self._fields[name]

    def write(self, buffer: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        """Put arrays in their places in `buffer` uint8 [bytes]. An array may be shorter than its
        place (along its only axis): the rest of its place is left as it was."""
        for name, values in arrays.items():
            self.host(buffer, name)[: len(values)] = values

    def host(self, buffer: np.ndarray, name: str) -> np.ndarray:
        """The place of an array in `buffer` uint8 [bytes]."""
        field = self._fields[name]
        return buffer[field.start : field.stop].view(field.dtype).reshape(field.shape)

    def device(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """The array in `buffer` uint8 [bytes], a view."""
        field = self._fields[name]
        return buffer[field.start : field.stop].view(_TORCH[field.dtype]).view(field.shape)


class Event(Protocol):
    """A point in the device's work."""

    def record(self) -> None:
        """Here, behind everything given to the device so far."""

    def synchronize(self) -> None:
        """Wait until the device is past it (at once if it was never recorded)."""


class HostMemory(Protocol):
    """Memory that the device copies from and to by itself, and how to know when it has."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of main memory."""

    def event(self) -> Event: ...


class HostBuffers:
    """Host memory in rotation. `take` gives a buffer nobody reads any more; `sent` says that the
    copies from it are on their way."""

    def __init__(self, memory: HostMemory, nbytes: int, count: int = ROTATION) -> None:
        self._memory = memory
        self._buffers = [memory.host_buffer(nbytes) for _ in range(count)]
        self._events = [memory.event() for _ in range(count)]
        self._turn = -1

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [at least nbytes]; larger ones are kept, so that a size met once is there again."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self._events[self._turn].synchronize()
        if len(self._buffers[self._turn]) < nbytes:
            size = 1 << (nbytes - 1).bit_length()
            self._buffers[self._turn] = self._memory.host_buffer(size)
        return self._buffers[self._turn]

    def sent(self) -> None:
        """To be called when the copies from the buffer taken last were given to the device."""
        self._events[self._turn].record()


# Mixed staging ------------------------------------------------------------------------------------
#
# A step of any rows: everything it needs in one piece of device memory of its own, in one copy.


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
