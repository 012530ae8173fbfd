"""Lay a step's arrays out in one piece of host memory, and send them to the device in one copy.

A layout gives every array of a step a fixed place. Steps of one layout differ in contents alone: a
captured graph reads each array where the array lay at the capture.

Host buffers rotate: a step is laid out while the copy of the step before may still be in progress.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from rootlace.kernels.arrays import numpy_dtype, torch_dtype
from rootlace.kernels.interface import HostPlan
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.model.decoder.interface import (
    NOT_FED,
    StepInput,
    StepInputBuilder,
    copied_slots,
)

# CUDA: its stream, events and pinned memory, and captured graphs.
#
# Launching the few hundred kernels of a decode step one by one takes the host longer than the
# device needs to run the kernels; a graph is one launch. Capturing a graph takes as long as several
# steps, so a server captures none at its start. Work without a graph is launched kernel by kernel,
# with the same results. Such work is captured after a few uses, or while the server is idle.

# Device -------------------------------------------------------------------------------------------
#
# Wrap the parts of CUDA that are not operations on tensors: stream, events, pinned memory and
# graphs. The rest of the executor does not know which device it runs on, and is tested without a
# GPU.


class CudaDevice:
    """CUDA device with one stream, so that copies and kernels run in the order of their calls."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        # Graphs run one after the other, so all may use the same memory between their nodes.
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def work(self) -> AbstractContextManager[object]:
        """Return a context whose operations go to the steps' own stream."""
        return torch.cuda.stream(self._stream)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Allocate uint8 [nbytes] of pinned main memory, which the device can copy by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the operations that `work` gives to the device, without running them.

        The returned function runs them again, on the current contents of their tensors. Raises
        RuntimeError (of torch) if an operation of `work` cannot be captured.

        `torch.cuda.graph` is not used: it empties the allocator's caches first, which slows the
        next steps. "thread_local": other threads may use the device meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        with self.work():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph.replay

    def works(self) -> bool:
        """Tell whether the device still runs anything; some faults end it for the whole process.
        Waits for all queued work."""
        try:
            self._stream.synchronize()
        except RuntimeError:
            return False
        return True

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed: stream and allocator must leave the capturing state.

        If the capture was invalidated, `capture_end` raises before it tells the allocator. The
        allocator then refuses every later capture into the pool. And torch does not revive a pool
        whose only graph failed. So later graphs get another pool. The graph is kept, as the
        allocator may refer to it.
        """
        with contextlib.suppress(RuntimeError):  # the reason is the error under way
            graph.capture_end()
        with contextlib.suppress(RuntimeError, AttributeError):  # usually it knows already
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        self._failed.append(graph)
        self._pool = torch.cuda.graph_pool_handle()


# Graphs -------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

USES_BEFORE_CAPTURE = 2
"""Runs of a piece of work kernel by kernel before its capture. At least one: compilation and set-up
at the first use cannot be captured."""
CAPTURE_SHARE = 0.2
"""Largest share of a busy server's time spent on capturing."""
MOST_FAILURES = 3
"""Number of failures after which capturing stops: each may leak memory."""


@dataclass
class GraphCounters:
    captured: int = 0
    replayed: int = 0
    """Launches of graphs."""
    dropped: int = 0
    failed: int = 0
    """Pieces of work that cannot be captured, and are launched kernel by kernel for good."""
    seconds: float = 0.0
    """Seconds spent on capturing."""


class Graphs:
    """Runner of pieces of work by their keys: by graph where one exists. Not thread-safe.

    Every graph takes memory, and there are more kinds of steps than possible graphs. At most
    `limit` are kept; a new graph replaces the least recently replayed one.
    """

    def __init__(
        self,
        device: CudaDevice,
        enabled: bool,
        limit: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.enabled = enabled and limit > 0
        self._limit = limit
        self.count = GraphCounters()
        self._device = device
        self._clock = clock
        # Least recently replayed first.
        self._replays: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._never: set[Hashable] = set()
        self._uses: Counter[Hashable] = Counter()
        self._not_before = 0.0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._replays

    def missing(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """List the keys that can be captured and are not yet."""
        if not self.enabled:
            return []
        return [key for key in keys if key not in self._replays and key not in self._never]

    def run(self, key: Hashable, work: Callable[[], None]) -> bool:
        """Do `work`, whose operations depend on `key` alone; return whether a graph did it.

        Work that was done often enough is captured as well, unless capturing has used up its share
        of the time.
        """
        replay = self._replays.get(key)
        if replay is not None:
            self._replays.move_to_end(key)
            replay()
            self.count.replayed += 1
            return True
        work()
        if self.enabled and key not in self._never:
            self._uses[key] += 1
            if self._uses[key] >= USES_BEFORE_CAPTURE and self._clock() >= self._not_before:
                self.capture(key, work)
        return False

    def capture(self, key: Hashable, work: Callable[[], None]) -> None:
        """Capture work that was done before. A failure is logged and not tried again."""
        begin = self._clock()
        if len(self._replays) >= self._limit:
            self._drop_oldest()
        try:
            self._replays[key] = self._device.capture(work)
        except RuntimeError:
            log.warning("%s cannot be captured and runs without a graph", key, exc_info=True)
            self.give_up(key)
        else:
            self.count.captured += 1
        end = self._clock()
        self.count.seconds += end - begin
        self._not_before = end + (end - begin) * (1 / CAPTURE_SHARE - 1)

    def give_up(self, key: Hashable) -> None:
        """Never capture this work."""
        self._never.add(key)
        self.count.failed += 1
        if self.count.failed >= MOST_FAILURES:
            self.enabled = False

    def _drop_oldest(self) -> None:
        end = self._device.event()
        end.record()
        end.synchronize()  # the graph may be running
        key, _ = self._replays.popitem(last=False)
        del self._uses[key]
        self.count.dropped += 1


ALIGNMENT = 256
"""Alignment of arrays in bytes. Kernels are specialised for addresses that are multiples of 16."""
ROTATION = 3
"""Number of host buffers: for two steps in progress at most, and one that is laid out."""
FINE_BUCKETS = 256
"""Rows up to which buckets are 8 rows apart, and 32 beyond: padding costs little, graphs memory."""


class Field(msgspec.Struct, frozen=True):
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
        """Add a place. Raises ValueError if the name has a place."""
        if name in self._fields:
            raise ValueError(f"{name} has a place already")
        kind = np.dtype(dtype)
        start = -(-self.stop // ALIGNMENT) * ALIGNMENT
        self.stop = start + kind.itemsize * math.prod(shape)
        self._fields[name] = Field(start, self.stop, kind, shape)

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> StagingLayout:
        """Lay out places for these arrays."""
        layout = cls()
        for name, array in arrays.items():
            layout.add(name, array.dtype, array.shape)
        return layout

    def field(self, name: str) -> Field:
        return self._fields[name]

    def write(self, buffer: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy arrays to their places in `buffer` uint8 [bytes]. An array may be shorter than its
        place (along its only axis): the rest of the place stays unchanged."""
        for name, values in arrays.items():
            self.host(buffer, name)[: len(values)] = values

    def host(self, buffer: np.ndarray, name: str) -> np.ndarray:
        """Return an array's place in `buffer` uint8 [bytes]."""
        field = self._fields[name]
        return buffer[field.start : field.stop].view(field.dtype).reshape(field.shape)

    def device(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """Return the array in `buffer` uint8 [bytes], a view."""
        field = self._fields[name]
        return buffer[field.start : field.stop].view(torch_dtype(field.dtype)).view(field.shape)

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return all arrays in `buffer` uint8 [bytes], as views."""
        return {name: self.device(buffer, name) for name in self._fields}


class HostBuffers:
    """Host memory in rotation. `take` returns a buffer that is no longer read; `sent` marks that
    its copies are queued."""

    def __init__(self, device: CudaDevice, nbytes: int, count: int = ROTATION) -> None:
        self._device = device
        self._buffers = [device.host_buffer(nbytes) for _ in range(count)]
        self._events = [device.event() for _ in range(count)]
        self._turn = -1

    def take(self, nbytes: int) -> torch.Tensor:
        """Return uint8 [at least nbytes]; a buffer that grew is kept for later steps."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self._events[self._turn].synchronize()
        if len(self._buffers[self._turn]) < nbytes:
            size = 1 << (nbytes - 1).bit_length()
            self._buffers[self._turn] = self._device.host_buffer(size)
        return self._buffers[self._turn]

    def sent(self) -> torch.cuda.Event:
        """Mark the copies of the buffer taken last as queued; return the event behind them."""
        event = self._events[self._turn]
        event.record()
        return event


class Results:
    """Copier of steps' results to host memory. A result must be read before `ROTATION` further ones
    are fetched."""

    ROTATION = 4
    """At most two steps wait to be collected, with up to two results each."""

    def __init__(self, device: CudaDevice) -> None:
        self._buffers = HostBuffers(device, 1 << 16, self.ROTATION)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[np.ndarray]]:
        """Begin to copy `tensors`, with their contents at this point of the device's work. The
        returned function waits, and returns copies that the caller may keep."""
        layout = StagingLayout()
        for index, tensor in enumerate(tensors):
            layout.add(str(index), numpy_dtype(tensor.dtype), tuple(tensor.shape))
        buffer = self._buffers.take(layout.stop)
        for index, tensor in enumerate(tensors):
            layout.device(buffer, str(index)).copy_(tensor, non_blocking=True)
        event = self._buffers.sent()

        def wait() -> list[np.ndarray]:
            event.synchronize()
            host = buffer.numpy()
            return [layout.host(host, str(index)).copy() for index in range(len(tensors))]

        return wait


# Mixed staging ------------------------------------------------------------------------------------
#
# Stage a step of any rows: all arrays in one piece of the step's own device memory, in one copy.


class MixedStaging(msgspec.Struct, frozen=True):
    """Layout of steps that are not captured as graphs."""

    inputs: StepInputBuilder
    buffers: HostBuffers

    def send(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Send arrays to the device in one copy."""
        layout = StagingLayout.of(arrays)
        host = self.buffers.take(layout.stop)
        layout.write(host.numpy(), arrays)
        # A new buffer each time: the allocator does not reuse a queued step's memory before the
        # stream has passed that step.
        buffer = torch.empty(layout.stop, dtype=torch.uint8, device=self.inputs.device)
        buffer.copy_(host[: layout.stop], non_blocking=True)
        self.buffers.sent()
        return layout.tensors(buffer)

    def copies(self, plan: StepPlan) -> dict[str, np.ndarray]:
        """Return the slots of the plan's block copies; empty if there are none."""
        if not len(plan.copies):
            return {}
        source, target = copied_slots(plan, self.inputs.block_size)
        return {"copy_source": source, "copy_target": target}

    def stage(
        self, plan: StepPlan, found: torch.Tensor
    ) -> tuple[StepInput, dict[str, torch.Tensor]]:
        """Return the decoder's input, and all arrays: those of `copies`, and "targets", the tokens
        that prompt scores are of. `found`: int32, tokens of the step before."""
        arrays = self.inputs.arrays(plan)
        if len(plan.feeds):
            arrays["feeds"] = np.full(plan.num_tokens, NOT_FED, np.int64)
            arrays["feeds"][plan.feeds[:, 0]] = plan.feeds[:, 1]
        if plan.prompt_scores:
            arrays["targets"] = np.concatenate(
                [row.targets.astype(np.int64) for row in plan.prompt_scores]
            )
        arrays |= self.copies(plan)
        batch = self.inputs.attention_batch(plan)
        plans = {w: self.inputs.kernels.plan_attention(batch, w) for w in self.inputs.windows}
        names = {
            window: [f"attention {window} {i}" for i in range(len(attention.arrays))]
            for window, attention in plans.items()
        }
        for window, attention in plans.items():
            arrays |= zip(names[window], attention.arrays, strict=True)
        staged = self.send(arrays)
        token_ids = staged["token_ids"]
        if len(plan.feeds):
            token_ids = self.inputs.kernels.feed_tokens(token_ids, staged["feeds"], found)
        bound = {
            window: attention.bind([staged[name] for name in names[window]])
            for window, attention in plans.items()
        }
        return self.inputs.on_device(plan, staged, bound, token_ids), staged


def decode_buckets(max_rows: int) -> list[int]:
    """List the numbers of rows that have graphs: 1, 2, 4, 8, 16, 24, …, `max_rows`."""
    sizes = {1, 2, 4, *range(8, FINE_BUCKETS + 1, 8), *range(FINE_BUCKETS, max_rows, 32), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


def bucket_of(count: int, buckets: list[int]) -> int | None:
    """Return the smallest bucket that holds `count` rows; None: too many rows."""
    index = bisect_left(buckets, count)
    return buckets[index] if index < len(buckets) else None


# Decode staging -----------------------------------------------------------------------------------
#
# Stage a decode step's inputs at fixed places, padded to one of a few numbers of rows.
#
# Every row has one new token. Padding rows follow the real rows: token 0 at position 0, no context,
# and slots of a scratch block that no sequence has. Results of padding rows are ignored.


SAMPLING_BYTES = 16384
SAMPLING_BYTES_PER_ROW = 128
"""Bytes per row for the sampler's arrays before the other arrays; larger ones are sent separately.
"""
PLAN_NUMBERS_PER_ROW = 4096
"""Numbers per row for an attention plan, besides the row's blocks."""


class Bucket(msgspec.Struct, frozen=True):
    """Layout of the arrays of a step of `rows` rows. `tails`: the attention plans' last arrays, the
    only ones of varying length, with room for the longest."""

    rows: int
    layout: StagingLayout
    attention: dict[int | None, list[str]]
    tails: list[str]


class StagedDecode(msgspec.Struct, frozen=True):
    """Arrays of a step on their way to the device."""

    plan: StepPlan
    bucket: Bucket
    plans: dict[int | None, HostPlan]
    sampling: StagingLayout | None
    """Places of the sampler's arrays; None: not sent, or too large."""


class DecodeStaging:
    """Layout of decode steps in one fixed buffer of the device."""

    def __init__(
        self,
        inputs: StepInputBuilder,
        buffers: HostBuffers,
        max_rows: int,
        max_blocks: int,
        scratch_slot: int,
    ) -> None:
        """`max_blocks`: most block table entries of a row. `scratch_slot`: first slot of the block
        that no sequence has."""
        self.buckets = decode_buckets(max_rows)
        self._inputs = inputs
        self._kernels = inputs.kernels
        self._buffers = buffers
        # Block tables of rows and of shared prefixes, and a plan's further numbers of a row.
        self._tail = 2 * max_rows * max_blocks + PLAN_NUMBERS_PER_ROW * max_rows
        size = SAMPLING_BYTES + SAMPLING_BYTES_PER_ROW * max_rows + 1024 * max_rows + (1 << 20)
        size += 4 * self._tail * len(inputs.windows)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=inputs.device)
        scratch = np.arange(max_rows, dtype=np.int64) % inputs.block_size
        self._scratch = scratch_slot + scratch
        self._bucket: dict[int, Bucket] = {}

    def rows_for(self, plan: StepPlan) -> int | None:
        """Return the bucket of a plan; None: not all rows are decode rows."""
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
        """Send a step and, if they fit, the `sampling` arrays in the same copy. None: the attention
        plan has no fixed form or is too large."""
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
        places = _sampling_layout(sampling, layout.start) if sampling else None
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
        return StagedDecode(plan, bucket, plans, places)

    def stage_sampling(self, rows: int, arrays: dict[str, np.ndarray]) -> StagingLayout | None:
        """Send the sampler's arrays alone. None: there is no room."""
        places = _sampling_layout(arrays, self._bucket[rows].layout.start)
        if places is None:
            return None
        host = self._buffers.take(places.stop)
        places.write(host.numpy(), arrays)
        self._buffer[: places.stop].copy_(host[: places.stop], non_blocking=True)
        self._buffers.sent()
        return places

    def sampling_tensors(self, places: StagingLayout) -> dict[str, torch.Tensor]:
        return places.tensors(self._buffer)

    def step_input(self, staged: StagedDecode, tokens: torch.Tensor) -> StepInput:
        """Return the decoder's input, read from the fixed places when it runs. `tokens`: int32, the
        tokens of the step before."""
        tensors = staged.bucket.layout.tensors(self._buffer)
        attention = {
            window: staged.plans[window].bind([tensors[name] for name in names])
            for window, names in staged.bucket.attention.items()
        }
        token_ids = self._kernels.feed_tokens(tensors["token_ids"], tensors["feeds"], tokens)
        return self._inputs.on_device(staged.plan, tensors, attention, token_ids)

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


def _sampling_layout(arrays: dict[str, np.ndarray], limit: int) -> StagingLayout | None:
    """Place the sampler's arrays from the buffer's start on; None: they need over `limit` bytes."""
    layout = StagingLayout.of(arrays)
    return layout if layout.stop <= limit else None
