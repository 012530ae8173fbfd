"""An engine as a child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from rootlace.runtime.engine.client.process_config import EngineProcessConfig
from rootlace.wire.errors import ServerUnavailable, from_code
from rootlace.wire.sockets import Pipes, new_pair

# Child engine -------------------------------------------------------------------------------------


STOP_GRACE_SECONDS = 5.0


class Children:
    """Launcher (`EngineLauncher`) of child processes, one after another."""

    patient = False

    def __init__(
        self,
        config: EngineConfig,
        replica: int = 0,
        replicas: int = 1,
        digest_key: bytes = b"",
        transfer: TransferConfig | None = None,
    ) -> None:
        """Make a launcher; parameters as in `EngineProcessConfig`."""
        # First: if it fails, no folder stays behind.
        host = processes.new_memory() if config.cache.enabled and config.cache.host_gb else -1
        self._folder = processes.SocketFolder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._opened = 0
        self._config = EngineProcessConfig(
            config,
            inbox="",
            outbox="",
            socket_folder=str(self._folder.path),
            record="",
            replica=replica,
            replicas=replicas,
            digest_key=digest_key.hex(),
            transfer=transfer,
            host_memory=host,
        )

    def open(self, hear: Callable[[FromEngine], None]) -> ChildEngine:
        """Return a new engine to start; `hear` receives its messages except `Ready`."""
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
        if self._config.host_memory >= 0:
            os.close(self._config.host_memory)


class ChildEngine:
    """Handle of one engine process (an `EngineHandle`); belongs to the event loop that made it."""

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
        push, pull = new_pair(context)
        push.bind(config.inbox)
        pull.bind(config.outbox)
        self._pipes = Pipes(push, pull, self._await_ready, encode, decode_from_engine)
        self.send: Callable[[ToEngine], None] = self._pipes.send
        """Function that queues a message, also for an engine that is starting."""

    async def ready(self) -> Ready:
        """Start the process and wait until the model is loaded.

        Raises the engine's typed error, or DiedAtStart without one.
        """
        config, transfer = self._config, self._config.transfer
        memories = (config.host_memory, -1 if transfer is None else transfer.memory)
        # A session of its own: the terminal's Ctrl-C reaches the gateway, which stops the engine.
        process = self._process = await asyncio.create_subprocess_exec(
            *processes.child_command("rootlace.runtime.engine"),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
            pass_fds=tuple(memory for memory in memories if memory >= 0),
            env=processes.compute_environment(),
        )
        assert process.stdin is not None
        process.stdin.write(processes.write_config(config))
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
        """Return the exit status, once the process has ended."""
        assert self._process is not None
        return await self._process.wait()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def in_step(self) -> dict[int, int]:
        """Return requests of the steps in which the engine died, with planned lengths."""
        return read_step_record(Path(self._config.record))

    async def end(self, patience: float = 0.0) -> None:
        """Ask the process to end, and kill it after `patience` seconds."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._pipes.send_now(Stop())
        # The process reads the end of its standard input as its parent's end, and ends at once.
        if patience:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience + STOP_GRACE_SECONDS)
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # the process may end at this very moment
                process.kill()
            await process.wait()

    def close(self) -> None:
        """Close the pipes."""
        self._pipes.close()

    def _await_ready(self, message: FromEngine) -> None:
        if not isinstance(message, Ready):
            self._hear(message)
        elif not self._ready.done():
            self._ready.set_result(message)
            self._pipes.on_message = self._hear


class DiedAtStart(ServerUnavailable):
    """Error of an engine process that ended before `Ready`, without a reason."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"the engine ended with code {code} before it was ready")
        self.code_of_process = code


async def _output_of(process: Process) -> bytes:
    """Return all of the child's standard output; complete once the child has ended."""
    assert process.stdout is not None
    data = await process.stdout.read()
    await process.wait()
    return data


def _reason(output: bytes, code: int | None) -> Exception:
    """Return the typed error that an engine printed as its last line before a failed start."""
    try:
        report = msgspec.json.decode(output.splitlines()[-1], type=dict[str, str])
        return from_code(report["error"], report["message"])
    except (IndexError, KeyError, msgspec.DecodeError):
        return DiedAtStart(code)
