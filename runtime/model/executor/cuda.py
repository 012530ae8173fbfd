"""CUDA: its stream, events and pinned memory, and captured graphs.

Launching the few hundred kernels of a decode step one by one takes the host longer than the device
needs to run them; a graph is one launch. Capturing one takes as long as several steps, so a server
does not start with that. Work without a graph is launched kernel by kernel, with the same results;
it is captured after it was needed a few times, or while the server is idle.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

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
