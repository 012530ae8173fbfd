"""Several engines of one model in the place of one."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.messages import (
    EngineOutput,
    EngineRequest,
    Explain,
    GetPins,
    GetTree,
    PinnedPrefix,
    Ready,
    Stop,
    TellCache,
    ToEngine,
    TreeNode,
    TreePage,
    Unpin,
)
from rootlace.runtime.engine.client.cache_orders import Forgets
from rootlace.runtime.engine.client.engine_client import EngineClient, ReplicaContext
from rootlace.runtime.engine.client.restarts import PendingRequest, Suspensions
from rootlace.runtime.replicas.dispatch import Dispatch
from rootlace.runtime.replicas.handover import Apart, Handover, transfer_of
from rootlace.runtime.replicas.remote import Meeting, RemotePlace
from rootlace.wire.errors import InvalidRequest, RootlaceError, ServerUnavailable

# Answers ------------------------------------------------------------------------------------------
#
# One answer from the answers of several engines.


PATIENCE_SECONDS = 5.0
"""Seconds without an answer, after the first, until the remaining engines are left out. A step may
take seconds, readers of metrics wait ten, and a hanging engine is killed after twenty."""


async def all_answers(
    engines: Mapping[int, EngineClient], ask: Callable[[EngineClient], Awaitable[Any]]
) -> dict[int, Any]:
    """Return the engines' answers by number, without engines that stand still while others answer.
    Raises ServerUnavailable if no engine answers, and any other error of an engine."""
    tasks = {at: asyncio.ensure_future(ask(engine)) for at, engine in engines.items()}
    answered: dict[int, Any] = {}
    waiting = set(tasks.values())
    try:
        while waiting:
            patience = PATIENCE_SECONDS if answered else None
            done, waiting = await asyncio.wait(
                waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            for at, answer in tasks.items():
                if answer in done and not isinstance(answer.exception(), ServerUnavailable):
                    answered[at] = answer.result()
    finally:
        for answer in waiting:
            answer.cancel()
    if not answered:
        raise ServerUnavailable("no engine is running")
    return dict(sorted(answered.items()))


def one_ready(all_of_them: Sequence[Ready]) -> Ready:
    """Return the limits that hold at every replica."""
    return msgspec.structs.replace(
        all_of_them[0],
        num_blocks=min(ready.num_blocks for ready in all_of_them),
        capacity_tokens=min(ready.capacity_tokens for ready in all_of_them),
    )


def sum_of(stats: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the counters of all engines, which are given by replica number."""
    total: dict[str, Any] = {}
    for counters in stats.values():
        for name, value in counters.items():
            total[name] = total.get(name, 0) + value
    return total


class NodeIds:
    """Ids of tree nodes and of engines as one number; 0 stays 0, which is above all roots."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def whose(self, number: int) -> tuple[int, int]:
        """Return the engine, and the id there."""
        return number % self._replicas, number // self._replicas

    def page(self, pages: Mapping[int, TreePage], whole: bool) -> TreePage:
        """Merge pages of several engines into one, of the `whole` tree or of a part."""
        nodes = [self._node(one, at) for at, page in pages.items() for one in page.nodes]
        whole_page = TreePage(tuple(nodes), all(page.complete for page in pages.values()))
        if not whole:
            return whole_page
        return msgspec.structs.replace(
            whole_page,
            total=sum(page.total or 0 for page in pages.values()),
            tokens=sum(page.tokens or 0 for page in pages.values()),
        )

    def pins(self, answers: Mapping[int, Sequence[PinnedPrefix]]) -> tuple[PinnedPrefix, ...]:
        """Merge pins, the first to end first. The same prompt may be pinned in several caches."""
        every = [
            msgspec.structs.replace(pin, node=self._number(pin.node, at))
            for at, pins in answers.items()
            for pin in pins
        ]
        return tuple(sorted(every, key=lambda pin: pin.seconds_left))

    def _node(self, node: TreeNode, at: int) -> TreeNode:
        return msgspec.structs.replace(
            node, id=self._number(node.id, at), parent=self._number(node.parent, at), replica=at
        )

    def _number(self, node: int, at: int) -> int:
        return node * self._replicas + at if node else 0


# Replicas -----------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
"""Seconds between two looks at whether an engine that is to leave still holds requests."""


class Replicas:
    """Engine processes of one model: what `EngineClient` is, of several.

    A request goes where it costs least by the router. When an engine dies, what it ran goes on at
    another one at once, from the tokens that it had (`RestartPolicy`). An engine that is gone
    for good is missed by nobody while there is another one; with the last one, `on_exit` is called.
    """

    info: Ready

    def __init__(
        self,
        count: int,
        on_exit: Callable[[str], None] | None,
        apart: Apart | None = None,
        meeting: Meeting | None = None,
        digest_key: bytes | None = None,
    ) -> None:
        self._count = count
        self._apart = apart
        # Engines of other machines got their transfer settings at their start.
        self._transfer = None if apart is None or meeting else transfer_of(apart)
        self._handover: Handover | None = None
        self._on_exit = on_exit
        self._meeting = meeting
        self._clients: list[EngineClient] = []
        self._dispatch: Dispatch | None = None
        """The dispatch; None until all engines have started."""
        self._early: list[Callable[[Dispatch], None]] = []
        """Calls to repeat at the dispatch once it exists."""
        self._gone: set[int] = set()
        """Engines that are not restarted."""
        self._digest_key = digest_key or secrets.token_bytes(16)
        self._there = asyncio.Event()
        """Whether an engine has come to the meeting."""
        self._leaving: dict[int, asyncio.Task[None]] = {}
        """Engines that get nothing new, and end when their requests are over."""
        self._ids = NodeIds(count)
        self._forgets = Forgets(keep=True)
        self._suspensions = Suspensions()
        self.next_rid = itertools.count(1).__next__

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        count: int,
        on_exit: Callable[[str], None] | None = None,
        apart: Apart | None = None,
        meeting: Meeting | None = None,
        digest_key: bytes | None = None,
    ) -> Replicas:
        """Start `count` engines: the first one alone, as it may leave its packed weights for the
        others. With a `meeting`, wait for the first of up to `count` engines, started and ended
        elsewhere, that share `digest_key`. Raises the errors of `EngineClient.start`."""
        replicas = cls(count, on_exit, apart, meeting, digest_key)
        if meeting is None:
            replicas._forgets = Forgets.of(config)
        try:
            replicas._clients = [await replicas._start_one(config, 0)]
            others = [replicas._start_one(config, at) for at in range(1, count)]
            replicas._clients += await _all_or_none(others)
            while not (up := replicas._up):
                await replicas._there.wait()
                replicas._there.clear()
        except BaseException:
            await replicas.stop()
            raise
        replicas.info = one_ready([client.info for client in up.values()])
        if apart is not None and not replicas.info.handed_slots:
            await replicas.stop()
            raise InvalidRequest("--disaggregate hands over what is cached, and there is no cache")
        replicas._dispatch = Dispatch(
            count,
            replicas.info,
            lambda at: replicas._clients[at].send(TellCache()),
            replicas._digest_key,
            0 if apart is None else apart.prefill,
        )
        for at in range(count) if meeting is not None else ():
            replicas._dispatch.down(at)
        if apart is not None:
            replicas._handover = Handover(
                apart, replicas._dispatch, replicas._clients, replicas.info.block_size
            )
        for tell in replicas._early:
            tell(replicas._dispatch)
        return replicas

    async def _start_one(self, config: EngineConfig, at: int) -> EngineClient:
        siblings = ReplicaContext(
            at,
            self._count,
            self._digest_key,
            lambda message: self._tell(partial(Dispatch.reported, at=at, message=message)),
            partial(self._died, at),
            partial(self._returned, at),
            partial(self._gone_for_good, at),
            self._forgets,
            self._suspensions,
            self.next_rid,
            self._transfer,
        )
        place = None
        if self._meeting is not None:
            wanted, leave = partial(self._holds, at), partial(self._leave, at)
            prefill = self._apart is not None and at >= self._count - self._apart.prefill
            place = RemotePlace(self._meeting, at, wanted, leave, prefill)
        return await EngineClient.start(config, siblings=siblings, place=place)

    # ------------------------------------------------------------ requests

    @property
    def healthy(self) -> bool:
        """Whether a message came recently from one of the engines."""
        return any(client.healthy for client in self._clients)

    def submit(self, request: EngineRequest, on_update: Callable[[EngineOutput], None]) -> None:
        """Submit at the engine with the lowest cost; see `EngineClient.submit`."""
        assert self._dispatch is not None
        if self._handover is not None and self._handover.takes(request):
            self._handover.submit(request, on_update)
            return
        at = self._dispatch.place(request)
        try:
            self._clients[at].submit(request, partial(_pass_on, self._dispatch, on_update))
        except RootlaceError:
            self._dispatch.hear(EngineOutput(request.rid, finish="error"))
            raise

    def abort(self, rids: Iterable[int]) -> None:
        """See `EngineClient.abort`."""
        assert self._dispatch is not None
        by_replica: dict[int, list[int]] = {}
        for rid in rids:
            if self._handover is not None:
                self._handover.abort(rid)
            if (at := self._dispatch.where(rid)) is not None:
                by_replica.setdefault(at, []).append(rid)
        for at, ids in by_replica.items():
            self._clients[at].abort(ids)

    # ------------------------------------------------------------ all of them

    def release_program(self, program: str, wanted: bool = False) -> None:
        """See `EngineClient.release_program`."""
        self._tell(partial(Dispatch.program_ended, program=program))
        for client in self._clients:
            client.release_program(program, wanted)

    def forget_namespace(self, namespace: str) -> None:
        """See `EngineClient.forget_namespace`."""
        for client in self._clients:
            client.forget_namespace(namespace)

    def pause(self, paused: bool) -> None:
        """See `EngineClient.pause`."""
        for client in self._clients:
            client.pause(paused)

    async def flush(self) -> None:
        """See `EngineClient.flush`; engines that do not answer flush on their return."""
        await all_answers(self._up, lambda engine: engine.flush())

    async def stats(self) -> dict[str, Any]:
        """Return the sums of all counters, and each engine's own as `replicas`. Raises
        ServerUnavailable if none answers."""
        assert self._dispatch is not None
        engines = self._up
        answers = await all_answers(engines, lambda engine: engine.stats())
        by_replica = [{"replica": at, "up": at in answers, **answers.get(at, {})} for at in engines]
        apart = {} if self._handover is None else self._handover.counters()
        return {**sum_of(answers), "replicas": by_replica, **self._dispatch.counters(), **apart}

    async def ask(self, kind: Callable[..., ToEngine], *fields: Any) -> Any:
        """See `EngineClient.ask`; the answer covers all engines, or the engine in question. Raises
        ServerUnavailable if no engine answers."""
        if kind is GetTree:
            return await self._tree(*fields)
        # Engines that are down, or away, must drop prompts that they would pin again.
        engines = dict(enumerate(self._clients)) if kind is Unpin else self._up
        answers = await all_answers(engines, lambda engine: engine.ask(kind, *fields))
        if kind is Explain:
            return max(answers.values(), key=lambda report: report.matched)
        if kind is GetPins:
            return self._ids.pins(answers)
        assert kind is Unpin
        return any(answers.values())

    async def _tree(self, namespace: str | None, under: int, limit: int) -> TreePage:
        engines, node = self._up, 0
        if under:
            at, node = self._ids.whose(under)
            engines = {at: engines[at]} if at in engines else {}
        else:
            limit = max(limit // max(len(engines), 1), 1)
        answers = await all_answers(
            engines, lambda engine: engine.ask(GetTree, namespace, node, limit)
        )
        return self._ids.page(answers, whole=not under)

    @property
    def _up(self) -> dict[int, EngineClient]:
        """Engines by number; where engines come and go, only the engines present."""
        every = dict(enumerate(self._clients))
        if self._meeting is None:
            return every
        return {at: client for at, client in every.items() if client.healthy}

    async def stop(self) -> None:
        """Stop all engines; whatever still runs gets `finish="abort"`."""
        for at in list(self._leaving):
            self._left(at)
        self._tell(Dispatch.close)
        if self._handover is not None:
            self._handover.close()
        await asyncio.gather(*(client.stop() for client in self._clients))
        self._forgets.close()
        if self._transfer is not None and self._transfer.memory >= 0:
            os.close(self._transfer.memory)
            self._transfer = None

    # ------------------------------------------------------------ engines that come and go

    def _leave(self, at: int) -> None:
        """Give an engine nothing new, and end the engine once it holds nothing. Idempotent."""
        if at in self._leaving:
            return
        log.warning("replica %d is to leave", at)
        self._tell(partial(Dispatch.down, at=at))

        async def wait() -> None:
            while self._holds(at):
                await asyncio.sleep(_LOOK_SECONDS)
            self._clients[at].send(Stop())

        self._leaving[at] = asyncio.create_task(wait())

    def _left(self, at: int) -> None:
        """Note that an engine has ended, one way or another."""
        if (waiting := self._leaving.pop(at, None)) is not None:
            waiting.cancel()

    def _died(self, at: int, left: list[PendingRequest]) -> None:
        """Have other replicas continue the requests that a dead engine `left`."""
        self._left(at)
        self._tell(partial(Dispatch.down, at=at))
        self._move(at, left)

    def _move(self, at: int, left: list[PendingRequest]) -> None:
        """Continue requests of a lost replica at other replicas."""
        if left:
            log.warning("replica %d is down: %d requests go on elsewhere", at, len(left))
        for pending in left:
            assert self._dispatch is not None
            if self._handover is not None:
                pending = self._handover.instead(pending)
            target = self._dispatch.place(pending.resumed())
            if len(self._gone) == self._count:  # the requests end with the last replica
                target = at
            self._clients[target].adopt(pending)

    def _returned(self, at: int) -> None:
        self._there.set()
        self._tell(partial(Dispatch.back, at=at))
        # Nobody received the replica's earlier reports of its cache: ask for the whole cache.
        self._tell(lambda _: self._clients[at].send(TellCache()))
        for other, client in enumerate(self._clients):  # nobody may ever come there
            self._move(other, client.leave())

    def _holds(self, at: int) -> bool:
        return self._dispatch is not None and self._dispatch.holds(at)

    def _gone_for_good(self, at: int, reason: str) -> None:
        self._gone.add(at)
        self._tell(partial(Dispatch.down, at=at, for_good=True))
        log.error("replica %d is gone for good: %s", at, reason)
        if len(self._gone) == self._count and self._on_exit is not None:
            self._on_exit(reason)

    def _tell(self, what: Callable[[Dispatch], None]) -> None:
        if self._dispatch is None:
            self._early.append(what)
        else:
            what(self._dispatch)


def _pass_on(
    dispatch: Dispatch, on_update: Callable[[EngineOutput], None], update: EngineOutput
) -> None:
    dispatch.hear(update)
    on_update(update)


async def _all_or_none(starting: Sequence[Any]) -> list[EngineClient]:
    """Engines once all have started; where one cannot, the others are stopped, and what it raised
    is raised."""
    tasks = [asyncio.ensure_future(one) for one in starting]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        for engine in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(engine, EngineClient):
                await engine.stop()
        raise
