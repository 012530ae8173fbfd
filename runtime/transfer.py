"""Ways of blocks from one engine to another (`contracts.block_store.Transfer`).

`SharedMemory` is for engines of one machine. `Tcp` sends blocks over TCP, encrypted (CURVE),
straight from giver to taker. With `Nixl` takers read the giver's memory by whatever UCX finds
between two machines (RDMA, shared memory, TCP); nothing is encrypted: the network has to be
trusted.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from rootlace.runtime.contracts.block_store import BlockLost
from rootlace.wire import sockets
from rootlace.wire.errors import InvalidRequest


class SharedMemory:
    """See `Transfer`: one block lies behind the other."""

    address = b""

    def __init__(self, memory: int, block_bytes: int) -> None:
        """`memory`: a file descriptor, which stays the caller's."""
        self._memory = memory
        self._block_bytes = block_bytes

    def put(self, slot: int, block: np.ndarray) -> None:
        if os.pwrite(self._memory, block.data, slot * self._block_bytes) < self._block_bytes:
            raise OSError("there is no room for a block")

    def expect(self, source: bytes, slots: Sequence[int]) -> None:
        """Do nothing: all blocks are on this machine."""

    def take(self, source: bytes, slot: int, into: np.ndarray) -> None:
        count = os.preadv(self._memory, [into.data], slot * self._block_bytes)
        into[count:] = 0  # the memory grows as it is written

    def close(self) -> None:
        """Do nothing: the memory is gone with its last process."""


PIECE_BYTES = 256 << 10
"""A block travels in pieces: the next one is encrypted while the one before is decrypted."""
MOST_REPLIES = 16
"""Blocks queued at the giver for a taker that does not read; the taker gets no more."""
TAKE_SECONDS = 2.0
"""Seconds without data from a giver, or for one block, after which the giver is lost."""
LOST_SECONDS = 5.0
"""Seconds after which a lost giver is asked again."""
MOST_GIVERS = 64
_CLOSED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Tcp:
    """See `Transfer`. What is given lies in this engine's memory, which grows as it is used; a
    thread sends what takers ask for. `address` is where it listens, and its public key."""

    def __init__(
        self, host: str, block_bytes: int, num_slots: int, patience: float = TAKE_SECONDS
    ) -> None:
        """`host`: the interface that others reach. `patience`, in seconds: with each block. Raises
        OSError where it cannot listen."""
        self._slots = np.zeros((num_slots, block_bytes), np.uint8)
        self._patience = patience
        self._giving, self._taking = zmq.Context(), zmq.Context()
        self._givers: dict[bytes, _Giver] = {}
        self._lost: dict[bytes, float] = {}
        """Times until which lost givers are not asked."""
        self._lock = threading.Lock()
        public, secret = zmq.curve_keypair()
        socket = self._giving.socket(zmq.ROUTER)
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, 1024)  # a handshake needs some hundreds
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.sndhwm = MOST_REPLIES
        try:
            self.address = msgspec.msgpack.encode((sockets.bind(socket, host, secret), public))
        except zmq.ZMQError as error:
            self._giving.destroy(linger=0)
            raise OSError(f"{host}: {error}") from error
        threading.Thread(
            target=_give, args=(socket, self._slots), name="block-give", daemon=True
        ).start()

    def put(self, slot: int, block: np.ndarray) -> None:
        self._slots[slot] = block

    def expect(self, source: bytes, slots: Sequence[int]) -> None:
        with self._lock:
            if time.monotonic() >= self._lost.get(source, 0.0):
                with contextlib.suppress(zmq.ZMQError):  # `take` says so
                    self._giver(source).ask(slots)

    def take(self, source: bytes, slot: int, into: np.ndarray) -> None:
        with self._lock:
            if time.monotonic() < self._lost.get(source, 0.0):
                raise BlockLost("its giver was lost a moment ago")
            try:
                self._giver(source).take(slot, into, self._patience)
            except (BlockLost, ValueError, zmq.ZMQError) as error:
                self._drop(source)
                if len(self._lost) >= MOST_GIVERS:
                    self._lost.clear()
                self._lost[source] = time.monotonic() + LOST_SECONDS
                raise BlockLost(str(error)) from error

    def close(self) -> None:
        with self._lock:
            for source in list(self._givers):
                self._drop(source)
            self._taking.destroy(linger=0)
        self._giving.term()  # the thread closes its socket

    def _drop(self, source: bytes) -> None:
        if (giver := self._givers.pop(source, None)) is not None:
            giver.close()

    def _giver(self, source: bytes) -> _Giver:
        giver = self._givers.pop(source, None) or _Giver(self._taking, source)
        if len(self._givers) >= MOST_GIVERS:  # the one that was asked longest ago
            self._drop(next(iter(self._givers)))
        self._givers[source] = giver
        return giver


def _give(socket: zmq.Socket[bytes], slots: np.ndarray) -> None:
    """Send the content of each slot asked for. No taker waits for a slow reader, which loses blocks
    beyond those it reads."""
    with socket:
        while True:
            try:
                who, question = socket.recv_multipart()
                slot = int.from_bytes(question, "little")
                block = slots[slot].data if slot < len(slots) else b""
                pieces = [block[at : at + PIECE_BYTES] for at in range(0, len(block), PIECE_BYTES)]
                socket.send_multipart([who, question, *pieces], zmq.NOBLOCK)
            except zmq.ContextTerminated:
                return
            except (ValueError, zmq.ZMQError):  # no question of ours; or it is gone, or full
                continue


class _Giver:
    """Connection to one giver: questions, and blocks in the order of the questions."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: bytes) -> None:
        address, public_key = msgspec.msgpack.decode(source, type=tuple[str, bytes])
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._closed = self._socket.get_monitor_socket(_CLOSED)
        self._pending: list[int] = []
        sockets.connect(self._socket, address, public_key)

    def ask(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot not in self._pending:
                self._socket.send(slot.to_bytes(4, "little"), zmq.NOBLOCK)
                self._pending.append(slot)

    def take(self, slot: int, into: np.ndarray, patience: float) -> None:
        """Raises `BlockLost`; ValueError where it sends what nobody asked for."""
        self.ask([slot])
        end, received, at = time.monotonic() + patience, -1, 0
        while received != slot:  # other slots are no longer wanted
            head, *pieces = self._next(end)
            received = int.from_bytes(head.bytes, "little")
            self._pending.remove(received)
        for piece in pieces:
            content = np.frombuffer(piece.buffer, np.uint8)[: len(into) - at]
            into[at : at + len(content)] = content
            at += len(content)
        if at < len(into):
            raise BlockLost(f"{at} bytes came instead of {len(into)}")

    def _next(self, end: float) -> list[zmq.Frame]:
        """Return the next slot that comes, and the pieces of its block."""
        while not self._socket.poll(0):
            left = end - time.monotonic()
            ready = zmq.select([self._socket, self._closed], [], [], max(left, 0.0))[0]
            if not ready:
                raise BlockLost("its giver says nothing")
            if self._socket not in ready:
                raise BlockLost("its giver is gone")
        return self._socket.recv_multipart(copy=False)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._closed.close()
        self._socket.close()


_NAP_SECONDS = 20e-6


class Nixl:
    """See `Transfer`. `address` is the agent's name, where its slots begin, and its metadata."""

    def __init__(self, block_bytes: int, num_slots: int, patience: float = TAKE_SECONDS) -> None:
        """`patience`, in seconds: with each block. Raises `InvalidRequest` where NIXL is not
        installed, has no UCX, or cannot be started."""
        try:
            api = importlib.import_module("nixl._api")
        except ImportError as error:
            raise InvalidRequest(f"--disaggregate-by nixl: {error}") from error
        # It logs to the standard output, which has a meaning here.
        logger = logging.getLogger("nixl")
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.WARNING)
        name = secrets.token_hex(16)
        self._patience = patience
        self._slots = np.zeros((num_slots, block_bytes), np.uint8)
        # One buffer is enough, though an abandoned read may still write to it: an accepted block
        # has the offered checksum, otherwise it is computed.
        self._landing = np.zeros(block_bytes, np.uint8)
        self._givers: dict[bytes, str] = {}
        """Names of the known agents, the last read from at the end."""
        self._lost: dict[bytes, float] = {}
        """Times until which lost agents are not read from."""
        self._ended: list[Any] = []
        """Handles of reads that NIXL has not let go of."""
        try:
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
            if "UCX" not in self._agent.backends:
                raise InvalidRequest("--disaggregate-by nixl: it was built without UCX")
            self._registered = [self._register(self._slots), self._register(self._landing)]
            metadata = self._agent.get_agent_metadata()
        except InvalidRequest:
            raise
        except Exception as error:  # NIXL's own have no base but this one
            raise InvalidRequest(f"--disaggregate-by nixl: {error!r}") from error
        self.address = msgspec.msgpack.encode((name, self._slots.ctypes.data, metadata))

    def put(self, slot: int, block: np.ndarray) -> None:
        self._slots[slot] = block

    def expect(self, source: bytes, slots: Sequence[int]) -> None:
        """Do nothing: a read is quick, and asks no giver."""

    def take(self, source: bytes, slot: int, into: np.ndarray) -> None:
        if time.monotonic() < self._lost.get(source, 0.0):
            raise BlockLost("its giver was lost a moment ago")
        if source == self.address:
            into[:] = self._slots[slot]
            return
        try:
            self._read(source, slot)
        except Exception as error:  # as above
            if len(self._lost) >= MOST_GIVERS:
                self._lost.clear()
            self._lost[source] = time.monotonic() + LOST_SECONDS
            self._drop(source)
            raise BlockLost(f"{type(error).__name__}: {error}") from error
        into[:] = self._landing

    def close(self) -> None:
        for source in list(self._givers):
            self._drop(source)
        for one in self._registered:
            self._agent.deregister_memory(one)

    def _read(self, source: bytes, slot: int) -> None:
        """Into the landing; raises whatever NIXL does."""
        name, start, metadata = msgspec.msgpack.decode(source, type=tuple[str, int, bytes])
        if source not in self._givers:
            if len(self._givers) >= MOST_GIVERS:
                self._drop(next(iter(self._givers)))
            self._agent.add_remote_agent(metadata)
        self._givers.pop(source, None)
        self._givers[source] = name
        size = len(self._landing)
        near = self._agent.get_xfer_descs([(self._landing.ctypes.data, size, 0)], "DRAM")
        far = self._agent.get_xfer_descs([(start + slot * size, size, 0)], "DRAM")
        handle = self._agent.initialize_xfer("READ", near, far, name)
        try:
            state, end = self._agent.transfer(handle), time.monotonic() + self._patience
            while state == "PROC":
                if time.monotonic() > end:
                    raise BlockLost("its giver says nothing")
                time.sleep(_NAP_SECONDS)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise BlockLost("it could not be read")
        finally:
            self._ended.append(handle)
            self._release()

    def _release(self) -> None:
        """Release finished reads. A read that was given up and still runs cannot be released."""
        ended, self._ended = self._ended, []
        for handle in ended:
            try:
                self._agent.release_xfer_handle(handle)
            except Exception:  # as above
                self._ended.append(handle)

    def _drop(self, source: bytes) -> None:
        """End the connection to a giver: it may be gone, and others come."""
        if (name := self._givers.pop(source, None)) is not None:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(name)

    def _register(self, memory: np.ndarray) -> Any:
        return self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
