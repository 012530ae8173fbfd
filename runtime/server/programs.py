"""ZeroMQ connections of programs: frames to operations, events to frames."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.server.auth import Account, public_part, read_program_key
from rootlace.runtime.server.model_registry import ModelRegistry
from rootlace.runtime.server.program_peers import ProgramPeers
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.session import Session
from rootlace.runtime.server.session_log import attach
from rootlace.runtime.server.session_store import SessionStore
from rootlace.wire.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    RootlaceError,
    ServerUnavailable,
)
from rootlace.wire.protocol import PROTOCOL_VERSION, Event, Failed, Hello, Op, Welcome, encode
from rootlace.wire.sockets import MessageReader

# Program socket -----------------------------------------------------------------------------------


# Most frames for one client in ZeroMQ's queue. Further frames wait in the server's.
SEND_HWM = 1000


class ProgramSocket:
    """ROUTER socket. `on_message` gets each message's frames, the sender's identity first, and the
    sender's address ("" if unknown). `has_session` tells whether an identity has a session."""

    def __init__(
        self, on_message: Callable[[list[bytes], str], None], has_session: Callable[[bytes], bool]
    ) -> None:
        self._on_message = on_message
        self._has_session = has_session
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._reader: MessageReader | None = None
        self._peers: ProgramPeers | None = None

    def bind(self, config: GatewayConfig, secret: bytes | None = None) -> str:
        """Bind, and return the address that clients connect to (port 0 becomes a real port).

        With a `secret` key of CURVE (Z85), connections are encrypted, and the public key stands
        behind `#` in the address. Raises InvalidRequest where the address cannot be bound.
        """
        address = config.program_address
        socket = self._context.socket(zmq.ROUTER)
        if secret is not None:
            socket.curve_server = True
            socket.curve_secretkey = secret
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        socket.setsockopt(zmq.IPV6, "[" in address)
        # ZeroMQ cuts off larger messages; up to this size the client gets an error that says why.
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * config.max_message_bytes)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            raise InvalidRequest(f"cannot listen on {address}: {error}") from error
        self._socket = socket
        endpoint = socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        bound = endpoint.rstrip(b"\0").decode()
        if bound.startswith("tcp:"):
            port = int(bound.rpartition(":")[2])
            self._peers = ProgramPeers(socket, port, config, self._has_session)
        self._reader = MessageReader(socket, self._take, copy=False)
        return bound if secret is None else f"{bound}#{public_part(secret)}"

    def look(self, seconds: float) -> None:
        """Look after the connections; the last look was `seconds` ago."""
        if self._peers is not None:
            self._peers.look(seconds)

    def _take(self, frames: list[zmq.Frame]) -> None:
        address, descriptor = "", -1
        if self._peers is not None:
            with contextlib.suppress(zmq.ZMQError):  # a message without a body has none
                address = str(frames[-1].get("Peer-Address"))
                descriptor = int(frames[-1].get(zmq.SRCFD))
        self._on_message([frame.bytes for frame in frames], address)
        if self._peers is not None and descriptor >= 0:
            self._peers.heard(descriptor, frames[0].bytes)

    def send(self, identity: bytes, frame: bytes) -> zmq.ZMQError | None:
        """Send without waiting. Returns the error if the queue is full or the peer is gone."""
        assert self._socket is not None and self._reader is not None
        try:
            self._socket.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error
        finally:
            self._reader.look()
        return None

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()
        if self._reader is not None:
            self._reader.close()
        if self._socket is not None:
            self._socket.close()
        self._context.term()


# Server -------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

# A client that does not read is dropped once ZeroMQ's queue is full and this many bytes wait here.
MAX_BACKLOG_BYTES = 64 * 2**20
PING_SECONDS = 1.0
RETRY_SECONDS = 0.02
# Per-client time slice: one frame may hold a second of work, and other clients must not wait for
# all of it. Beyond this many waiting bytes a client is worked off at once, to bound memory.
SLICE_SECONDS = 0.005
MAX_WAITING_BYTES = 16 * 2**20

# A frame is decoded at once, so size is bounded: bytes of the first message, from an unknown peer,
# and operations per frame. Operations of a frame larger than LARGE_BYTES are decoded one by one,
# each in its turn.
MAX_HELLO_BYTES = 2**20
MAX_OPS = 2**18
LARGE_BYTES = 2**20

_ops = msgspec.msgpack.Decoder(list[Op])
_raw_ops = msgspec.msgpack.Decoder(list[msgspec.Raw])
_op = msgspec.msgpack.Decoder(Op)
_anything = msgspec.msgpack.Decoder()
NUMBER_BYTES = 9
"""Most bytes of a MessagePack number."""


class _Numbers(msgspec.Struct):
    """Fields read of an operation that cannot be decoded; the rest stays undecoded."""

    op: msgspec.Raw = msgspec.Raw()
    branch: msgspec.Raw = msgspec.Raw()


_numbers = msgspec.msgpack.Decoder(_Numbers)


class _Malformed(NamedTuple):
    """Operation that could not be decoded, with its number and branch as far as readable."""

    op: int
    branch: int | None
    error: RootlaceError


class Connection:
    """Connection of a peer that sent `Hello`.

    `waiting` holds operations that the session has not been given yet, `backlog` frames that could
    not be sent yet. `heard`: whether the peer sent something since the last watch. `silent`:
    seconds without a message from the peer. `spoke`: time of the last message to the peer.
    """

    def __init__(self, identity: bytes, now: float) -> None:
        self.identity = identity
        self.session: Session
        self.heard = True
        self.silent = 0.0
        self.spoke = now
        self.waiting: deque[Op | msgspec.Raw] = deque()
        self.waiting_bytes = 0
        self.scheduled = False
        self.backlog: deque[bytes] = deque()
        self.backlog_bytes = 0


class ProgramServer:
    """Server of programs: turns frames of a ROUTER socket into operations, and events into frames.

    A peer is dropped and its branches freed when a send finds it gone, or when it does not read. A
    peer that is silent for `client_timeout` is dropped, too.
    """

    def __init__(
        self, server: ServedModel | ModelRegistry, store: SessionStore | None = None
    ) -> None:
        """Programs choose a model of a `ModelRegistry` by `Hello`. `store` keeps sessions."""
        self._server = server
        self._store = store
        self._config = server.config
        self._greeting: dict[bytes, asyncio.Task[None]] = {}
        self._connections: dict[bytes, Connection] = {}
        self._socket = ProgramSocket(
            self._receive, lambda peer: peer in self._connections or peer in self._greeting
        )
        self._behind: set[Connection] = set()
        self._someone_behind = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.address = ""

    @property
    def busy(self) -> bool:
        """Return whether a program runs or waits for an answer."""
        return any(connection.session.busy for connection in self._connections.values())

    def start(self) -> str:
        """Bind, and return the address that clients connect to (port 0 becomes a real port).

        Raises InvalidRequest where the address cannot be bound, or for a wrong `program_key`.
        """
        config = self._config
        secret = read_program_key(config.program_key) if config.program_key else None
        self.address = self._socket.bind(config, secret)
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._retry())]
        return self.address

    async def stop(self) -> None:
        """Close every connection and the socket."""
        tasks = [*self._tasks, *self._greeting.values()]
        for task in tasks:
            task.cancel()
        for task in tasks:
            try:
                await task
            except asyncio.CancelledError:
                pass
            except Exception:
                log.exception("a task of the server had failed")
        for connection in list(self._connections.values()):
            _attempt(partial(self._drop, connection, "the server stops"))
        self._socket.close()

    # ------------------------------------------------------------ receiving

    def _receive(self, frames: list[bytes], address: str) -> None:
        try:
            self._take(frames, address)
        except Exception:
            log.exception("a message could not be handled")

    def _take(self, frames: list[bytes], address: str) -> None:
        identity, *body = frames
        connection = self._connections.get(identity)
        if connection is not None:
            connection.heard = True
        try:
            if len(body) != 1:
                raise ProtocolError(f"a message is one frame, not {len(body)}")
            if len(body[0]) > self._config.max_message_bytes:
                raise InvalidRequest(
                    f"the message has {len(body[0])} bytes; "
                    f"at most {self._config.max_message_bytes} are allowed"
                )
            if connection is None:
                self._greet(identity, body[0], address)
            else:
                self._operate(connection, body[0])
        except RootlaceError as error:
            self._answer(identity, [Failed.of(0, error)])

    def _greet(self, identity: bytes, frame: bytes, address: str) -> None:
        """Handle the first message of a peer. Raises the error of a failed handshake. Without a
        key, the peer shares a client's turns with all peers of its address."""
        ops: list[Op] = []
        if len(frame) > MAX_HELLO_BYTES:
            limit = MAX_HELLO_BYTES >> 10
            raise ProtocolError(f"the first message is exactly one hello of at most {limit} KiB")
        try:
            if _count(frame) == 1:
                ops = _ops.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the first message must be a hello: {error}") from error
        if len(ops) != 1 or not isinstance(ops[0], Hello):
            raise ProtocolError(
                "the first message of a connection must be exactly one hello (a connection is no "
                f"more when it was silent for {self._config.client_timeout:g} s)"
            )
        hello = ops[0]
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the client speaks protocol version {hello.version}, "
                f"this server version {PROTOCOL_VERSION}"
            )
        account = self._server.keys.check(hello.api_key)
        if self._server.drain.begun:
            raise self._server.drain.refusal()
        if identity in self._greeting:
            return
        # Peers that wait for their model count: they will be connected.
        connected = len(self._connections) + len(self._greeting)
        if connected >= (limit := self._config.max_connections):
            raise Overloaded(f"at most {limit} clients may be connected")
        model = self._server.loaded(hello.model)
        if model is not None:
            self._welcome(identity, hello, account, model, address)
        else:
            task = asyncio.create_task(self._load_and_welcome(identity, hello, account, address))
            self._greeting[identity] = task
            task.add_done_callback(lambda _: self._greeting.pop(identity, None))

    async def _load_and_welcome(
        self, identity: bytes, hello: Hello, account: Account | None, address: str
    ) -> None:
        try:
            model = await self._server.load(hello.model)
            self._welcome(identity, hello, account, model, address)
        except Exception as error:
            known = error if isinstance(error, RootlaceError) else InternalError.of(error)
            self._answer(identity, [Failed.of(0, known)])

    def _welcome(
        self,
        identity: bytes,
        hello: Hello,
        account: Account | None,
        model: ServedModel,
        address: str,
    ) -> None:
        owner = "" if account is None else account.name
        for other in list(self._connections.values()):
            earlier = other.session.log
            if earlier is not None and earlier.is_of(hello.session, owner):
                self._drop(other, "its client came back")
        info = model.model_info
        served = f"{info.name} ({Path(info.path).name}, {info.vocab_size} tokens)"
        log = attach(self._store, hello, owner, served)
        connection = Connection(identity, time.monotonic())
        client = hello.client if account is None else f"{account.name}:{hello.client}"
        deliver = partial(self._deliver, connection)
        connection.session = Session(model, deliver, client, account, address, log)
        self._connections[identity] = connection
        shown = info
        if account is not None:  # the path names the model of a saved state's token ids
            digest = hashlib.blake2b(info.path.encode(), digest_size=8).hexdigest()
            shown = msgspec.structs.replace(info, path=f"{info.name}#{digest}")
        welcome = Welcome(0, PROTOCOL_VERSION, shown, kept=log is not None)
        self._deliver(connection, [welcome])

    def _operate(self, connection: Connection, frame: bytes) -> None:
        """Queue the operations of a frame. A malformed operation fails alone."""
        if (count := _count(frame)) > MAX_OPS:
            raise InvalidRequest(
                f"the message has {count} operations; at most {MAX_OPS} are allowed"
            )
        if len(frame) > LARGE_BYTES:
            connection.waiting.extend(_split(frame))
        else:
            try:
                connection.waiting.extend(_ops.decode(frame))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                connection.waiting.extend(_split(frame))
        connection.waiting_bytes += len(frame)
        if not connection.scheduled or connection.waiting_bytes > MAX_WAITING_BYTES:
            self._work(connection)

    def _work(self, connection: Connection) -> None:
        """Hand waiting operations to the session, for one time slice."""
        waiting, session = connection.waiting, connection.session
        may_wait = connection.waiting_bytes <= MAX_WAITING_BYTES
        connection.scheduled = False
        end = time.monotonic() + SLICE_SECONDS
        while waiting:
            taken = waiting.popleft()
            op = _decode(taken) if isinstance(taken, msgspec.Raw) else taken
            try:
                if isinstance(op, _Malformed):
                    session.reject(*op)
                else:
                    session.handle([op])
            except Exception:
                log.exception("an operation could not be handled")
            if session.closed:
                self._forget(connection)
            elif waiting and may_wait and time.monotonic() >= end:
                connection.scheduled = True
                asyncio.get_running_loop().call_soon(self._work, connection)
                return
        connection.waiting_bytes = 0

    # ------------------------------------------------------------ sending

    def _deliver(self, connection: Connection, events: list[Event]) -> None:
        self._send(connection, encode(events))

    def _send(self, connection: Connection, frame: bytes) -> None:
        if not connection.backlog and self._try(connection, frame):
            return
        if connection.identity not in self._connections:
            return
        connection.backlog.append(frame)
        connection.backlog_bytes += len(frame)
        self._behind.add(connection)
        self._someone_behind.set()
        if connection.backlog_bytes > MAX_BACKLOG_BYTES:
            self._drop(connection, f"{connection.backlog_bytes} bytes wait to be read")

    def _try(self, connection: Connection, frame: bytes) -> bool:
        """Send without waiting; return False if the peer's queue is full or the peer is gone."""
        error = self._socket.send(connection.identity, frame)
        if error is None:
            connection.spoke = time.monotonic()
            return True
        if error.errno != errno.EAGAIN:
            self._drop(connection, str(error))
        return False

    def _answer(self, identity: bytes, events: list[Event]) -> None:
        """Send events to a peer. An unknown peer that does not read loses them."""
        connection = self._connections.get(identity)
        if connection is not None:
            self._deliver(connection, events)
        else:
            self._socket.send(identity, encode(events))

    async def _retry(self) -> None:
        """Send the backlog of slow clients; an idle server does not wake up for this task."""

        def catch_up(connection: Connection) -> None:
            while connection.backlog and self._try(connection, connection.backlog[0]):
                connection.backlog_bytes -= len(connection.backlog.popleft())
            if not connection.backlog:
                self._behind.discard(connection)

        while True:
            await self._someone_behind.wait()
            await asyncio.sleep(RETRY_SECONDS)
            for connection in list(self._behind):
                if not _attempt(partial(catch_up, connection)):
                    _attempt(partial(self._drop, connection, "nothing can be sent to it"))
            if not self._behind:
                self._someone_behind.clear()

    # ------------------------------------------------------------ life and death

    async def _watch(self) -> None:
        """Drop silent clients once a second, and send the waiting ones an empty message.

        The message shows the client that the server lives, and its sending fails if the client is
        gone. Silence is counted in naps: while this process pauses, no client counts as silent.
        """

        def ping(connection: Connection) -> None:
            connection.silent = 0.0 if connection.heard else connection.silent + PING_SECONDS
            connection.heard = False
            if connection.silent > self._config.client_timeout:
                self._tell_and_drop(connection, f"silent for {connection.silent:.0f} s")
            elif connection.session.busy and time.monotonic() - connection.spoke >= PING_SECONDS:
                self._send(connection, encode([]))

        while True:
            await asyncio.sleep(PING_SECONDS)
            _attempt(partial(self._socket.look, PING_SECONDS))
            if self._store is not None:
                _attempt(self._store.forget_old)
            for connection in list(self._connections.values()):
                _attempt(partial(ping, connection))

    def _tell_and_drop(self, connection: Connection, reason: str) -> None:
        """Drop a client, and tell the client unless its queue is full."""
        error = ServerUnavailable(f"the server dropped this connection: {reason}")
        last: list[Event] = [Failed.of(0, error)]
        self._socket.send(connection.identity, encode(last))
        self._drop(connection, reason)

    def _drop(self, connection: Connection, reason: str) -> None:
        if connection.identity in self._connections:
            log.info("client %s dropped: %s", connection.session.client or "?", reason)
        self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection.identity, None)
        self._behind.discard(connection)
        connection.backlog.clear()
        connection.waiting.clear()
        connection.session.close()


def _attempt(act: Callable[[], object]) -> bool:
    """Call `act`; log its exception, since later calls must run all the same. Returns success."""
    try:
        act()
    except Exception:
        log.exception("the server could not look after its clients")
        return False
    return True


def _count(frame: bytes) -> int:
    """Read from a frame's header how many elements its list has; 0 if the frame is no list."""
    kind = frame[:1]
    if b"\x90" <= kind <= b"\x9f":
        return kind[0] & 0x0F
    return int.from_bytes(frame[1 : {b"\xdc": 3, b"\xdd": 5}.get(kind, 1)])


def _split(frame: bytes) -> list[msgspec.Raw]:
    """Split a frame that is large or has a malformed operation into undecoded operations.

    Raises ProtocolError for a frame that is not a list.
    """
    try:
        return _raw_ops.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"not a list of operations: {error}") from error


def _decode(raw: msgspec.Raw) -> Op | _Malformed:
    try:
        return _op.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        number, branch = _identify(raw)
        return _Malformed(number, branch, _as_typed(error, number))


def _identify(raw: msgspec.Raw) -> tuple[int, int | None]:
    """Read number and branch of an operation that could not be decoded, as far as possible."""
    try:
        found = _numbers.decode(raw)
        return _number(found.op) or 0, _number(found.branch)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0, None


def _number(raw: msgspec.Raw) -> int | None:
    if not 0 < memoryview(raw).nbytes <= NUMBER_BYTES:
        return None
    value = _anything.decode(raw)
    return value if type(value) is int else None  # true is an int, too


def _as_typed(error: Exception, number: int) -> RootlaceError:
    if number > 0 and isinstance(error, msgspec.ValidationError):
        return InvalidRequest(str(error))
    return ProtocolError(f"not an operation: {error}")
