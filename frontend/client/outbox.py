"""Operations that wait for company in a frame."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from rootlace.client.channel import call_in_loop

MAX_FRAME_BYTES = 32 * 2**20
"""Half of what a gateway accepts by default."""
_MAX_FRAME_OPS = 1024


Packed = tuple[int, msgspec.Raw]
"""An operation as it travels, and its number."""


class Outbox:
    """Packed operations, put in by any thread and taken out, as frames, in the loop `loop`.

    There is no lock: the garbage collector may put something in from any thread, even in the middle
    of this class, and `deque.append` and `deque.popleft` are atomic.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coalesce: float) -> None:
        self._loop = loop
        self._coalesce = coalesce
        self._ops: deque[Packed] = deque()
        self._wake = asyncio.Event()
        self._armed = False
        self._flushing = False

    def put(self, number: int, op: msgspec.Raw) -> None:
        """Have `op` leave in `coalesce` seconds, with what is put in until then."""
        self._ops.append((number, op))
        if not self._armed:
            self._armed = True
            call_in_loop(self._loop, self._arm)

    def put_back(self, ops: list[Packed]) -> None:
        """Send `ops` before all others, in their order. An empty list sends nothing."""
        if ops:
            self._ops.extendleft(reversed(ops))
            self._wake.set()

    def _arm(self) -> None:
        self._loop.call_later(self._coalesce, self._wake.set)

    def flush(self) -> None:
        """Let what is in it leave now."""
        if self._ops and not self._flushing:
            self._flushing = True
            call_in_loop(self._loop, self._wake.set)

    async def write(self, send: Callable[[list[Packed]], None]) -> None:
        """Call `send` with each frame that is due, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._armed = self._flushing = False  # before taking: what comes later wakes again
            self.write_all(send)

    def write_all(self, send: Callable[[list[Packed]], None]) -> None:
        while frame := self._take():
            send(frame)

    def _take(self) -> list[Packed]:
        """The next frame; empty if nothing is left."""
        frame: list[Packed] = []
        size = 0
        while self._ops and len(frame) < _MAX_FRAME_OPS:
            size += len(memoryview(self._ops[0][1]))
            if frame and size > MAX_FRAME_BYTES:
                break
            frame.append(self._ops.popleft())
        return frame

    def clear(self) -> None:
        self._ops.clear()
