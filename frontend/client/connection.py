"""Connection to a server: one I/O thread with an asyncio loop and a ZeroMQ DEALER socket.

Program threads (and event loops) only put operations into an outbox, and get events through the
sink of each operation; nothing here blocks them. Operations put within a short while travel as one
frame. The frame of a program that is about to wait leaves at once. So a straight-line program is
one message and one round trip.

There are no locks on the way in, since `deque.append` and `dict.pop` are atomic. The garbage
collector may close a branch from any thread, even in the middle of this module.
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
from functools import partial
from typing import Self

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from rootlace.client.channel import (
    MAX_FRAME_BYTES,
    Counters,
    Sink,
    call_in_loop,
    call_together,
    pack,
)
from rootlace.wire import protocol
from rootlace.wire.errors import (
    Overloaded,
    ProtocolError,
    RootlaceError,
    ServerUnavailable,
    StateLost,
    from_code,
)
from rootlace.wire.sockets import MessageReader

# Outbox -------------------------------------------------------------------------------------------


_MAX_FRAME_OPS = 1024


Packed = tuple[int, msgspec.Raw]
"""(number, packed operation)."""


class Outbox:
    """Packed operations, put in by any thread and taken out, as frames, in the loop `loop`.

    There is no lock, since `deque.append` and `deque.popleft` are atomic. The garbage collector may
    put an operation in from any thread, even in the middle of this class.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coalesce: float) -> None:
        self._loop = loop
        self._coalesce = coalesce
        self._ops: deque[Packed] = deque()
        self._wake = asyncio.Event()
        self._armed = False
        self._flushing = False

    def put(self, number: int, op: msgspec.Raw) -> None:
        """Send `op` in `coalesce` seconds, together with operations put in until then."""
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
        """Send all queued operations now."""
        if self._ops and not self._flushing:
            self._flushing = True
            call_in_loop(self._loop, self._wake.set)

    async def write(self, send: Callable[[list[Packed]], None]) -> None:
        """Call `send` with each due frame, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._armed = self._flushing = False  # before taking: later operations wake again
            self.write_all(send)

    def write_all(self, send: Callable[[list[Packed]], None]) -> None:
        while frame := self._take():
            send(frame)

    def _take(self) -> list[Packed]:
        """Return the next frame; empty if nothing is left."""
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


# Line ---------------------------------------------------------------------------------------------
#
# The socket of a connection: frames out, frames in, and notice of a cut.


class Line:
    """ZeroMQ DEALER in the running event loop; entering the block connects it to `address`.

    The server's public key (CURVE, hexadecimal) may stand behind `#` in the address. Messages are
    encrypted then, and nobody else can answer in the server's place.

    `receive` gets the events of each frame, `lose` the reason why no more will come.
    """

    def __init__(
        self,
        address: str,
        counters: Counters,
        receive: Callable[[list[protocol.Event]], None],
        lose: Callable[[RootlaceError], None],
    ) -> None:
        self.last_heard = 0.0
        self._address, _, key = address.partition("#")
        self._counters = counters
        self._receive = receive
        self._lose = lose
        # Frames from before the peers have greeted each other. ZeroMQ never frees a socket that has
        # such frames and whose greeting was refused.
        self._unsent: list[bytes] | None = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.IPV6, "[" in address)
        # A server forgets a peer's branches when the peer goes: there is nothing to reconnect to.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if key:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = z85.encode(bytes.fromhex(key))
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        self._reader = MessageReader(socket, self._take)
        self._watcher = MessageReader(monitor, self._changed)

    def __enter__(self) -> Self:
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self._lose(ServerUnavailable(f"cannot connect to {self._address}: {error}"))
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()
        self._watcher.close()
        self._context.destroy(linger=500)

    def send(self, ops: list[msgspec.Raw]) -> None:
        """Send one frame."""
        self._counters.messages_sent += 1
        # Without a high-water mark, only a cut line makes `send` wait, and `_changed` learns of a
        # cut.
        frame = protocol.encode(ops)
        if self._unsent is not None:
            self._unsent.append(frame)
            return
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)
        self._reader.look()

    def _take(self, frames: list[bytes]) -> None:
        self.last_heard = time.monotonic()
        try:
            events = protocol.decode_events(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = f"{self._address} sent what cannot be decoded: {error}"
            self._lose(ProtocolError(reason))
            return
        self._receive(events)

    def _changed(self, frames: list[bytes]) -> None:
        """Handle a completed greeting or the loss of the peer."""
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            unsent, self._unsent = self._unsent or [], None
            for frame in unsent:
                self._socket.send(frame)
            self._reader.look()
            return
        if event not in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            reason = (
                f"what answers at {self._address} is not a runtime's socket for programs, or does"
                " not encrypt with the same key: the server names its address with its key behind #"
            )
        elif self.last_heard:
            reason = f"the runtime at {self._address} is gone"
        else:
            reason = f"cannot connect to {self._address}: nobody answers there"
        self._lose(ServerUnavailable(reason))


# Unanswered ---------------------------------------------------------------------------------------
#
# Sent operations without an answer: a client sends them again on its next connection.


class Unanswered:
    """Operations without a terminal event, in the I/O thread. `heard` counts such events."""

    def __init__(self) -> None:
        self.heard = 0
        self._sent: dict[int, Packed] = {}
        self._chunks: dict[int, dict[int, list[int]]] = {}
        """[characters, tokens] of chunks, by operation and sample."""

    @property
    def waiting(self) -> bool:
        """Return whether any operation is unanswered."""
        return bool(self._sent)

    def sent(self, ops: list[Packed]) -> None:
        """Note that `ops` were sent."""
        for packed in ops:
            self._sent[packed[0]] = packed

    def hear(self, event: protocol.Event) -> None:
        """Note an event of an operation."""
        if isinstance(event, protocol.Chunk):
            counts = self._chunks.setdefault(event.op, {}).setdefault(event.index, [0, 0])
            counts[0] += len(event.text)
            counts[1] += len(event.token_ids)
        else:
            self.heard += 1
            self._sent.pop(event.op, None)
            self._chunks.pop(event.op, None)

    def chunks(self) -> tuple[tuple[int, int, int, int], ...]:
        """Return the received part of unfinished streams, in the form of `Hello.chunks`."""
        return tuple(
            (op, index, characters, tokens)
            for op, samples in self._chunks.items()
            for index, (characters, tokens) in samples.items()
        )

    def take(self) -> list[Packed]:
        """Remove and return the unanswered operations in their order, to be sent again."""
        ops = list(self._sent.values())
        self._sent.clear()
        return ops


# Connection ---------------------------------------------------------------------------------------


IO_THREAD = "rootlace-io"
"""Prefix of the names of connections' threads."""
RECONNECT_SECONDS = 0.2
"""Seconds between attempts to connect again."""
NAPS = 40
"""Naps that the wait for a server's first answer consists of."""


class Connection:
    """Connection to a server, made on construction. Raises ServerUnavailable, Unauthorized or
    ProtocolError, and ModelNotFound for an unknown `model` ("": the server's first).

    `coalesce` (seconds) bounds how long an operation waits for others in its frame. The connection
    is lost after `timeout` seconds without a message, although pings are sent every
    `ping_interval`.

    A server may keep programs (`Welcome.kept`). Then a broken connection is made again for up to
    `patience` seconds, and unanswered operations are sent again: programs notice a pause.
    Otherwise, or after that time, the connection stays lost: make a new one. A server that keeps
    breaking the connection without an answer for that long loses it, too.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        model: str = "",
        coalesce: float = 0.001,
        ping_interval: float = 5.0,
        timeout: float = 30.0,
        connect_timeout: float = 20.0,
        patience: float = 300.0,
    ) -> None:
        self.address = address
        self.counters = Counters()
        self._api_key = api_key
        self._hello_model = model
        self._ping_interval = ping_interval
        self._timeout = timeout
        self._patience = patience
        self.next_op: Callable[[], int] = partial(next, itertools.count(1))
        self.next_branch: Callable[[], int] = partial(next, itertools.count(1))
        self._program_ids = itertools.count(1)
        self._session = uuid.uuid4().hex
        """Secret: its holder can go on as this client. Programs' names are told to others."""
        self._name = uuid.uuid4().hex
        self._sinks: dict[int, Sink] = {}
        self._round_trip_lock = threading.Lock()
        self._model: protocol.ModelInfo | None = None
        self._lost: RootlaceError | None = None
        self._started = threading.Event()
        # One that watches descriptors, on every system.
        self._loop = asyncio.SelectorEventLoop()
        self._outbox = Outbox(self._loop, coalesce)
        self._unanswered = Unanswered()
        self._kept = False
        self._cut: RootlaceError | None = None
        """Reason why the last line was given up."""
        self._answered = False
        """True if the line brought any event but pongs."""
        self._welcome = asyncio.Event()
        self._goodbye = asyncio.Event()
        self._over = asyncio.Event()
        """Set when the line is cut."""
        self._thread = threading.Thread(
            target=self._run_loop, name=f"{IO_THREAD} {address}", daemon=True
        )
        self._connect(connect_timeout)

    def _connect(self, timeout: float) -> None:
        """Wait until the server has answered. Raises the error of a failed connection."""
        self._thread.start()
        # Naps are counted, since a pause of this process is not one of the server.
        if not any(self._started.wait(timeout / NAPS) for _ in range(NAPS)):
            self._lose(ServerUnavailable(f"{self.address} did not answer in {timeout:g} s"))
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
        """Reason why the connection is lost, or None."""
        if self._lost is None and not self._thread.is_alive():
            # This process is a fork of the connected process: threads are not inherited.
            return ServerUnavailable(f"the connection to {self.address} is another process's")
        return self._lost

    def next_program(self) -> str:
        """Return an id for one run of a program, unique over all connections."""
        return f"{self._name}-{next(self._program_ids)}"

    def send(self, op: protocol.Op, sink: Sink) -> None:
        """Queue `op`; never blocks. On a lost connection the sink gets its `Failed` right here.

        Raises InvalidRequest for an operation that no frame can carry.
        """
        packed = pack(op)
        self._sinks[op.op] = sink
        if self._lost is None:
            self._outbox.put(op.op, packed)
        else:
            # One thread pops the sink and answers: this thread, or the I/O thread in `_lose`.
            _fail(self._sinks, op.op, self._lost)

    def flush(self) -> None:
        """Send all queued operations now, because a program is about to wait."""
        self._outbox.flush()

    def count_round_trip(self) -> None:
        with self._round_trip_lock:
            self.counters.round_trips += 1

    def close(self) -> None:
        """Say goodbye (the server cancels all operations) and end the I/O thread. Idempotent."""
        call_in_loop(self._loop, self._goodbye.set)
        # The garbage collector may close a connection in the thread of another one, which has its
        # own server to talk to, and may be keeping back the goodbye (`call_together`).
        here = threading.current_thread()
        if here is not self._thread and not here.name.startswith(IO_THREAD):
            self._thread.join(timeout=5)

    # ------------------------------------------------------------ in the I/O thread

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()
            self._started.set()

    async def _live(self) -> None:
        """Run from the greeting to the end; raises nothing."""
        try:
            await self._talk()
        except Exception as error:  # a fault of this module must not leave programs waiting
            self._lose(ServerUnavailable(f"the connection to {self.address} broke: {error!r}"))
        finally:
            self._lose(ServerUnavailable(f"the connection to {self.address} was closed"))

    async def _talk(self) -> None:
        until = 0.0
        while True:
            with Line(self.address, self.counters, self._receive, self._break) as line:
                if self._lost is None and self._cut is None:
                    began, self._answered = time.monotonic(), False
                    await self._use(line)
                    if self._answered or time.monotonic() - began > self._patience:
                        until = 0.0
            if self._lost is not None or self._goodbye.is_set():
                return
            assert self._cut is not None
            until = until or time.monotonic() + self._patience
            if time.monotonic() >= until:
                self._lose(self._cut)
                return
            self._over.clear()
            self._end_late()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._goodbye.wait(), RECONNECT_SECONDS)
            self._cut = None
            self._welcome.clear()

    async def _use(self, line: Line) -> None:
        """Say hello, and carry frames to and fro until the line is cut or closed."""
        again = self._unanswered if self._kept else None
        hello = protocol.Hello(
            op=0,
            version=protocol.PROTOCOL_VERSION,
            api_key=self._api_key,
            client=f"rootlace-python pid {os.getpid()}",
            model=self._hello_model,
            session=self._session,
            heard=None if again is None else again.heard,
            chunks=() if again is None else again.chunks(),
        )
        line.send([pack(hello)])
        parts = [
            asyncio.ensure_future(part)
            for part in (
                self._goodbye.wait(),
                self._over.wait(),
                self._write_when_welcome(line),
                self._watch(line),
            )
        ]
        done, pending = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if self._lost is None and self._cut is None and self._welcome.is_set():
            number = self.next_op()
            self._outbox.put(number, pack(protocol.Goodbye(op=number)))
            self._outbox.write_all(partial(self._write, line))
        for task in done:
            task.result()

    def _write(self, line: Line, ops: list[Packed]) -> None:
        self._unanswered.sent(ops)
        line.send([packed for _, packed in ops])

    async def _write_when_welcome(self, line: Line) -> None:
        try:
            limit = self._timeout if self._kept else None
            await asyncio.wait_for(self._welcome.wait(), limit)
        except TimeoutError:
            self._break(ServerUnavailable(f"{self.address} does not welcome anybody"))
            return
        self._outbox.put_back(self._unanswered.take())
        # Only now: a frame must not leave while its first program is still filling it.
        self._started.set()
        await asyncio.gather(self._outbox.write(partial(self._write, line)), self._ping(line))

    async def _ping(self, line: Line) -> None:
        silent = 0.0
        while True:
            heard = line.last_heard
            await asyncio.sleep(self._ping_interval)
            # Naps are counted, since a pause of this process is not one of the server.
            silent = 0.0 if line.last_heard > heard else silent + self._ping_interval
            if silent > self._timeout:
                silence = f"{self.address} has not answered for {self._timeout:g} s"
                self._break(ServerUnavailable(silence))
                return
            answers = self._unanswered.heard if self._kept else 0
            self.send(protocol.Ping(op=self.next_op(), heard=answers), _pong)
            self.flush()

    def _receive(self, events: list[protocol.Event]) -> None:
        if self._lost is not None or self._cut is not None:
            return
        try:
            call_together(partial(self._dispatch, events))
        except Exception as error:  # a fault of this module must not leave programs waiting
            self._lose(ServerUnavailable(f"the connection to {self.address} broke: {error!r}"))

    def _dispatch(self, events: list[protocol.Event]) -> None:
        for event in events:
            if isinstance(event, protocol.Welcome):
                self._model = event.model
                self._kept = event.kept
                self._welcome.set()
            elif isinstance(event, protocol.Failed) and event.op == 0:
                # This failure concerns the whole connection: nobody knows which operations were
                # lost with it.
                self._break(from_code(event.code, event.message, event.param))
                return
            else:
                self._unanswered.hear(event)
                chunk = isinstance(event, protocol.Chunk)
                sink = self._sinks.get(event.op) if chunk else self._sinks.pop(event.op, None)
                self._answered |= sink is not _pong
                if sink is not None:
                    sink(event)

    def _break(self, reason: RootlaceError) -> None:
        """Give up the line; a new line may be made."""
        passing = isinstance(reason, ServerUnavailable | Overloaded)
        if isinstance(reason, StateLost) or not passing:
            self._lose(reason)
        elif not self._kept:
            lost = "; what ran there is lost, since it keeps no programs (--state DIR)"
            self._lose(ServerUnavailable(f"{reason}{lost}") if self._started.is_set() else reason)
        elif self._cut is None:
            self._cut = reason
            self._over.set()

    async def _watch(self, line: Line) -> None:
        """End late runs whenever the server is silent."""
        while True:
            heard = line.last_heard
            await asyncio.sleep(RECONNECT_SECONDS)
            if line.last_heard == heard:
                self._end_late()

    def _end_late(self) -> None:
        """Fail the operations of runs whose timeout is over: a server that is away does not."""
        for op, sink in list(self._sinks.items()):
            late = getattr(sink, "late", None)
            if late is not None and (error := late()) is not None:
                _fail(self._sinks, op, error)

    def _lose(self, reason: RootlaceError) -> None:
        """Mark the connection lost, fail every waiting operation, and end the I/O thread."""
        if self._lost is None:
            self._lost = reason
        self._outbox.clear()
        for op in list(self._sinks):
            _fail(self._sinks, op, self._lost)
        call_in_loop(self._loop, self._goodbye.set)
        if self._model is None:
            self._started.set()


def _pong(_: protocol.Event) -> None:
    """Ignore the answer to a ping; the server is alive."""


def _fail(sinks: dict[int, Sink], op: int, reason: RootlaceError) -> None:
    """End `op` with `reason`, if its sink still waits."""
    sink = sinks.pop(op, None)
    if sink is not None:
        sink(protocol.Failed.of(op, reason))
