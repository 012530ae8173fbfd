"""An engine as a child process of this one, and the pipes to it."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from rootlace.runtime import processes
from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.messages import FromEngine, Ready, Stop, ToEngine
from rootlace.runtime.contracts.step_record import read_step_record
from rootlace.runtime.contracts.transfer import TransferConfig
from rootlace.runtime.engine.client.pipes import Pipes
from rootlace.runtime.engine.client.siblings import Siblings
from rootlace.wire.errors import ServerUnavailable, from_code

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
        siblings: Siblings | None = None,
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
