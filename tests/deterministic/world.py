"""World: a runtime and its clients in one event loop on a virtual clock."""

import asyncio
import hashlib
import random
from collections.abc import Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import zmq

from rootlace.runtime.config import (
    CacheConfig,
    EngineConfig,
    GatewayConfig,
    SchedulerConfig,
)
from rootlace.runtime.engine.client.engine_client import EngineClient
from rootlace.runtime.engine.client.restarts import MAX_RESTARTS
from rootlace.runtime.replicas.handover import Apart
from rootlace.runtime.replicas.replicas import Replicas
from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.programs import ProgramServer
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.session_store import SessionStore
from rootlace.wire import protocol
from rootlace.wire.errors import ServerUnavailable
from rootlace.wire.protocol import Chunk, Welcome
from tests.deterministic import tokens
from tests.deterministic.actor import Actor
from tests.deterministic.clock import VirtualLoop
from tests.deterministic.engine import EngineProcess, Transport
from tests.deterministic.faults import Faults
from tests.deterministic.network import Line, Network
from tests.deterministic.scenario import Scenario
from tests.deterministic.state import Disk, kill
from tests.deterministic.violation import Found, Held, Pinned, Violation

ADDRESS = "tcp://gateway:1"
PATIENCE = 2000.0
"""Virtual seconds behind the last program or fault until everything must be over."""


SHAKING = {"cut", "darken", "vanish", "block", "gateway"}
SHAKING_STATE = {"vanish", "fill"}
"""The same where connections are made again."""


class World:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.dice = random.Random(f"world {scenario.seed}")
        self.loop = VirtualLoop(self._start_process)
        self.network = Network(self.loop, self.dice, scenario.shape.split)
        self.network.tap = self._tap
        self.compiler = tokens.grammar_compiler()
        self.processes: list[EngineProcess] = []
        self.model: ServedModel | None = None
        self.deaths: list[float] = []
        """When engines died."""
        self.complaint = ""
        self.settled = 0.0
        self.began = 0.0
        self.pins_left: set[str] | None = None
        self.gone = 0
        """Number of engines that were gone for good."""
        self.pinned: list[Pinned] = []
        self.pins_lost = 0
        """Pins that were to be set again, and were refused; of a gateway that is gone nothing is
        known."""
        self.held: list[Held] = []
        self.found: list[Found] = []
        """Prompts computed by operations, with namespace and cached length."""
        shaking = SHAKING_STATE if scenario.shape.state else SHAKING
        self.shaken = bool({fault.kind for fault in scenario.faults} & shaking)
        """Whether something happens that may cost a client its connection."""
        self.filled = any(fault.kind == "fill" for fault in scenario.faults)
        """Whether a disk was full: what was told meanwhile may be lost."""
        self.killed: list[float] = []
        """When engines died that no text had killed."""
        self.pins = any(
            action[0] == "generate" and action[2].get("pin")
            for program in scenario.programs
            for action in program.actions
        )
        self.lives: list[float] = []
        """When gateways ended."""
        self.restored = 0
        """Tokens that were read back from disks."""
        self.handed = 0
        """Blocks that engines gave each other."""
        self.told: dict[tuple[int, int], list[float]] = {}
        """When terminal events were sent, by socket and operation."""
        self.pauses: list[tuple[float, float]] = []
        """Intervals in which nothing ran, or a client read nothing."""
        self.digest = hashlib.blake2b(digest_size=8)
        """Digest of all frames sent to programs."""
        self.folder = TemporaryDirectory(prefix="world-")
        self.disk = Disk()
        self._store: SessionStore | None = None
        self._server: ProgramServer | None = None
        self._starting: asyncio.Task[None] | None = None
        """Start of the next gateway, until it runs."""
        self._background: list[asyncio.Task[None]] = []
        self._closing = False
        self.actors = [Actor(self, number) for number in range(scenario.shape.clients)]

    def _tap(self, socket: Any, frame: bytes) -> None:
        self.digest.update(frame)
        for event in protocol.decode_events(frame):
            if not isinstance(event, Chunk | Welcome) and event.op:
                self.told.setdefault((socket.get(zmq.FD), event.op), []).append(self.loop.now)

    @property
    def live_processes(self) -> list[EngineProcess]:
        return [process for process in self.processes if process.code is None]

    # ------------------------------------------------------------ the runtime

    def _start_process(self, protocol: Any, _: tuple[str, ...]) -> Transport:
        transport = Transport(protocol, self.loop)

        def ended(code: int) -> None:
            self.deaths.append(self.loop.now)
            if not process.poisoned:
                self.killed.append(self.loop.now)
            transport.ended(code)

        process = EngineProcess(
            self.network,
            self.dice,
            self.compiler,
            1000 + len(self.processes),
            ended,
            self.scenario.shape.disk,
        )
        transport.process = process
        self.processes.append(process)
        protocol.connection_made(transport)
        return transport

    async def _start_runtime(self) -> None:
        shape = self.scenario.shape
        engine = EngineConfig(
            cache=CacheConfig(
                block_size=shape.block_size,
                num_blocks=shape.blocks,
                eviction=shape.eviction,  # type: ignore[arg-type]
            ),
            scheduler=SchedulerConfig(
                max_step_tokens=shape.step_tokens,
                max_running=shape.running,
                policy=shape.policy,  # type: ignore[arg-type]
                speculation_tokens=shape.blocks * shape.block_size,
            ),
            overlap=shape.overlap,
        )
        config = GatewayConfig(model="none", program_address=ADDRESS, cache_reports="all")
        if shape.state:
            folder = Path(self.folder.name)
            self._store = SessionStore(folder, self.loop.call_later, self.loop.time)
        client = await self._start_engine(engine)
        self.model = ServedModel(
            config, client, tokens.tokenizer(), ChatTemplate(None), (tokens.eos(),)
        )
        self._server = ProgramServer(self.model, self._store)
        self._server.start()

    async def _start_engine(self, config: EngineConfig) -> EngineClient | Replicas:
        """Start an engine; retry after a death at the start, as an operator would."""
        replicas = self.scenario.shape.replicas
        while True:
            try:
                if replicas > 1:
                    return await Replicas.start(config, replicas, self._gone, self._apart())
                return await EngineClient.start(config, self._gone)
            except ServerUnavailable:
                await asyncio.sleep(1.0)

    def _apart(self) -> Apart | None:
        """Return settings with so little memory that it fills up now and then."""
        shape = self.scenario.shape
        return Apart(shape.prefill, 8, memory_bytes=16, by=shape.by) if shape.prefill else None

    async def _stop_runtime(self) -> None:
        model, server = self.model, self._server
        self.model = self._server = None
        self.lives.append(self.loop.now)
        if server is not None:
            await server.stop()
        if model is not None:
            model.close()
            await model.engine.stop()
        if self._store is not None:
            self._store.close()
            self._store = None

    def _gone(self, reason: str) -> None:
        """The engine is gone for good: the runtime ends, and its operator starts it again."""
        self.gone += 1
        deadly = sum(
            part[0] == "poison"
            for program in self.scenario.programs
            for action in program.actions
            if action[0] == "append"
            for part in action[2]
        )
        # Requests that kill engines are found at their second death.
        if len(self.killed) + 2 * bool(deadly) <= MAX_RESTARTS:
            self.complaint = f"the runtime gave up after {len(self.killed)} deaths: {reason}"
        self.background(self._restart())

    def kill_gateway(self) -> None:
        """kill -9 the gateway: its lines break, and its engine ends, too."""
        if self._server is None and self._starting is None:
            return
        for line in self.lines():
            line.cut()
        if self._store is not None:
            kill(self._store)
            self._store = None
        if self._starting is not None:
            if not self._starting.cancelling():  # kill it only once
                self._starting.cancel()
        else:
            self.background(self._restart())

    async def _restart(self) -> None:
        if self.model is None:
            return
        await self._stop_runtime()
        while not self._closing:
            await asyncio.sleep(0.5)
            self._starting = self.loop.create_task(self._start_runtime())
            await asyncio.wait([self._starting])
            started, self._starting = self._starting, None
            if not started.cancelled():  # else it was killed while it loaded
                started.result()
                return

    # ------------------------------------------------------------ what faults need

    def lines(self) -> list[Line]:
        router = self.network.bound.get(ADDRESS)
        return [] if router is None else list(router.lines.values())

    def line(self, value: float) -> Line | None:
        lines = self.lines()
        return lines[int(value * len(lines))] if lines else None

    def vanish(self, value: float) -> None:
        self.actors[int(value * len(self.actors))].vanish()

    def pause(self, seconds: float) -> None:
        """Record that a reader gets nothing for a number of seconds."""
        self.pauses.append((self.loop.now, self.loop.now + seconds))

    def jump(self, seconds: float) -> None:
        self.pause(seconds)
        self.loop.now += seconds

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        self._background.append(self.loop.create_task(work))

    # ------------------------------------------------------------ all of it

    async def live(self) -> None:
        """Run from the start of the runtime until everything ended. Raises Violation."""
        await self._start_runtime()
        began = self.began = self.loop.now
        faults = Faults(self)
        for fault in self.scenario.faults:
            self.loop.call_at(began + fault.at, faults.do, fault.kind, fault.value)
        work = [
            self.loop.create_task(self.actors[program.client].run(number, program, began))
            for number, program in enumerate(self.scenario.programs)
        ]
        last = max((one.start for one in self.scenario.programs), default=0.0)
        last = max([last, *(fault.at for fault in self.scenario.faults)])
        if work:
            done, pending = await asyncio.wait(work, timeout=last + PATIENCE)
            if pending:
                raise Violation(f"{len(pending)} programs have not ended: {self._open()}")
            for task in done:
                task.result()
        await asyncio.sleep(max(0.0, began + last + 1.0 - self.loop.now))
        for actor in self.actors:
            await actor.leave()
        await self._settle()
        await self._check_nothing_left()
        self._closing = True
        await asyncio.gather(*self._background)
        await self._stop_runtime()
        self.check()

    def _open(self) -> list[str]:
        return [
            f"client {actor.number} op {sent.op}"
            for actor in self.actors
            for sent in actor.sent
            if sent.ended is None
        ][:5]

    async def _settle(self) -> None:
        """Wait until the gateway has noticed that all clients left."""
        for _ in range(1200):
            if self._rests():
                return
            await asyncio.sleep(1.0)
        sessions = None if self.model is None else self.model.session_count
        left = self._in_flight()
        raise Violation(f"it does not come to rest: sessions {sessions}, in flight {left}")

    def _rests(self) -> bool:
        model, live = self.model, self.live_processes
        if model is None or model.session_count or not live:
            return False
        if not all(client.healthy for client in self._clients()):
            return False
        if any(process.loop is None or process.scheduler.has_work for process in live):
            return False
        if any(process.suspended or process.stuck for process in live):
            return False
        journals = [process.scheduler.kv.tree.journal for process in live]
        if any(journal is not None and journal.changed for journal in journals):
            return False
        return not self._in_flight()

    def _in_flight(self) -> list[int]:
        """Return the requests that the gateway believes engines have."""
        return [rid for client in self._clients() for rid in client._restarts.requests]

    def _clients(self) -> list[EngineClient]:
        if self.model is None:
            return []
        engine: Any = self.model.engine
        if not isinstance(engine, Replicas):
            return [engine]
        return [one for at, one in enumerate(engine._clients) if at not in engine._gone]

    async def _check_nothing_left(self) -> None:
        model, live = self.model, self.live_processes
        assert model is not None
        if model.branch_count:
            raise Violation(f"{model.branch_count} branches are left")
        for process in live:  # a death planned for a later step is cancelled
            process.seams_left = None
        self.settled = self.loop.now
        self.pins_lost = sum(client._pinned.lost for client in self._clients())
        pins = [(one, pin) for one in live for pin in one.scheduler.kv.retention.pins.all()]
        # Pins live for five minutes.
        if self.settled - self.began < 290:
            self.pins_left = {pin.id for _, pin in pins}
        if isinstance(model.engine, Replicas):
            self._check_table(model.engine, live)
        for process, pin in pins:
            process.scheduler.cache.unpin(pin.id)
        await model.flush()
        for process in live:
            stats = process.scheduler.stats()
            if stats["blocks_free"] != stats["blocks_total"] or stats["nodes"]:
                raise Violation(f"memory is left: {stats}")

    def _check_table(self, replicas: Replicas, live: list[EngineProcess]) -> None:
        """Check that the gateway knows the caches' contents, and nothing of ended requests."""
        dispatch = replicas._dispatch
        assert dispatch is not None
        router = dispatch._router
        if dispatch._running or router._sent or len(router._coming):
            raise Violation(f"requests are left in the router: {dispatch._running}")
        wanted: dict[int, int] = {}
        for process in live:
            for digest in process.scheduler.cache.changes(all_of_it=True).added.tolist():  # type: ignore[union-attr]
                wanted[digest] = wanted.get(digest, 0) | 1 << process.replica
        if router._held.entries() != wanted:
            raise Violation("the table differs from what the caches hold")
        wanted.clear()
        for process in live:
            self.restored += int(process.scheduler.stats().get("restored_tokens", 0))
            for level in process.scheduler.cache.changes_below(all_of_it=True):
                for key in level.added.tolist():
                    wanted[key] = wanted.get(key, 0) | 1 << process.replica
        if wanted and router._below._levels[0].entries() != wanted:
            raise Violation("the table differs from what the disks hold")
        handover = replicas._handover
        if handover is not None:
            self.handed += handover.blocks
            lent = {at: 16 - len(slots) for at, slots in handover._free.items()}
            if handover._under_way or any(lent.values()):
                raise Violation(f"not all that was handed over was taken: {lent}")

    def check(self) -> None:
        """Check facts that are known only at the end. Raises Violation."""
        for process in self.processes:
            if process.error is not None:
                raise Violation(f"an engine's loop raised {process.error!r}") from process.error
        if self.complaint:
            raise Violation(self.complaint)
        if self.loop.complaints:
            raise Violation(f"asyncio complains: {self.loop.complaints[0]}")
        if twice := [key for key, times in self.told.items() if len(times) > 1]:
            raise Violation(f"terminal events were sent twice: (socket, operation) {twice[0]}")
        for actor in self.actors:
            actor.check()
        self._check_namespaces()
        if self.pins_left is not None:
            self._check_pins(self.pins_left)

    def losses(self) -> list[float]:
        """Return the times at which all KV was lost: an engine ended, or a step failed."""
        return [*self.deaths, *(at for process in self.processes for at in process.losses)]

    def _check_namespaces(self) -> None:
        """Check that cached tokens of a prompt came from its own namespace only."""
        for found in self.found:
            known = 0
            for held in self.held:
                if held.namespace != found.namespace or held.op is found.op:
                    continue
                shared = 0
                for one, other in zip(held.tokens, found.prompt, strict=False):
                    if one != other:
                        break
                    shared += 1
                # The rest may be tokens that the operation generated.
                whole = held.grows and shared == len(held.tokens)
                known = len(found.prompt) if whole else max(known, shared)
                if known >= found.cached:
                    break
            if known < found.cached:
                raise Violation(
                    f"{found.cached} tokens of {found.prompt} were cached in "
                    f"{found.namespace!r}, which had {known}"
                )

    def _check_pins(self, left: set[str]) -> None:
        """Check that pins hold: a new engine has a dead one's pins, unless one was refused."""
        last = 0.0
        if self.pins_lost or self.gone or len(self.lives) > 1 or self.scenario.shape.replicas > 1:
            last = max((at for at in self.losses() if at < self.settled), default=0.0)
        for pinned in self.pinned:
            if last < pinned.sent and pinned.told < self.settled and pinned.id not in left:
                raise Violation(f"the pin {pinned.id} of {pinned.sent} is gone")
