"""The few things of CUDA that are not operations on tensors: its stream, events, pinned memory and
graphs. The rest of the executor does not know which device it runs on, and is tested without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

from rootlace.runtime.model.executor.staging import Event, HostMemory, StagingLayout

# Results ------------------------------------------------------------------------------------------
#
# What a step found, on its way to the host while the device goes on.


ROTATION = 4
"""Host buffers: at most two steps wait to be collected, with up to two results each."""
FIRST_BYTES = 1 << 16


class Results:
    """Copies results to host memory in rotation. A result is to be read before `ROTATION` further
    ones are fetched."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._buffers = [memory.host_buffer(FIRST_BYTES) for _ in range(ROTATION)]
        self._events = [memory.event() for _ in range(ROTATION)]
        self._turn = -1

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Begin to copy `tensors`, as they will be once the device comes to this point."""
        self._turn = (self._turn + 1) % ROTATION
        layout = StagingLayout()
        for index, tensor in enumerate(tensors):
            layout.add(str(index), _NUMPY[tensor.dtype], tuple(tensor.shape))
        if len(self._buffers[self._turn]) < layout.stop:
            size = 1 << (layout.stop - 1).bit_length()
            self._buffers[self._turn] = self._memory.host_buffer(size)
        buffer, event = self._buffers[self._turn], self._events[self._turn]
        for index, tensor in enumerate(tensors):
            layout.device(buffer, str(index)).copy_(tensor, non_blocking=True)
        event.record()
        return Fetched(layout, buffer, event, len(tensors))


class Fetched:
    """Results that are under way."""

    def __init__(
        self, layout: StagingLayout, buffer: torch.Tensor, event: Event, count: int
    ) -> None:
        self._layout = layout
        self._buffer = buffer
        self._event = event
        self._count = count

    def wait(self) -> list[np.ndarray]:
        """The arrays, once they are here; copies, good for as long as the caller likes."""
        self._event.synchronize()
        host = self._buffer.numpy()
        return [self._layout.host(host, str(index)).copy() for index in range(self._count)]


_NUMPY = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.bool: np.bool_,
}


# Device -------------------------------------------------------------------------------------------


class Device(Protocol):
    """Where steps run, in the order they are given."""

    @property
    def device(self) -> torch.device: ...

    def work(self) -> AbstractContextManager[object]:
        """Within it operations are given to the steps' own stream."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of main memory that the device reads and writes by itself."""

    def event(self) -> Event: ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the operations that `work` gives to the device, without running them; what is
        returned runs them again, on whatever their tensors hold then."""

    def works(self) -> bool:
        """Whether the device still runs anything; some faults end it for the whole process. Waits
        for what it was given."""


class CudaDevice:
    """One stream for everything, so that copies and kernels run in the order they are given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        # Graphs run one after the other, so all may use the same memory between their nodes.
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Event:
        return torch.cuda.Event()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Raises RuntimeError (of torch) if `work` does what cannot be captured.

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
