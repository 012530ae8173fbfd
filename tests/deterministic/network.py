"""ZeroMQ's sockets, as far as the product uses them, on a simulated network with seeded delays,
cuts of frames, and lines that break.

A line carries its frames in order; frames of different lines overtake each other. The simulation
promises what ZeroMQ does: a descriptor signals a change once; a ROUTER drops no message to a
present peer and refuses messages to an absent one; the messages of a frame stay together.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from rootlace.wire.protocol import Op
from tests.deterministic.clock import VirtualLoop
from tests.deterministic.shared import Memory, SlowStore

_raws = msgspec.msgpack.Decoder(list[msgspec.Raw])
_op = msgspec.msgpack.Decoder(Op)
_encode = msgspec.msgpack.Encoder().encode


class Line:
    """Line between two sockets. `delay`: range of seconds that a frame takes."""

    def __init__(self, network: Network, near: Socket, far: Socket, identity: bytes) -> None:
        self.network = network
        self.ends = (near, far)
        self.identity = identity
        self.delay = (2e-5, 2e-4) if near.local else (1e-4, 3e-3)
        self.up = True
        self.dark = False
        """Whether frames vanish without a notice, as after a power loss of the peer or with a cut
        cable."""
        self._free = [0.0, 0.0]
        """When the last frame arrives that was sent from either end."""

    def send(self, sender: Socket, frame: bytes, later: float = 0.0) -> None:
        side = 0 if sender is self.ends[0] else 1
        network = self.network
        if not self.up or self.dark:
            return
        for part in network.cut(sender, frame):
            now = network.loop.now
            at = now + later + network.dice.uniform(*self.delay)
            at = max(self._free[side] + 1e-7, at)  # timers of the same time have no order
            self._free[side] = at
            network.loop.call_at(at, self._arrive, self.ends[1 - side], part)

    def _arrive(self, target: Socket, frame: bytes) -> None:
        if not self.up or self.dark:
            return
        if target.kind == zmq.ROUTER:
            network, sender = self.network, self.ends[0]
            network.arrived.setdefault(sender._descriptor, []).append((network.loop.now, frame))
            target.deliver([self.identity, frame])
        else:
            target.deliver([frame])

    def cut(self) -> None:
        """Cut the line: both ends notice (of a dark line only the closing one); frames under way
        are lost."""
        if self.up:
            self.up = False
            for socket in self.ends:
                if not self.dark or socket.closed:
                    socket.lose(self)


class Network:
    """All sockets of a world. `split`: probability that a frame of a program's line is cut in two,
    between its messages."""

    def __init__(self, loop: VirtualLoop, dice: random.Random, split: float) -> None:
        self.loop = loop
        self.dice = dice
        self.split = split
        self.bound: dict[str, Socket] = {}
        self.frames = 0
        self.memories: dict[bytes, Memory] = {b"": {}}
        self.disks: dict[int, SlowStore] = {}
        """Transferred blocks of engines, by the engine whose memory holds them."""
        self.tap: Callable[[Socket, bytes], None] = lambda socket, frame: None
        """Function that sees each frame of a ROUTER, with the target socket."""
        self.arrived: dict[int, list[tuple[float, bytes]]] = {}
        """Arrival times of frames at ROUTERs, by the sender's descriptor."""
        self.monitored: dict[str, Socket] = {}
        """Monitored sockets by the address of their events."""
        self._next = 0

    def descriptor(self) -> int:
        self._next += 1
        return self._next

    def arrival(self, descriptor: int, op: int) -> float:
        """Return the time when a ROUTER got this operation of a sender."""
        return next(
            at
            for at, frame in self.arrived[descriptor]
            if any(_op.decode(raw).op == op for raw in _raws.decode(frame))
        )

    def cut(self, sender: Socket, frame: bytes) -> list[bytes]:
        self.frames += 1
        if sender.local or self.split == 0.0 or self.dice.random() >= self.split:
            return [frame]
        messages = _raws.decode(frame)
        # A connection's first frame is its hello alone, and an empty frame is a heartbeat.
        if len(messages) < 2:
            return [frame]
        at = self.dice.randrange(1, len(messages))
        return [_encode(messages[:at]), _encode(messages[at:])]

    def context(self) -> type:
        """Return the stand-in for `zmq.Context`."""
        network = self

        class Context:
            def __init__(self) -> None:
                self._sockets: list[Socket] = []

            def socket(self, kind: int) -> Socket:
                socket = Socket(network, kind)
                socket.context = self
                self._sockets.append(socket)
                return socket

            def term(self) -> None:
                assert all(socket.closed for socket in self._sockets), "a socket is still open"

            def destroy(self, linger: int = 0) -> None:
                for socket in self._sockets:
                    socket.close()

        return Context


class Socket:
    """A PUSH, PULL, DEALER or ROUTER, or the monitor of one."""

    def __init__(self, network: Network, kind: int) -> None:
        self.network = network
        self.kind = kind
        self.local = kind in (zmq.PUSH, zmq.PULL)
        self.lines: dict[bytes, Line] = {}
        self.closed = False
        self.context: Any = None
        self.on_message: Callable[[], None] = lambda: None
        """Callback for new frames, for readers without an event loop."""
        self.later = 0.0
        """Seconds from now at which sent frames leave: the sender works ahead of the clock."""
        self.blocked = False
        """The peer reads nothing, and its queue is full (ROUTER: see `send_multipart`)."""
        self._options: dict[int, Any] = {}
        self._descriptor = network.descriptor()
        self._inbox: deque[list[bytes]] = deque()
        self._monitor: Socket | None = None
        self._address = ""

    # ------------------------------------------------------------ what the product calls

    def setsockopt(self, option: int, value: Any) -> None:
        self._options[option] = value

    def set_hwm(self, value: int) -> None:
        assert value == 0

    def get(self, option: int) -> Any:
        if option == zmq.FD:
            return self._descriptor
        if option == zmq.EVENTS:
            return zmq.POLLIN if self._inbox else 0
        assert option == zmq.LAST_ENDPOINT
        return self._address.encode() + b"\0"

    def bind(self, address: str) -> None:
        self._address = address
        self.network.bound[address] = self

    def connect(self, address: str) -> None:
        if address in self.network.monitored:
            self.network.monitored[address]._monitor = self
            return
        far = self.network.bound.get(address)
        loop, delay = self.network.loop, self.network.dice.uniform(1e-4, 2e-3)
        if far is None or far.closed:
            loop.call_later(delay, self._tell_monitor, zmq.EVENT_CLOSED)
            return
        identity = self._descriptor.to_bytes(5, "big")
        line = Line(self.network, self, far, identity)
        self.lines[identity] = far.lines[identity] = line
        loop.call_later(delay, self._tell_monitor, zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def monitor(self, address: str, _: int) -> None:
        self.network.monitored[address] = self

    def get_monitor_socket(self, _: int) -> Socket:
        self._monitor = Socket(self.network, zmq.PAIR)
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor = None

    def send(self, frame: bytes, flags: int = 0) -> None:
        assert not self.closed
        line = next(iter(self.lines.values()), None)
        if line is None:
            raise zmq.Again
        line.send(self, frame, self.later)

    def send_multipart(self, frames: tuple[bytes, bytes], flags: int = 0) -> None:
        assert not self.closed and self.kind == zmq.ROUTER
        line = self.lines.get(frames[0])
        if line is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        peer = line.ends[0]
        if peer.blocked:
            raise zmq.Again
        self.network.tap(peer, frames[1])
        line.send(self, frames[1])

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[Any]:
        if not self._inbox:
            raise zmq.Again
        frames = self._inbox.popleft()
        return frames if copy else [zmq.Frame(frame) for frame in frames]

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._address:
            self.network.bound.pop(self._address, None)
        if self._monitor is not None:
            self._monitor.close()
        for line in list(self.lines.values()):
            # Messages sent before still arrive, because ZeroMQ lingers.
            at = max(*line._free, self.network.loop.now) + 1e-6
            self.network.loop.call_at(at, line.cut)

    # ------------------------------------------------------------ what the network calls

    def deliver(self, frames: list[bytes]) -> None:
        if not self.closed:
            self._inbox.append(frames)
            self.network.loop.signal(self._descriptor)
            self.on_message()

    def lose(self, line: Line) -> None:
        self.lines.pop(line.identity, None)
        if not self.closed:
            self._tell_monitor(zmq.EVENT_DISCONNECTED)

    def _tell_monitor(self, event: int) -> None:
        if self._monitor is not None and not self.closed:
            self._monitor.deliver([struct.pack("=hi", event, 0), self._address.encode()])
