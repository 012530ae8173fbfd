"""What a step found, on its way to the host while the device goes on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rootlace.runtime.model.executor.staging import Event, HostMemory, StagingLayout

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
