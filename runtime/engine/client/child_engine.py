"""An engine as a child process of this one, and the pipes to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

from rootlace.runtime import processes
from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.block_store import TransferConfig
from rootlace.runtime.contracts.messages import (
    FromEngine,
    Ready,
    Stop,
    ToEngine,
    decode_from_engine,
    encode,
    read_step_record,
)
from rootlace.runtime.engine.client.siblings import ReplicaContext
from rootlace.wire.errors import ServerUnavailable, from_code
from rootlace.wire.sockets import MessageReader

# Pipes --------------------------------------------------------------------------------------------
#
# One end of the two pipes between a gateway and an engine process.


log = logging.getLogger(__name__)

RETRY_SECONDS = 0.001


class Pipes:
    """Sends messages and hears those that come, on the event loop that it was made on: the
    gateway's end, of `ToEngine` and `FromEngine`, unless another `decode` is given.

    All messages of one turn of the event loop leave as one frame.
    """

    def __init__(
        self,
        push: zmq.Socket[bytes],
        pull: zmq.Socket[bytes],
        on_message: Callable[[Any], None],
        decode: Callable[[bytes], Iterable[Any]] = decode_from_engine,
    ) -> None:
        """Of two sockets, which it closes. What `on_message` raises is logged."""
        self._push, self._pull = push, pull
        self._on_message = on_message
        self._decode = decode
        self._reader = MessageReader(self._pull, self._take)
        self._outgoing: list[Any] = []
        self._flush_scheduled = False
        self._closed = False

    @classmethod
    def bind(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        to_engine: str,
        from_engine: str,
        on_message: Callable[[Any], None],
    ) -> Self:
        """At two addresses of this machine."""
        push, pull = new_sockets(context)
        push.bind(to_engine)
        pull.bind(from_engine)
        return cls(push, pull, on_message)

    def send(self, message: Any) -> None:
        """Queue a message. Does nothing once closed."""
        self._outgoing.append(message)
        if not self._flush_scheduled and not self._closed:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def send_now(self, message: Any) -> None:
        """Send a message ahead of those queued; it is lost if the engine's end is not there."""
        with contextlib.suppress(zmq.ZMQError):
            self._push.send(encode([message]), zmq.NOBLOCK)

    def close(self) -> None:
        """Idempotent. What is queued is lost."""
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        self._push.close()
        self._pull.close()

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._closed:
            return
        try:
            # Without a high-water mark this fails only while the engine's end is not there yet.
            self._push.send(encode(self._outgoing), zmq.NOBLOCK)
        except zmq.Again:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush)
            return
        self._outgoing = []

    def _take(self, frames: list[bytes]) -> None:
        for message in self._decode(frames[0]):
            try:
                self._on_message(message)
            except Exception:
                log.exception("handling %s failed", type(message).__name__)


def new_sockets(
    context: zmq.Context[zmq.Socket[bytes]],
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """One to push with, and one to pull with."""
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for socket in (push, pull):
        # Nothing is dropped between the two: admission bounds what can be under way.
        socket.set_hwm(0)
        socket.linger = 0
    return push, pull


# Child engine -------------------------------------------------------------------------------------


STOP_GRACE_SECONDS = 5.0


class EngineProcessConfig(msgspec.Struct, frozen=True):
    """What the engine process reads from its standard input."""

    engine: EngineConfig
    inbox: str
    outbox: str
    socket_folder: str
    record: str
    """Where it writes which requests are in its steps (`StepRecord`)."""
    replica: int = 0
    replicas: int = 1
    """Its number among the engines of this machine, and how many there are."""
    digest_key: str = ""
    """Of the digests that it tells of its cache, hexadecimal; it tells nothing without."""
    transfer: TransferConfig | None = None
    """How it hands blocks over, if it does: a file descriptor in it is inherited."""


class Children:
    """Where a client's engines are child processes, one after another: a `Place`."""

    patient = False

    def __init__(
        self,
        config: EngineConfig,
        siblings: ReplicaContext | None = None,
        digest_key: bytes = b"",
        transfer: TransferConfig | None = None,
    ) -> None:
        """`digest_key` and `transfer`: of one without siblings here that has some elsewhere."""
        self._folder = processes.SocketFolder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._opened = 0
        self._config = EngineProcessConfig(
            *(config, "", "", str(self._folder.path), ""),
            digest_key=digest_key.hex(),
            transfer=transfer,
        )
        if siblings is not None:
            self._config = msgspec.structs.replace(
                self._config,
                replica=siblings.replica,
                replicas=siblings.replicas,
                digest_key=siblings.digest_key.hex(),
                transfer=siblings.transfer,
            )

    def open(self, hear: Callable[[FromEngine], None]) -> ChildEngine:
        """One that is to be started; `hear` gets what it says, but for `Ready`."""
        generation, self._opened = self._opened, self._opened + 1
        config = msgspec.structs.replace(
            self._config,
            inbox=self._folder.address(f"to-engine-{generation}"),
            outbox=self._folder.address(f"from-engine-{generation}"),
            record=str(self._folder.path / f"steps-{generation}"),
        )
        return ChildEngine(config, self._context, hear)

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._folder.remove()


class ChildEngine:
    """One process: a `PlacedEngine`. Belongs to the event loop that it was made on."""

    def __init__(
        self,
        config: EngineProcessConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        hear: Callable[[FromEngine], None],
    ) -> None:
        self._config = config
        self._hear = hear
        self._process: Process | None = None
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._pipes = Pipes.bind(context, config.inbox, config.outbox, self._take)

    def send(self, message: ToEngine) -> None:
        """Queue a message, also for one that is starting."""
        self._pipes.send(message)

    async def ready(self) -> Ready:
        """Start it and wait until its model is loaded. Raises the typed error that it gave, or
        DiedAtStart where it gave none."""
        transfer = self._config.transfer
        # A session of its own: the terminal's Ctrl-C reaches the gateway, which stops the engine.
        process = self._process = await asyncio.create_subprocess_exec(
            *processes.child_command("rootlace.runtime.engine"),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
            pass_fds=() if transfer is None or transfer.memory < 0 else (transfer.memory,),
            env=processes.compute_environment(),
        )
        assert process.stdin is not None
        process.stdin.write(processes.write_config(self._config))
        await process.stdin.drain()
        ended = asyncio.ensure_future(_output_of(process))
        try:
            either: set[asyncio.Future[Any]] = {self._ready, ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                return self._ready.result()
            raise _reason(ended.result(), process.returncode)
        finally:
            if ended.done():
                ended.cancel()

    async def ended(self) -> int:
        """Its exit status, once there is one."""
        assert self._process is not None
        return await self._process.wait()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def in_step(self) -> dict[int, int]:
        """Who was in the steps in which it ended, and how long they were to become."""
        return read_step_record(Path(self._config.record))

    async def end(self, patience: float = 0.0) -> None:
        """Ask the process to end, give it `patience`, and kill one that does not."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._pipes.send_now(Stop())
        # It reads its standard input's end as its parent's, and ends at once.
        if patience:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience + STOP_GRACE_SECONDS)
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # it may end at this very moment
                process.kill()
            await process.wait()

    def close(self) -> None:
        """Close the pipes to it."""
        self._pipes.close()

    def _take(self, message: FromEngine) -> None:
        if not isinstance(message, Ready):
            self._hear(message)
        elif not self._ready.done():
            self._ready.set_result(message)


class DiedAtStart(ServerUnavailable):
    """The engine's process ended without saying why, before it was ready."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"the engine ended with code {code} before it was ready")
        self.code_of_process = code


async def _output_of(process: Process) -> bytes:
    """All of the child's standard output; complete once the child has ended."""
    assert process.stdout is not None
    data = await process.stdout.read()
    await process.wait()
    return data


def _reason(output: bytes, code: int | None) -> Exception:
    """The typed error an engine that could not start printed as its last line."""
    try:
        said = msgspec.json.decode(output.splitlines()[-1], type=dict[str, str])
        return from_code(said["error"], said["message"])
    except (IndexError, KeyError, msgspec.DecodeError):
        return DiedAtStart(code)
