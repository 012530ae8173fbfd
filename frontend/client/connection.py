"""A connection to a gateway: one I/O thread with an asyncio loop and a ZeroMQ DEALER socket.

Program threads (and event loops) only put operations into an outbox and get events through the
sink they gave for each operation; nothing here blocks them. What is put within a short while
travels as one frame, and a program that is about to wait has its frame sent at once, so that a
straight-line program is one message and one round trip.

There are no locks on the way in: the garbage collector may close a branch from any thread, even in
the middle of this module, and `deque.append` and `dict.pop` are atomic.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from rootlace.client.completion import call_together
from rootlace.wire import protocol
from rootlace.wire.errors import (
    InvalidRequest,
    ProtocolError,
    RootlaceError,
    ServerUnavailable,
    from_code,
)
from rootlace.wire.sockets import MessageReader

Sink = Callable[[protocol.Event], None]
"""Gets every event of one operation, in the I/O thread; the last one is terminal."""

MAX_FRAME_BYTES = 32 * 2**20
"""Half of what a gateway accepts by default."""
_MAX_FRAME_OPS = 1024


@dataclass
class Counters:
    """What went over one connection so far; `round_trips`: how often a program had to wait."""

    messages_sent: int = 0
    messages_received: int = 0
    ops_sent: int = 0
    round_trips: int = 0


class Connection:
    """Connects on construction; raises ServerUnavailable, Unauthorized or ProtocolError.

    `coalesce` (seconds) bounds how long an operation waits for company in its frame; the connection
    counts as lost when nothing was heard for `timeout` seconds although pings are sent every
    `ping_interval`. A lost connection stays lost: make a new one.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        coalesce: float = 0.001,
        ping_interval: float = 5.0,
        timeout: float = 30.0,
        connect_timeout: float = 20.0,
    ) -> None:
        self.address = address
        self.counters = Counters()
        self._api_key = api_key
        self._coalesce = coalesce
        self._ping_interval = ping_interval
        self._timeout = timeout
        self._op_ids = itertools.count(1)
        self._branch_ids = itertools.count(1)
        self._program_ids = itertools.count(1)
        self._session = uuid.uuid4().hex
        self._outbox: deque[msgspec.Raw] = deque()
        self._sinks: dict[int, Sink] = {}
        self._armed = False
        self._hurried = False
        self._round_trip_lock = threading.Lock()
        self._last_heard = 0.0
        self._model: protocol.ModelInfo | None = None
        self._lost: RootlaceError | None = None
        self._started = threading.Event()
        # One that watches descriptors, on every system.
        self._loop = asyncio.SelectorEventLoop()
        self._wake = asyncio.Event()
        self._goodbye = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run_loop, name=f"rootlace-io {address}", daemon=True
        )
        self._thread.start()
        self._await_welcome(connect_timeout)

    def _await_welcome(self, timeout: float) -> None:
        if not self._started.wait(timeout):
            self._lose(ServerUnavailable(f"{self.address} did not answer in {timeout:g} s"))
            self._in_loop(self._goodbye.set)
        if self._lost is not None:
            self._thread.join(timeout=5)
            raise self._lost

    # ------------------------------------------------------------ for programs

    @property
    def model(self) -> protocol.ModelInfo:
        assert self._model is not None, "only a welcomed connection is ever handed out"
        return self._model

    @property
    def lost(self) -> RootlaceError | None:
        """Why the connection is of no use any more, or None."""
        if self._lost is None and not self._thread.is_alive():
            # This process is a fork of the one that connected: threads are not inherited.
            return ServerUnavailable(f"the connection to {self.address} is another process's")
        return self._lost

    def next_op(self) -> int:
        return next(self._op_ids)

    def next_branch(self) -> int:
        return next(self._branch_ids)

    def next_program(self) -> str:
        """An id for one run of a program, unlike any of this or another connection."""
        return f"{self._session}-{next(self._program_ids)}"

    def send(self, op: protocol.Op, sink: Sink) -> None:
        """Queue `op`; never blocks. On a lost connection the sink gets its `Failed` right here.

        Raises InvalidRequest for what no frame can carry: here, where it concerns nobody else.
        """
        packed = pack(op)
        self._sinks[op.op] = sink
        self._outbox.append(packed)
        if self._lost is not None:
            # Whoever pops the sink answers it: this thread, or the I/O thread's sweep.
            self._outbox.clear()
            self._fail_op(op.op, self._lost)
        elif not self._armed:
            self._armed = True
            self._in_loop(self._arm)

    def flush(self) -> None:
        """Send now what is queued: somebody is going to wait for it."""
        if self._outbox and not self._hurried:
            self._hurried = True
            self._in_loop(self._wake.set)

    def count_round_trip(self) -> None:
        with self._round_trip_lock:
            self.counters.round_trips += 1

    def close(self) -> None:
        """Say goodbye (the gateway cancels what still runs) and end the I/O thread. Idempotent."""
        self._in_loop(self._goodbye.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    # ------------------------------------------------------------ in the I/O thread

    def _in_loop(self, callback: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _arm(self) -> None:
        self._loop.call_later(self._coalesce, self._wake.set)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except Exception as error:  # a fault of this module must not leave programs waiting
            self._lose(ServerUnavailable(f"the connection to {self.address} broke: {error!r}"))
        finally:
            self._lose(ServerUnavailable(f"the connection to {self.address} was closed"))
            self._loop.close()
            self._started.set()

    async def _main(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.IPV6, "[" in self.address)
        # A gateway forgets a peer's branches when the peer goes: there is nothing to reconnect to.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        readers = [MessageReader(socket, self._take), MessageReader(monitor, self._watch)]
        try:
            await self._talk(_Line(socket, readers[0]))
        finally:
            for reader in readers:
                reader.close()
            context.destroy(linger=500)

    async def _talk(self, line: _Line) -> None:
        try:
            line.socket.connect(self.address)
        except zmq.ZMQError as error:
            self._lose(ServerUnavailable(f"cannot connect to {self.address}: {error}"))
            return
        hello = protocol.Hello(
            op=0,
            version=protocol.PROTOCOL_VERSION,
            api_key=self._api_key,
            client=f"rootlace-python pid {os.getpid()}",
        )
        self._send_frame(line, [pack(hello)])
        parts = [
            asyncio.ensure_future(part)
            for part in (self._goodbye.wait(), self._write_when_welcome(line))
        ]
        done, pending = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if self._lost is None and self._model is not None:
            goodbye = pack(protocol.Goodbye(op=self.next_op()))
            self._send_frame(line, [*self._drain(), goodbye])
        for task in done:
            task.result()

    async def _write_when_welcome(self, line: _Line) -> None:
        while self._model is None:
            await self._wake.wait()
            self._wake.clear()
        self._started.set()  # only now: a frame must not leave while its first program is at it
        await asyncio.gather(self._write(line), self._ping())

    def _send_frame(self, line: _Line, ops: list[msgspec.Raw]) -> None:
        self.counters.messages_sent += 1
        self.counters.ops_sent += len(ops)
        # Without a high-water mark only a line that is cut makes it wait, and that is told.
        with contextlib.suppress(zmq.Again):
            line.socket.send(protocol.encode(ops), zmq.NOBLOCK)
        line.reader.look()

    def _drain(self) -> list[msgspec.Raw]:
        ops = []
        while self._outbox:
            ops.append(self._outbox.popleft())
        return ops

    async def _write(self, line: _Line) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._armed = self._hurried = False  # before draining: what comes later wakes again
            while self._outbox:
                frame: list[msgspec.Raw] = []
                size = 0
                while self._outbox and len(frame) < _MAX_FRAME_OPS:
                    size += len(memoryview(self._outbox[0]))
                    if frame and size > MAX_FRAME_BYTES:
                        break
                    frame.append(self._outbox.popleft())
                self._send_frame(line, frame)

    async def _ping(self) -> None:
        def pong(_: protocol.Event) -> None:
            pass

        while True:
            await asyncio.sleep(self._ping_interval)
            if time.monotonic() - self._last_heard > self._timeout:
                silence = f"{self.address} has not answered for {self._timeout:g} s"
                self._lose(ServerUnavailable(silence))
                self._goodbye.set()
                return
            self.send(protocol.Ping(op=self.next_op()), pong)
            self.flush()

    def _watch(self, frames: list[bytes]) -> None:
        """The line is cut."""
        parse_monitor_message(frames)
        if self._model is None:
            reason = f"cannot connect to {self.address}: nobody answers there"
        else:
            reason = f"the runtime at {self.address} is gone"
        self._lose(ServerUnavailable(reason))
        self._goodbye.set()

    def _take(self, frames: list[bytes]) -> None:
        if self._lost is not None:
            return
        self.counters.messages_received += 1
        self._last_heard = time.monotonic()
        try:
            events = protocol.decode_events(frames[0])
        except msgspec.DecodeError as error:
            self._lose(ProtocolError(f"{self.address} sent what cannot be decoded: {error}"))
            self._goodbye.set()
            return
        try:
            call_together(partial(self._dispatch_all, events))
        except Exception as error:  # a fault of this module must not leave programs waiting
            self._lose(ServerUnavailable(f"the connection to {self.address} broke: {error!r}"))
            self._goodbye.set()

    def _dispatch_all(self, events: list[protocol.Event]) -> None:
        for event in events:
            self._dispatch(event)

    def _dispatch(self, event: protocol.Event) -> None:
        if isinstance(event, protocol.Welcome):
            self._model = event.model
            self._wake.set()
        elif isinstance(event, protocol.Failed) and event.op == 0:
            # It speaks of the whole connection: which operations were lost with it is unknown.
            self._lose(from_code(event.code, event.message))
            self._goodbye.set()
        else:
            chunk = isinstance(event, protocol.Chunk)
            sink = self._sinks.get(event.op) if chunk else self._sinks.pop(event.op, None)
            if sink is not None:
                sink(event)

    def _lose(self, reason: RootlaceError) -> None:
        """Mark the connection lost and answer everything that still waits."""
        if self._lost is None:
            self._lost = reason
        self._outbox.clear()
        for op in list(self._sinks):
            self._fail_op(op, self._lost)
        if self._model is None:
            self._started.set()

    def _fail_op(self, op: int, reason: RootlaceError) -> None:
        sink = self._sinks.pop(op, None)
        if sink is not None:
            sink(protocol.Failed(op=op, code=reason.code, message=str(reason)))


@dataclass(frozen=True)
class _Line:
    """The socket and who reads from it."""

    socket: zmq.Socket[bytes]
    reader: MessageReader


def pack(op: protocol.Op) -> msgspec.Raw:
    """`op` as it travels. Raises InvalidRequest for what no frame can carry."""
    try:
        packed = protocol.pack(op)
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidRequest(f"it cannot be sent: {error}") from None
    size = len(memoryview(packed))
    if size > MAX_FRAME_BYTES:
        raise InvalidRequest(f"an operation of {size} bytes; at most {MAX_FRAME_BYTES} travel")
    return packed
