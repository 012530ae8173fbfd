"""A decode step's inputs at fixed places, padded to one of a few numbers of rows.

Every row has one new token. Padding rows follow the real ones: token 0 at position 0, no context,
and slots of a scratch block that no sequence has. What is computed for them is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rootlace.kernels import KernelSet
from rootlace.kernels.interface import HostPlan
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.model.decoder.interface import StepInput
from rootlace.runtime.model.decoder.step_input import NOT_FED, StepInputBuilder
from rootlace.runtime.model.executor.graphs import bucket_of, decode_buckets
from rootlace.runtime.model.executor.staging import HostBuffers, StagingLayout

SAMPLING_BYTES = 16384
SAMPLING_BYTES_PER_ROW = 128
"""Room before the other arrays for those of the sampler; larger ones are sent separately."""
PLAN_NUMBERS_PER_ROW = 4096
"""Room for what an attention plan says of a row besides its blocks."""


@dataclass(frozen=True)
class Bucket:
    """Where the arrays of a step of `rows` rows lie. `tails` are the attention plans' last arrays,
    the only ones whose length varies from step to step; they have room for the longest."""

    rows: int
    layout: StagingLayout
    attention: dict[int | None, list[str]]
    tails: list[str]


@dataclass(frozen=True)
class StagedDecode:
    """A step's arrays, on their way to the device."""

    bucket: Bucket
    plans: dict[int | None, HostPlan]
    sampling: StagingLayout | None
    """Where the sampler's arrays are; None: they were not sent, or do not fit."""


class DecodeStaging:
    """Lays decode steps out in one buffer of the device, always the same."""

    def __init__(
        self,
        inputs: StepInputBuilder,
        kernels: KernelSet,
        buffers: HostBuffers,
        device: torch.device,
        max_rows: int,
        max_blocks: int,
        scratch_slot: int,
    ) -> None:
        """`max_blocks`: block table entries of one row at most; `scratch_slot`: the first slot of
        the block that belongs to nobody."""
        self.buckets = decode_buckets(max_rows)
        self._inputs = inputs
        self._kernels = kernels
        self._buffers = buffers
        # Block tables of rows and of what they share, and what else a plan says of a row.
        self._tail = 2 * max_rows * max_blocks + PLAN_NUMBERS_PER_ROW * max_rows
        size = SAMPLING_BYTES + SAMPLING_BYTES_PER_ROW * max_rows + 1024 * max_rows + (1 << 20)
        size += 4 * self._tail * len(inputs.windows)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        scratch = np.arange(max_rows, dtype=np.int64) % inputs.block_size
        self._scratch = scratch_slot + scratch
        self._bucket: dict[int, Bucket] = {}

    def rows_for(self, plan: StepPlan) -> int | None:
        """The bucket a plan belongs to; None: it has other rows than decode rows."""
        if (
            plan.num_tokens != plan.num_rows
            or not plan.num_rows
            or len(plan.duplicate_tokens)
            or plan.prompt_scores
            or plan.pooled
            or len(plan.adapters)
        ):
            return None
        return bucket_of(plan.num_rows, self.buckets)

    def stage(
        self, plan: StepPlan, rows: int, sampling: dict[str, np.ndarray]
    ) -> StagedDecode | None:
        """Send a step, with `sampling` beside the rest in the same copy, if it fits in its room.
        None: the attention plan has no fixed form or is larger than any foreseen."""
        batch = self._inputs.attention_batch(plan)
        plans = {w: self._kernels.plan_attention(batch, w, rows) for w in self._inputs.windows}
        bucket = self._bucket.get(rows)
        if bucket is None:
            if not all(each.arrays for each in plans.values()):
                return None
            bucket = self._bucket[rows] = self._lay_out(rows, plans)
        layout = bucket.layout
        arrays = self._rows(plan, rows)
        for window, names in bucket.attention.items():
            arrays |= zip(names, plans[window].arrays, strict=True)
        if any(len(arrays[name]) > self._tail for name in bucket.tails):
            return None
        places = sampling_layout(sampling, layout.start) if sampling else None
        host = self._buffers.take(layout.stop)
        memory = host.numpy()
        layout.write(memory, arrays)
        if places is not None:
            places.write(memory, sampling)
        start = layout.start if places is None else 0
        for index, tail in enumerate(bucket.tails):
            # One copy, and one for each further window's tail, which lies behind unused room.
            field = layout.field(tail)
            begin = field.start if index else start
            end = field.start + 4 * len(arrays[tail])
            self._buffer[begin:end].copy_(host[begin:end], non_blocking=True)
        self._buffers.sent()
        return StagedDecode(bucket, plans, places)

    def stage_sampling(self, rows: int, arrays: dict[str, np.ndarray]) -> StagingLayout | None:
        """Send the sampler's arrays alone. None: they have no room."""
        places = sampling_layout(arrays, self._bucket[rows].layout.start)
        if places is None:
            return None
        host = self._buffers.take(places.stop)
        places.write(host.numpy(), arrays)
        self._buffer[: places.stop].copy_(host[: places.stop], non_blocking=True)
        self._buffers.sent()
        return places

    def sampling_tensors(self, places: StagingLayout) -> dict[str, torch.Tensor]:
        return {name: places.device(self._buffer, name) for name in places}

    def step_input(self, staged: StagedDecode, tokens: torch.Tensor) -> StepInput:
        """What the decoder takes, read from the fixed places when it runs. `tokens` int32 is what
        the step before found."""
        bucket, buffer = staged.bucket, self._buffer
        layout = bucket.layout
        positions = layout.device(buffer, "positions")
        cos, sin = self._inputs.rotary(positions)
        attention: dict[int | None, Any] = {}
        for window, names in bucket.attention.items():
            views = [layout.device(buffer, name) for name in names]
            attention[window] = staged.plans[window].bind(views)
        return StepInput(
            token_ids=self._kernels.feed_tokens(
                layout.device(buffer, "token_ids"), layout.device(buffer, "feeds"), tokens
            ),
            positions=positions,
            cos=cos,
            sin=sin,
            write_slots=layout.device(buffer, "slots"),
            write_tokens=None,
            attention=attention,
            wanted=None,
        )

    def _rows(self, plan: StepPlan, rows: int) -> dict[str, np.ndarray]:
        count = plan.num_rows
        token_ids = np.zeros(rows, np.int64)
        token_ids[:count] = plan.token_ids
        feeds = np.full(rows, NOT_FED, np.int64)
        feeds[plan.feeds[:, 0]] = plan.feeds[:, 1]
        positions = np.zeros(rows, np.int64)
        positions[:count] = plan.positions
        slots = self._scratch[:rows].copy()
        slots[:count] = plan.slots
        return {"token_ids": token_ids, "feeds": feeds, "positions": positions, "slots": slots}

    def _lay_out(self, rows: int, plans: dict[int | None, HostPlan]) -> Bucket:
        layout = StagingLayout(SAMPLING_BYTES + SAMPLING_BYTES_PER_ROW * rows)
        for name in ("token_ids", "feeds", "positions", "slots"):
            layout.add(name, np.int64, (rows,))
        attention: dict[int | None, list[str]] = {}
        for window, plan in plans.items():
            attention[window] = [f"attention {window} {i}" for i in range(len(plan.arrays))]
            for name, array in zip(attention[window][:-1], plan.arrays, strict=False):
                layout.add(name, array.dtype, array.shape)
        tails = [names[-1] for names in attention.values()]
        for name in tails:
            layout.add(name, np.int32, (self._tail,))
        if layout.stop > len(self._buffer):
            raise RuntimeError(f"{rows} rows need {layout.stop} bytes, more than foreseen")
        return Bucket(rows, layout, attention, tails)


def sampling_layout(arrays: dict[str, np.ndarray], room: int | None = None) -> StagingLayout | None:
    """Places for the sampler's arrays from the buffer's start on; None: they need over `room`."""
    layout = StagingLayout()
    for name, array in arrays.items():
        layout.add(name, array.dtype, array.shape)
    return layout if room is None or layout.stop <= room else None
