"""An engine process as an object: the product's loop, scheduler and cache on an executor without a
model. It can die at any seam of its steps, hang, and be slow."""

from __future__ import annotations

import asyncio
import io
import math
import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq

from rootlace.runtime import processes
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.runtime.contracts.messages import (
    FromEngine,
    Ready,
    ToEngine,
    decode_to_engine,
    encode,
)
from rootlace.runtime.contracts.plan import SampleRow, StepPlan, StepResult
from rootlace.runtime.engine.client.process_config import EngineProcessConfig
from rootlace.runtime.engine.core import EngineLoop, step_record
from rootlace.runtime.engine.process import Telling
from rootlace.runtime.scheduler.masks import StepMasks
from rootlace.runtime.scheduler.offload.levels import HandedLevel, Level, Tiers
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.structured import GrammarCompiler
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint
from tests.deterministic import tokens
from tests.deterministic.network import Network, Socket
from tests.deterministic.shared import SharedStore, SlowStore
from tests.simulated_executor import CostModel, SimulatedExecutor, SimulatedStep

CONTEXT_LENGTH = 120
TURN_SECONDS = 1e-4
INJECTED = "injected fault"


class EngineDied(BaseException):
    """Death of the process, in the middle of its work."""


class Executor(SimulatedExecutor):
    """Executor with the tokens of `tokens.next_token`; any step can be the last."""

    def __init__(self, process: EngineProcess, num_blocks: int, block_size: int) -> None:
        vocab_size = tokens.vocabulary().size
        super().__init__(
            num_blocks,
            block_size,
            CONTEXT_LENGTH,
            vocab_size,
            CostModel(step=2e-3, token=2e-5),
            verify=True,
        )
        self._process = process
        self._poison = tokens.fast_tokenizer().token_to_id(tokens.POISON)
        self._thorn = tokens.fast_tokenizer().token_to_id(tokens.THORN)

    def launch(self, plan: StepPlan) -> SimulatedStep:
        self._process.seam("launch")
        if (plan.token_ids == self._poison).any():
            self._process.poisoned += 1
            raise EngineDied("poison")
        return super().launch(plan)

    def collect(self, launched: SimulatedStep) -> StepResult:
        self._process.seam("collect")
        result = super().collect(launched)
        if (launched.plan.token_ids == self._thorn).any():
            self._process.losses.append(self._process.loop_time())
            raise RuntimeError("a thorn")
        self._process.fault()
        self._process.seam("commit")
        return result

    def next_token(self, history: int, sample: SampleRow, before: int | None = None) -> int:
        params = sample.params
        masked = sample.mask is not None or sample.automaton is not None
        allowed = self._allowed(sample, before) if masked else None
        seed = params.seed or 0
        return tokens.next_token(history, seed, params.temperature, allowed, sample.banned)


class Compiler:
    """Compiles for one engine, as `CompileService` does, in virtual time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, real: GrammarCompiler) -> None:
        self._loop = loop
        self._real = real
        self._done: set[str] = set()

    def cached(self, constraint: Constraint) -> Grammar | None:
        return self._real.compile(constraint) if constraint.source in self._done else None

    def submit(self, constraint: Constraint, client: str = "") -> Future[Grammar]:
        future: Future[Grammar] = Future()
        explodes = constraint == tokens.CONSTRAINTS["explodes"]
        seconds = 10.0 if explodes else 3.0 if constraint == tokens.CONSTRAINTS["slow"] else 5e-3

        def settle() -> None:
            if explodes:
                error = InvalidConstraint("compiling it takes more than 10 seconds")
                future.set_exception(error)
            else:
                self._done.add(constraint.source)
                future.set_result(self._real.compile(constraint))

        self._loop.call_later(seconds, settle)
        return future


class EngineProcess:
    """Engine process, from its configuration on standard input to its end. `tell` receives its
    exit."""

    def __init__(
        self,
        network: Network,
        dice: random.Random,
        compiler: GrammarCompiler,
        pid: int,
        tell: Callable[[int], None],
        disk: int = 0,
    ) -> None:
        self.pid = pid
        self.code: int | None = None
        self.error: BaseException | None = None
        """Unexpected exception of a turn of the loop."""
        self.poisoned = 0
        self.losses: list[float] = []
        """When all KV was lost, because a step failed."""
        self.seams_left: int | None = None
        """Number of seams from now to the process's death; None: none."""
        self.failing = 0
        """Number of next steps that raise."""
        self.slow = 1.0
        """Factor of its steps' times."""
        self.suspended = self.stuck = False
        self._loading: EngineProcessConfig | None = None
        """Configuration of a process that stands still before its start."""
        self.loop: EngineLoop | None = None
        self.scheduler: Scheduler
        self.replica = 0
        self._network = network
        self._clock = network.loop
        self._dice = dice
        self._compiler = compiler
        self._tell = tell
        self._disk = disk
        """Slots of the disk below its pool."""
        self._context: Any = network.context()()
        self._sockets: list[Socket] = []
        self._address = b""
        """Address of its memory for other engines, if any."""
        self._waits = 0
        self._changed = False
        """Whether there was anything to do in the last turn."""
        self._next: asyncio.TimerHandle | None = None
        self._began = 0.0

    # ------------------------------------------------------------ life

    def read(self, data: bytes) -> None:
        """Read standard input: the configuration."""
        config = processes.read_config(io.BytesIO(data), EngineProcessConfig)  # type: ignore[arg-type]
        self._clock.call_later(self._dice.uniform(0.2, 2.0), self._start, config)

    def kill(self) -> None:
        self.end(-9)

    def end(self, code: int) -> None:
        """End the process: frames sent lately arrive or are lost."""
        if self.code is not None:
            return
        self.code = code
        if self._address:
            del self._network.memories[self._address]
        if self._next is not None:
            self._next.cancel()
        lost = self._dice.random() < 0.5
        for socket in self._sockets:
            lines = list(socket.lines.values())
            socket.close()
            for line in lines if lost else ():
                line.cut()
        self._clock.call_later(self._dice.uniform(1e-4, 0.05), self._tell, code)

    def seam(self, _: str) -> None:
        """Mark a place inside a step where the process may die."""
        if self.seams_left is not None and self.loop is not None:
            self.seams_left -= 1
            if self.seams_left <= 0:
                raise EngineDied("killed")

    def fault(self) -> None:
        if self.failing:
            self.failing -= 1
            self.losses.append(self.loop_time())
            raise RuntimeError(INJECTED)

    def loop_time(self) -> float:
        return self._clock.now

    def resume(self) -> None:
        """Continue after a suspension or a stuck loop."""
        if self.loop is None:
            self.suspended = self.stuck = False
            if self._loading is not None:
                self._start(self._loading)
        elif (self.suspended or self.stuck) and self.code is None:
            if self.suspended:
                self._clock.call_later(1.0, self._beat)  # the last heartbeat may still come
            self.suspended = self.stuck = False
            self._turn_soon(0.0)

    # ------------------------------------------------------------ the loop

    def _start(self, config: EngineProcessConfig) -> None:
        if self.code is not None:
            return
        if self.suspended:
            self._loading = config
            return
        engine, self.replica = config.engine, config.replica
        blocks, size = engine.cache.num_blocks, engine.cache.block_size
        assert blocks is not None
        self.executor = Executor(self, blocks, size)
        vocab_size = self.executor.vocab_size
        handed, slots = None, 0
        if config.transfer is not None:
            slots, dice = config.transfer.bytes, random.Random(self.pid)
            if config.transfer.by != "memory":
                self._address = b"engine %d" % self.pid
            store = SharedStore(slots, self._network.memories, self._address, dice)
            handed = HandedLevel("handed", store.tier, store)
            self.executor.stores.append(store)
        levels = (self._open_disk(),) if self._disk else ()
        self.scheduler = Scheduler(
            engine.scheduler,
            engine.cache,
            CONTEXT_LENGTH,
            self._clock.time,
            vocab_size=vocab_size,
            masks=StepMasks(vocab_size, spot_seconds=0.0, draft_seconds=math.inf),
            tiers=Tiers(levels, handed=handed),
        )
        if self._disk:
            self.scheduler.pace.begin(1, 1.0)  # input arrives faster than that
        self._inbox, self._outbox, self._beats = (
            self._connect(kind, address)
            for kind, address in (
                (zmq.PULL, config.inbox),
                (zmq.PUSH, config.outbox),
                (zmq.PUSH, config.outbox),
            )
        )
        self._inbox.on_message = self._wake
        capacity = min(CONTEXT_LENGTH, blocks * size)
        ready = Ready(
            self.pid, blocks, size, CONTEXT_LENGTH, capacity, vocab_size, "none", "float32",
            handed_slots=slots, handed_at=self._address,
        )  # fmt: skip
        self._send([ready])
        self.loop = EngineLoop(
            self.scheduler,
            self.executor,
            Compiler(self._clock, self._compiler),
            self._receive,
            self._send,
            overlap=bool(engine.overlap),
            record=step_record(Path(config.record), engine.scheduler.max_running),
            move=self.executor.move,
            telling=(
                Telling(
                    self.scheduler.cache,
                    self.scheduler.cost,
                    bytes.fromhex(config.digest_key),
                )
                if config.replicas > 1
                else None
            ),
        )
        self._beat()
        self._turn_soon(0.0)

    def _open_disk(self) -> Level:
        """Open the disk with the blocks of the previous process."""
        store = SlowStore(self._disk, random.Random(self.pid))
        if self.replica in self._network.disks:
            self._network.disks[self.replica].found_by(store)
        self._network.disks[self.replica] = store
        self.executor.stores.insert(0, store)
        return Level("disk", store.tier, store, outlives=True)

    def _connect(self, kind: int, address: str) -> Socket:
        socket: Socket = self._context.socket(kind)
        socket.connect(address)
        self._sockets.append(socket)
        return socket

    def _receive(self, timeout_ms: int) -> list[ToEngine]:
        self.seam("receive")
        self._waits = timeout_ms
        received: list[ToEngine] = []
        self._changed = bool(self._inbox.get(zmq.EVENTS)) or self.scheduler.has_work
        while self._inbox.get(zmq.EVENTS):
            received += decode_to_engine(self._inbox.recv_multipart()[0])
            self._waits = 0
        return received

    def _send(self, messages: list[FromEngine]) -> None:
        self.seam("send")
        self._outbox.later = self._worked
        self._outbox.send(encode(messages))

    @property
    def _worked(self) -> float:
        """Return the seconds since the turn began."""
        return (self.executor.clock() - self._began) * self.slow

    def _turn(self) -> None:
        if self.code is not None or self.suspended or self.stuck:
            return
        assert self.loop is not None
        self._next, self._waits = None, 0
        self._began = self.executor.clock()
        try:
            goes_on = self.loop.turn()
            if self._changed:
                self.scheduler.check()
        except EngineDied:
            self.end(-9)
            return
        except BaseException as error:
            self.error = error
            self.end(1)
            return
        if not goes_on:
            self.end(0)
            return
        idle = self._waits / 1000 if self._waits else 0.0 if self.scheduler.has_work else 5e-3
        self._turn_soon(max(self._worked, idle, TURN_SECONDS))

    def _turn_soon(self, seconds: float) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = self._clock.call_later(seconds, self._turn)

    def _wake(self) -> None:
        """Wake an idle loop for a turn when a message comes."""
        if self._waits:
            self._waits = 0
            self._turn_soon(0.0)

    def _beat(self) -> None:
        if self.code is None and not self.suspended and self.loop is not None:
            self._beats.send(encode([self.loop.heartbeat()]))
            self._clock.call_later(1.0, self._beat)


class Transport(asyncio.SubprocessTransport):
    """Transport of a process, as asyncio sees it."""

    def __init__(self, protocol: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.process: EngineProcess
        self._protocol = protocol
        self._loop = loop
        self._code: int | None = None
        self._ended: asyncio.Future[int] = loop.create_future()

    def get_pid(self) -> int:
        return self.process.pid

    def get_returncode(self) -> int | None:
        return self._code

    def get_pipe_transport(self, fd: int) -> Any:
        return _Pipe(self) if fd in (0, 1) else None

    def kill(self) -> None:
        if self._code is not None:
            raise ProcessLookupError
        self.process.kill()

    async def _wait(self) -> int:
        return await asyncio.shield(self._ended)

    def close(self) -> None:
        return

    def ended(self, code: int) -> None:
        self._code = code
        self._ended.set_result(code)
        self._protocol.pipe_connection_lost(1, None)
        self._protocol.process_exited()


class _Pipe(asyncio.WriteTransport):
    """Standard input; closing it ends the process."""

    def __init__(self, owner: Transport) -> None:
        super().__init__()
        self._owner = owner
        self._closed = False

    def write(self, data: Any) -> None:
        self._owner.process.read(bytes(data))

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            # A working process reads `Stop` first.
            process = self._owner.process
            if not process.suspended:
                self._owner._loop.call_later(1.0, process.end, 0)
