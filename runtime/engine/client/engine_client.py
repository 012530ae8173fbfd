"""The gateway's end of the engine: starts the process, sends it requests, hands on its updates, and
starts it again if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import zmq

from rootlace.runtime import processes
from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.messages import (
    Abort,
    CacheChanged,
    CostMeasured,
    Explained,
    Flush,
    Flushed,
    ForgetNamespace,
    FromEngine,
    GetStats,
    HandedOver,
    Heartbeat,
    Pause,
    Pinned,
    Ready,
    ReleaseProgram,
    Stats,
    Stop,
    ToEngine,
    Tree,
    Unpinned,
)
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.step_record import read_step_record
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.engine.client.culprits import Culprits
from rootlace.runtime.engine.client.deaths import Deaths
from rootlace.runtime.engine.client.forgets import Forgets
from rootlace.runtime.engine.client.in_flight import InFlight, Submitted
from rootlace.runtime.engine.client.pipes import Pipes
from rootlace.runtime.engine.client.pulse import STALL_SECONDS, Pulse
from rootlace.runtime.engine.client.questions import Questions
from rootlace.runtime.engine.client.siblings import Siblings
from rootlace.wire.errors import ServerUnavailable, from_code

log = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 5.0
SPILL_SECONDS = 20.0
"""How long an engine has, when it is to end, to write what it has cached to the disk."""


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
    """Its number among the engines of the model, and how many there are."""
    digest_key: str = ""
    """Of the digests that it tells, hexadecimal."""
    memory: int = -1
    memory_bytes: int = 0
    """What engines hand blocks over in: a file descriptor that it inherits; -1: none."""


class EngineClient:
    """One engine process. All methods belong to the event loop that `start` ran on.

    When the engine dies, it is started again and every request that was running is submitted again
    with the tokens it had: its client notices a pause. One that hangs is killed, which is the same.
    What was in the step that it computed is computed alone at first, so that a request that kills
    engines is given up alone (`InFlight`), and a client that sends many of them is suspended
    (`Culprits`); where too many deaths have no such reason (`Deaths`), the engine stays down and
    `on_exit` is called with the reason. Where it has `siblings`, its requests go on there.
    """

    info: Ready

    def __init__(
        self,
        config: EngineConfig,
        on_exit: Callable[[str], None] | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        self._config = config
        self._on_exit = on_exit
        self._siblings = siblings
        self._folder = processes.SocketFolder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._process: Process | None = None
        self._pipes: Pipes | None = None
        self._record = self._folder.path
        self._ready: asyncio.Future[Ready] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._culprits = Culprits() if siblings is None else siblings.culprits
        self._in_flight = InFlight(self._culprits)
        self._questions = Questions()
        self._forgets = Forgets() if siblings is None else siblings.forgets
        self._next_rid = 0
        self._pulse = Pulse()
        self._up = False
        self._stopping = False
        self._deaths = Deaths()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        on_exit: Callable[[str], None] | None = None,
        siblings: Siblings | None = None,
    ) -> EngineClient:
        """Start the engine process and wait until its model is loaded.

        Raises the typed error the engine gave (a bad model folder, too little memory ...), or
        ServerUnavailable if it ended without one.
        """
        client = cls(config, on_exit, siblings)
        try:
            await client._launch()
        except BaseException:
            await client.stop()
            raise
        return client

    @property
    def healthy(self) -> bool:
        """Whether the loop was heard of lately."""
        return self._up and self._pulse.steady

    def next_rid(self) -> int:
        self._next_rid += 1
        return self._next_rid

    def submit(self, request: Request, on_update: Callable[[Update], None]) -> None:
        """Start a request; `on_update` hears of it until an update with `finish` set. Raises
        ClientSuspended."""
        if (refusal := self._culprits.refusal(request.client)) is not None:
            raise refusal
        sent = self._up and not self._in_flight.quarantined
        self._in_flight.add(request, on_update, sent)
        if sent:  # else the next engine is given it when it is ready
            self.send(request)

    def adopt(self, submitted: Submitted, in_step: Mapping[int, int]) -> None:
        """Go on with a request of a sibling that died: see `Siblings.on_death`."""
        request = self._in_flight.adopt(submitted, in_step, self._up)
        if request is not None:
            self.send(request)

    def abort(self, rids: Iterable[int]) -> None:
        """End requests; those still running get a last update with `finish="abort"`."""
        running = self._in_flight.abort(rids)
        if running and self._up:
            self.send(Abort(running))

    def release_program(self, program: str, wanted: bool = False) -> None:
        self.send(ReleaseProgram(program, wanted))

    def forget_namespace(self, namespace: str) -> None:
        message = ForgetNamespace(namespace)
        if self._config.cache.disk:
            self._forgets.note(message)
        self.send(message)

    def pause(self, paused: bool) -> None:
        """Have the engine compute nothing, or go on. One that is started again goes on."""
        self.send(Pause(paused))

    async def flush(self) -> None:
        """Forget what no running request uses. An engine that is down does so when it is back,
        though ServerUnavailable is raised."""
        if self._config.cache.disk:
            self._forgets.note(Flush(0))
        await self.ask(Flush)

    async def stats(self) -> dict[str, Any]:
        return await self.ask(GetStats)

    async def ask(self, kind: Callable[..., ToEngine], *fields: Any) -> Any:
        """What answers `kind(ticket, *fields)`, one of `contracts.messages`."""
        if not self._up:
            raise ServerUnavailable("the engine is not running")
        ticket = self._questions.open()
        self.send(kind(ticket, *fields))
        return await self._questions.answer_to(ticket, STALL_SECONDS)

    def send(self, message: ToEngine) -> None:
        """Send what needs no answer."""
        if self._pipes is not None:
            self._pipes.send(message)

    async def stop(self) -> None:
        """Stop the engine; whatever still runs gets `finish="abort"`."""
        self._stopping = True
        if self._watcher is not None:
            self._watcher.cancel()
        # It reads its standard input's end as its parent's, and ends at once.
        spilling = SPILL_SECONDS if self._up and self._config.cache.disk else 0.0
        await _end(self._process, self._pipes, spilling)
        if self._pipes is not None:
            self._pipes.close()
        self._context.destroy(linger=0)
        self._folder.remove()
        error = ServerUnavailable("the runtime is stopping")
        self._questions.fail(error)
        self._in_flight.fail(error)

    # ------------------------------------------------------------ the process

    async def _launch(self) -> None:
        generation = self._deaths.count
        inbox = self._folder.address(f"to-engine-{generation}")
        outbox = self._folder.address(f"from-engine-{generation}")
        self._pipes = Pipes(self._context, inbox, outbox, self._handle)
        self._record = self._folder.path / f"steps-{generation}"
        config = EngineProcessConfig(
            self._config, inbox, outbox, str(self._folder.path), str(self._record)
        )
        siblings = self._siblings
        if siblings is not None:
            config = msgspec.structs.replace(
                config,
                replica=siblings.replica,
                replicas=siblings.replicas,
                digest_key=siblings.digest_key.hex(),
                memory=siblings.memory,
                memory_bytes=siblings.memory_bytes,
            )
        # A session of its own: the terminal's Ctrl-C reaches the gateway, which stops the engine.
        process = await asyncio.create_subprocess_exec(
            *processes.child_command("rootlace.runtime.engine"),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
            pass_fds=() if config.memory < 0 else (config.memory,),
            env=processes.compute_environment(),
        )
        self._process = process
        assert process.stdin is not None
        process.stdin.write(processes.write_config(config))
        await process.stdin.drain()
        self.info = await self._wait_ready(process)
        self._pulse = Pulse()
        if generation:
            for message in self._forgets.to_returned():
                self.send(message)
        self._up = True
        self._watcher = asyncio.create_task(self._watch(process))

    async def _wait_ready(self, process: Process) -> Ready:
        ready = self._ready = asyncio.get_running_loop().create_future()
        ended = asyncio.ensure_future(_output_of(process))
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return ready.result()
            raise _reason(ended.result(), process.returncode)
        finally:
            ready.cancel()
            if ended.done():
                ended.cancel()

    async def _watch(self, process: Process) -> None:
        ended = asyncio.ensure_future(process.wait())
        lost = asyncio.ensure_future(self._pulse.lost())
        try:
            await asyncio.wait({ended, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                log.error("the engine process hangs (%s) and is killed", lost.result())
                process.kill()
            code = await ended
        finally:
            lost.cancel()
        if self._stopping:
            return
        self._up = False
        self._in_flight.died(self._deaths.note())
        self._forgets.died()
        log.error("the engine process ended with code %s", code)
        self._questions.fail(ServerUnavailable("the engine restarted"))
        in_step, siblings = read_step_record(self._record), self._siblings
        if siblings is not None:
            siblings.on_death(self._in_flight.leave(in_step), in_step)
        try:
            await self._launch_again(code)
        except Exception as error:
            log.error("the engine cannot be started again: %s", error)
            if siblings is not None:
                siblings.on_gone(str(error))
                siblings.on_death(self._in_flight.leave_all(), in_step)
            self._in_flight.fail(ServerUnavailable(str(error)))
            if self._on_exit is not None:
                self._on_exit(str(error))
            return
        for request in self._in_flight.resume(in_step):
            self.send(request)
        if siblings is not None:
            siblings.on_return()

    async def _launch_again(self, code: int | None) -> None:
        """Start an engine for the one that ended; another one where it dies as it starts."""
        while True:
            assert self._pipes is not None
            self._pipes.close()
            self._deaths.check(code)
            try:
                return await self._launch()
            except _DiedAtStart as error:
                log.error("%s", error)
                self._deaths.note()
                code = error.code_of_process

    # ------------------------------------------------------------ messages

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, Update):
            # There are thousands a second, and heartbeats tell the pulse as much.
            for request in self._in_flight.hear(message):
                self.send(request)
            return
        self._pulse.hear(message)
        if isinstance(message, Stats):
            self._questions.answer(message.ticket, message.values)
        elif isinstance(message, Explained):
            self._questions.answer(message.ticket, message.report)
        elif isinstance(message, Tree):
            self._questions.answer(message.ticket, message.page)
        elif isinstance(message, Pinned):
            self._questions.answer(message.ticket, message.pins)
        elif isinstance(message, Unpinned):
            self._questions.answer(message.ticket, message.found)
        elif isinstance(message, HandedOver):
            self._questions.answer(message.ticket, message.checksums)
        elif isinstance(message, Flushed):
            self._questions.answer(message.ticket, None)
        elif isinstance(message, CacheChanged | CostMeasured):
            if self._siblings is not None:
                self._siblings.on_told(message)
        elif isinstance(message, Ready):
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        else:
            assert isinstance(message, Heartbeat)


async def _end(process: Process | None, pipes: Pipes | None, patience: float = 0.0) -> None:
    """Ask an engine's process to end, give it `patience`, and kill one that does not."""
    if process is None or process.returncode is not None:
        return
    if pipes is not None:
        pipes.send_now(Stop())
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


class _DiedAtStart(ServerUnavailable):
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
        return _DiedAtStart(code)
