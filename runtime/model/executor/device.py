"""The few things of CUDA that are not operations on tensors: its stream, events, pinned memory and
graphs. The rest of the executor does not know which device it runs on, and is tested without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from rootlace.runtime.model.executor.staging import Event


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
