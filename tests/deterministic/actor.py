"""A client of a world: runs programs over the product's connection, and reconnects after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rootlace.wire import protocol
from rootlace.wire.protocol import Chunk, SamplingParams
from rootlace.wire.sampling import Cache, Handling
from tests.deterministic import tokens
from tests.deterministic.checks import Ledger
from tests.deterministic.client import Sent, SimulatedConnection
from tests.deterministic.scenario import Action, Program

if TYPE_CHECKING:
    from tests.deterministic.world import World


class Actor:
    def __init__(self, world: World, number: int) -> None:
        self.number = number
        self.world = world
        self.sent: list[Sent] = []
        self.lives = 0
        self._connection: SimulatedConnection | None = None
        self._connecting: asyncio.Task[SimulatedConnection] | None = None

    async def connection(self) -> SimulatedConnection:
        if self._connection is not None and self._connection.lost is None:
            return self._connection
        if self._connecting is None:
            self._connecting = self.world.loop.create_task(self._connect())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> SimulatedConnection:
        from tests.deterministic.world import ADDRESS

        while True:
            self.lives += 1
            connection = SimulatedConnection.begin(ADDRESS, self.world.loop)
            await connection.settled()
            if connection.lost is None:
                self._connection, self._connecting = connection, None
                return connection
            await asyncio.sleep(1.0)

    def vanish(self) -> None:
        """Kill the actor's process; a new one takes its place."""
        if self._connection is not None and self._connection.lost is None:
            self._connection.vanish()

    async def leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
            await asyncio.wait([self._connection.task])

    # ------------------------------------------------------------ a program

    async def run(self, number: int, program: Program, began: float) -> None:
        await asyncio.sleep(max(0.0, began + program.start - self.world.loop.now))
        await Run(self, number, await self.connection()).go(program.actions)

    def send(
        self,
        connection: SimulatedConnection,
        life: int,
        op: protocol.Op,
        on_end: Callable[[], None],
    ) -> Sent:
        loop = self.world.loop
        sent = Sent(op, loop.now, life, connection.descriptor)
        self.sent.append(sent)

        def sink(event: protocol.Event) -> None:
            sent.events.append(event)
            if not isinstance(event, Chunk):
                sent.ended, sent.lost = loop.now, connection.lost is not None
                on_end()

        connection.send(op, sink)
        return sent

    def check(self) -> None:
        lives = sorted({sent.life for sent in self.sent})
        for life in lives:
            Ledger(self.world, self, life).check([s for s in self.sent if s.life == life])


class Run:
    """A run of one program on one connection."""

    def __init__(self, actor: Actor, number: int, connection: SimulatedConnection) -> None:
        self._actor = actor
        self._connection = connection
        self._life = actor.lives
        self._number = number
        self._branches: dict[int, int] = {}
        self._pending: dict[int, list[Sent]] = {}
        self._all: list[Sent] = []
        self._news = asyncio.Event()
        """Event that is set when something ended."""

    async def go(self, actions: tuple[Action, ...]) -> None:
        for verb, *rest in actions:
            if verb == "sleep":
                await asyncio.sleep(rest[0])
            elif verb == "wait":
                await self._wait(self._pending.get(rest[0], []))
            elif verb in ("status", "ping", "flush", "unpin"):
                self._send(self._free(verb), 0)
            elif verb == "open":
                self._open(*rest)
            elif rest[0] in self._branches:
                branch = self._branches[rest[0]]
                op = getattr(self, f"_{verb}")(branch, *rest[1:])
                if op is not None:
                    self._send(op, rest[0])
                if verb == "close":
                    del self._branches[rest[0]]
        # Branches that the program left open are cancelled, as after a failed program.
        for name, branch in list(self._branches.items()):
            self._send(protocol.Cancel(self._connection.next_op(), branch), name)
            self._send(protocol.Close(self._connection.next_op(), branch), name)
        self._connection.flush()
        await self._wait(self._all)

    async def _wait(self, pending: list[Sent]) -> None:
        self._connection.flush()
        for sent in pending:
            while sent.ended is None:
                self._news.clear()
                await self._news.wait()

    def _send(self, op: protocol.Op, name: int) -> None:
        sent = self._actor.send(self._connection, self._life, op, self._news.set)
        self._pending.setdefault(name, []).append(sent)
        self._all.append(sent)

    # ------------------------------------------------------------ operations

    def _open(self, name: int, parent: int | None, options: dict[str, Any]) -> None:
        if name in self._branches or (parent is not None and parent not in self._branches):
            return
        connection = self._connection
        branch = self._branches[name] = connection.next_branch()
        above = None if parent is None else self._branches[parent]
        program = options.get("program", "")
        op = protocol.Open(
            connection.next_op(),
            branch,
            above,
            f"{program}{self._number}" if program else "",
            options.get("namespace", ""),
            share=options.get("share", True),
        )
        self._send(op, name)

    def _append(self, branch: int, parts: tuple[Any, ...]) -> protocol.Op:
        made: list[protocol.Part] = []
        for kind, *rest in parts:
            if kind == "text":
                made.append(protocol.Text(rest[0]))
            elif kind == "tokens":
                made.append(protocol.Tokens(tuple(rest[0])))
            elif kind == "quote":
                if rest[0] in self._branches:
                    made.append(protocol.Quote(self._branches[rest[0]]))
            else:
                text = tokens.POISON if kind == "poison" else tokens.THORN
                made.append(protocol.Text(text, special=True))
        return protocol.Append(self._connection.next_op(), branch, tuple(made))

    def _generate(self, branch: int, given: dict[str, Any]) -> protocol.Op:
        stop = given.get("stop")
        params = SamplingParams(
            max_tokens=given["max_tokens"],
            temperature=given["temperature"],
            seed=given.get("seed"),
            n=given.get("n", 1),
            stop=(stop,) if stop else (),
            stop_token_ids=tuple(given.get("stop_token_ids", ())),
            min_tokens=min(given.get("min_tokens", 0), given["max_tokens"]),
            logprobs=given.get("logprobs", False),
        )
        constraint = given.get("constraint")
        return protocol.Generate(
            self._connection.next_op(),
            branch,
            "",
            params,
            tokens.CONSTRAINTS[constraint] if constraint else None,
            given.get("stream", False),
            given.get("report", False),
            handling=Handling(
                given.get("priority", 0), given.get("timeout"), Cache(given.get("pin", False))
            ),
            prediction=given.get("prediction", ""),
        )

    def _select(self, branch: int, choices: tuple[str, ...]) -> protocol.Op:
        return protocol.Select(self._connection.next_op(), branch, tuple(choices))

    def _prefill(self, branch: int) -> protocol.Op:
        return protocol.Prefill(self._connection.next_op(), branch)

    def _explain(self, branch: int) -> protocol.Op:
        return protocol.Explain(self._connection.next_op(), branch)

    def _cancel(self, branch: int) -> protocol.Op:
        return protocol.Cancel(self._connection.next_op(), branch)

    def _close(self, branch: int) -> protocol.Op:
        return protocol.Close(self._connection.next_op(), branch)

    def _free(self, verb: str) -> protocol.Op:
        op = self._connection.next_op()
        if verb == "status":
            return protocol.GetStatus(op)
        if verb == "ping":
            return protocol.Ping(op)
        if verb == "flush":
            return protocol.FlushCache(op)
        return protocol.Unpin(op, "0123456789abcdef")
