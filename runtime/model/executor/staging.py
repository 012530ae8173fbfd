"""What a step needs, in one piece of memory: laid out on the host, sent to the device in one copy.

A layout gives every array of a step a fixed place. Steps of one layout differ in contents alone, so
what a captured graph reads lies where it lay when the graph was captured.

Host memory rotates: a step is laid out while the copy of the one before may still be under way.
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
# device needs to run them; a graph is one launch. Capturing one takes as long as several steps, so
# a server does not start with that. Work without a graph is launched kernel by kernel, with the
# same results; it is captured after it was needed a few times, or while the server is idle.

# Device -------------------------------------------------------------------------------------------
#
# The few things of CUDA that are not operations on tensors: its stream, events, pinned memory and
# graphs. The rest of the executor does not know which device it runs on, and is tested without a
# GPU.


class CudaDevice:
    """One stream for everything, so that copies and kernels run in the order they are given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        # Graphs run one after the other, so all may use the same memory between their nodes.
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def work(self) -> AbstractContextManager[object]:
        """Within it operations are given to the steps' own stream."""
        return torch.cuda.stream(self._stream)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of main memory that the device reads and writes by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the operations that `work` gives to the device, without running them.

        The returned function runs them again, on whatever their tensors hold then. Raises
        RuntimeError (of torch) if `work` does what cannot be captured.

        Not by `torch.cuda.graph`, which empties the allocator's caches first: the next steps would
        pay for it. "thread_local": other threads may use the device meanwhile.
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
        """Whether the device still runs anything; some faults end it for the whole process. Waits
        for what it was given."""
        try:
            self._stream.synchronize()
        except RuntimeError:
            return False
        return True

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed: stream and allocator must leave the capturing state.

        Where the capture was invalidated, `capture_end` raises before it tells the allocator, which
        then refuses every later capture into the pool; and a pool whose only graph failed is dead
        to torch. So later graphs get another pool. The graph is kept, as the allocator may refer to
        it.
        """
        with contextlib.suppress(RuntimeError):  # the reason is the error under way
            graph.capture_end()
        with contextlib.suppress(RuntimeError, AttributeError):  # it knows already, as a rule
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        self._failed.append(graph)
        self._pool = torch.cuda.graph_pool_handle()


# Graphs -------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

USES_BEFORE_CAPTURE = 2
"""How often something is launched kernel by kernel first. At least once: what is compiled or set up
at first use cannot be captured."""
CAPTURE_SHARE = 0.2
"""Share of a busy server's time that capturing may take."""
MOST_FAILURES = 3
"""Stop capturing after so many failures: each may leak memory."""


@dataclass
class GraphCounters:
    captured: int = 0
    replayed: int = 0
    """Launches of graphs."""
    dropped: int = 0
    failed: int = 0
    """Pieces of work that cannot be captured; they are launched kernel by kernel for good."""
    seconds: float = 0.0
    """Spent on capturing."""


class Graphs:
    """Runs pieces of work by their keys: by graph where there is one. Not thread-safe.

    Every graph takes memory, and steps come in more kinds than there can be graphs: at most `most`
    are kept, and a new one replaces the one that was replayed longest ago.
    """

    def __init__(
        self,
        device: CudaDevice,
        enabled: bool,
        most: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.enabled = enabled and most > 0
        self._most = most
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
        """Do `work`, whose operations depend on `key` alone; returns whether a graph did it.

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
        """Capture work that was done before. A failure is logged; it is not tried again."""
        begin = self._clock()
        if len(self._replays) >= self._most:
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
"""Bytes: where an array begins. Kernels are specialised for addresses that are multiples of 16."""
ROTATION = 3
"""Host buffers. Two steps are under way at most; a third is laid out beside them."""
FINE_BUCKETS = 256
"""Up to this size buckets are 8 rows apart, beyond it 32: padding costs little, graphs memory."""


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
        """Raises ValueError if there is an array of this name."""
        if name in self._fields:
            raise ValueError(f"{name} has a place already")
        kind = np.dtype(dtype)
        start = -(-self.stop // ALIGNMENT) * ALIGNMENT
        self.stop = start + kind.itemsize * math.prod(shape)
        self._fields[name] = Field(start, self.stop, kind, shape)

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> StagingLayout:
        """Places for these arrays."""
        layout = cls()
        for name, array in arrays.items():
            layout.add(name, array.dtype, array.shape)
        return layout

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
        return buffer[field.start : field.stop].view(torch_dtype(field.dtype)).view(field.shape)

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """All arrays in `buffer` uint8 [bytes], as views."""
        return {name: self.device(buffer, name) for name in self._fields}


class HostBuffers:
    """Host memory in rotation. `take` gives a buffer nobody reads any more; `sent` says that the
    copies from or to it are on their way."""

    def __init__(self, device: CudaDevice, nbytes: int, count: int = ROTATION) -> None:
        self._device = device
        self._buffers = [device.host_buffer(nbytes) for _ in range(count)]
        self._events = [device.event() for _ in range(count)]
        self._turn = -1

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [at least nbytes]; larger ones are kept, so that a size met once is there again."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self._events[self._turn].synchronize()
        if len(self._buffers[self._turn]) < nbytes:
            size = 1 << (nbytes - 1).bit_length()
            self._buffers[self._turn] = self._device.host_buffer(size)
        return self._buffers[self._turn]

    def sent(self) -> torch.cuda.Event:
        """To be called when the copies of the buffer taken last were given to the device -> the
        point in the device's work where they are done."""
        event = self._events[self._turn]
        event.record()
        return event


class Results:
    """Copies the results of steps to host memory. A result is to be read before `ROTATION` further
    ones are fetched."""

    ROTATION = 4
    """At most two steps wait to be collected, with up to two results each."""

    def __init__(self, device: CudaDevice) -> None:
        self._buffers = HostBuffers(device, 1 << 16, self.ROTATION)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[np.ndarray]]:
        """Begin to copy `tensors`, as they will be once the device comes to this point.

        The returned function waits for the arrays: copies, good for as long as the caller likes.
        """
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
# A step of any rows: everything it needs in one piece of device memory of its own, in one copy.


class MixedStaging(msgspec.Struct, frozen=True):
    """Lays out steps that are not captured as graphs."""

    inputs: StepInputBuilder
    buffers: HostBuffers

    def send(self, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Arrays to the device in one copy."""
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
        """Slots of the plan's block copies; nothing, if it has none."""
        if not len(plan.copies):
            return {}
        source, target = copied_slots(plan, self.inputs.block_size)
        return {"copy_source": source, "copy_target": target}

    def stage(
        self, plan: StepPlan, found: torch.Tensor
    ) -> tuple[StepInput, dict[str, torch.Tensor]]:
        """What the decoder takes, and all arrays: those of `copies`, and "targets", the tokens that
        prompt scores are of. `found` int32: tokens of the step before."""
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
    """Numbers of rows that there are graphs for: 1, 2, 4, 8, 16, 24, …, `max_rows`."""
    sizes = {1, 2, 4, *range(8, FINE_BUCKETS + 1, 8), *range(FINE_BUCKETS, max_rows, 32), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


def bucket_of(count: int, buckets: list[int]) -> int | None:
    """The smallest bucket that holds `count` rows; None: none does."""
    index = bisect_left(buckets, count)
    return buckets[index] if index < len(buckets) else None


# Decode staging -----------------------------------------------------------------------------------
#
# A decode step's inputs at fixed places, padded to one of a few numbers of rows.
#
# Every row has one new token. Padding rows follow the real ones: token 0 at position 0, no context,
# and slots of a scratch block that no sequence has. What is computed for them is ignored.


SAMPLING_BYTES = 16384
SAMPLING_BYTES_PER_ROW = 128
"""Room before the other arrays for those of the sampler; larger ones are sent separately."""
PLAN_NUMBERS_PER_ROW = 4096
"""Room for what an attention plan says of a row besides its blocks."""


class Bucket(msgspec.Struct, frozen=True):
    """Where the arrays of a step of `rows` rows lie. `tails` are the attention plans' last arrays,
    the only ones whose length varies from step to step; they have room for the longest."""

    rows: int
    layout: StagingLayout
    attention: dict[int | None, list[str]]
    tails: list[str]


class StagedDecode(msgspec.Struct, frozen=True):
    """A step's arrays, on their way to the device."""

    plan: StepPlan
    bucket: Bucket
    plans: dict[int | None, HostPlan]
    sampling: StagingLayout | None
    """Where the sampler's arrays are; None: they were not sent, or do not fit."""


class DecodeStaging:
    """Lays decode steps out in one buffer of the device, always the same."""

    def __init__(
        self,
        inputs: StepInputBuilder,
        buffers: HostBuffers,
        max_rows: int,
        max_blocks: int,
        scratch_slot: int,
    ) -> None:
        """`max_blocks`: block table entries of one row at most; `scratch_slot`: the first slot of
        the block that belongs to nobody."""
        self.buckets = decode_buckets(max_rows)
        self._inputs = inputs
        self._kernels = inputs.kernels
        self._buffers = buffers
        # Block tables of rows and of what they share, and what else a plan says of a row.
        self._tail = 2 * max_rows * max_blocks + PLAN_NUMBERS_PER_ROW * max_rows
        size = SAMPLING_BYTES + SAMPLING_BYTES_PER_ROW * max_rows + 1024 * max_rows + (1 << 20)
        size += 4 * self._tail * len(inputs.windows)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=inputs.device)
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
        """Send the sampler's arrays alone. None: they have no room."""
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
        """What the decoder takes, read from the fixed places when it runs. `tokens` int32 is what
        the step before found."""
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


def _sampling_layout(arrays: dict[str, np.ndarray], room: int) -> StagingLayout | None:
    """Places for the sampler's arrays from the buffer's start on; None: they need over `room`."""
    layout = StagingLayout.of(arrays)
    return layout if layout.stop <= room else None
