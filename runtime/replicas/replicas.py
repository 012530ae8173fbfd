"""Several engines of one model in the place of one."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.messages import (
    Explain,
    Flush,
    GetPins,
    GetTree,
    Ready,
    TellCache,
    ToEngine,
    Unpin,
)
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.tree_page import TreePage
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.engine.client import EngineClient
from rootlace.runtime.engine.client.in_flight import Submitted
from rootlace.runtime.engine.client.siblings import Siblings
from rootlace.runtime.replicas.answers import (
    NodeIds,
    all_answers,
    best_report,
    one_ready,
    sum_of,
)
from rootlace.runtime.replicas.dispatch import Dispatch

log = logging.getLogger(__name__)


class Replicas:
    """Engine processes of one model: what `EngineClient` is, of several.

    A request goes where it costs least by the router. When an engine dies, what it ran goes on at
    another one at once, from the tokens that it had; what two engines died with waits for its own
    to be started again, so that no request ends more than two (`InFlight`). An engine that is gone
    for good is missed by nobody while there is another one; with the last one, `on_exit` is called.
    """

    info: Ready

    def __init__(self, count: int, on_exit: Callable[[str], None] | None) -> None:
        self._count = count
        self._on_exit = on_exit
        self._clients: list[EngineClient] = []
        self._dispatch: Dispatch | None = None
        """None until all are there."""
        self._early: list[Callable[[Dispatch], None]] = []
        """What it is to be told then."""
        self._gone: set[int] = set()
        """Those that are not started again."""
        self._digest_key = secrets.token_bytes(16)
        self._ids = NodeIds(count)
        self._next_rid = 0

    @classmethod
    async def start(
        cls, config: EngineConfig, count: int, on_exit: Callable[[str], None] | None = None
    ) -> Replicas:
        """Start so many engines: the first one alone, which may leave its packed weights for the
        others, then these. Raises what `EngineClient.start` does."""
        replicas = cls(count, on_exit)
        try:
            replicas._clients = [await replicas._start_one(config, 0)]
            others = [replicas._start_one(config, at) for at in range(1, count)]
            replicas._clients += await _all_or_none(others)
        except BaseException:
            await replicas.stop()
            raise
        replicas.info = one_ready([client.info for client in replicas._clients])
        replicas._dispatch = Dispatch(
            count,
            replicas.info,
            lambda at: replicas._clients[at].send(TellCache()),
            replicas._digest_key,
        )
        for tell in replicas._early:
            tell(replicas._dispatch)
        return replicas

    async def _start_one(self, config: EngineConfig, at: int) -> EngineClient:
        siblings = Siblings(
            at,
            self._count,
            self._digest_key,
            lambda message: self._tell(partial(Dispatch.told, at=at, message=message)),
            partial(self._died, at),
            lambda: self._tell(partial(Dispatch.back, at=at)),
            partial(self._gone_for_good, at),
        )
        return await EngineClient.start(config, siblings=siblings)

    # ------------------------------------------------------------ requests

    @property
    def healthy(self) -> bool:
        """Whether one of the engines was heard of lately."""
        return any(client.healthy for client in self._clients)

    def next_rid(self) -> int:
        self._next_rid += 1
        return self._next_rid

    def submit(self, request: Request, on_update: Callable[[Update], None]) -> None:
        """As `EngineClient.submit`, at the engine where it costs least."""
        assert self._dispatch is not None
        at = self._dispatch.place(request)
        self._clients[at].submit(request, partial(_pass_on, self._dispatch, on_update))

    def abort(self, rids: Iterable[int]) -> None:
        """As `EngineClient.abort`."""
        assert self._dispatch is not None
        by_replica: dict[int, list[int]] = {}
        for rid in rids:
            if (at := self._dispatch.where(rid)) is not None:
                by_replica.setdefault(at, []).append(rid)
        for at, own in by_replica.items():
            self._clients[at].abort(own)

    # ------------------------------------------------------------ all of them

    def release_program(self, program: str, wanted: bool = False) -> None:
        """As `EngineClient.release_program`."""
        self._tell(partial(Dispatch.program_ended, program=program))
        for client in self._clients:
            client.release_program(program, wanted)

    def forget_namespace(self, namespace: str) -> None:
        """As `EngineClient.forget_namespace`."""
        for client in self._clients:
            client.forget_namespace(namespace)

    def pause(self, paused: bool) -> None:
        """As `EngineClient.pause`."""
        for client in self._clients:
            client.pause(paused)

    async def flush(self) -> None:
        """As `EngineClient.flush`."""
        await self._ask_all(Flush)

    async def stats(self) -> dict[str, Any]:
        """The sums of all counters, and each engine's own as `replicas`. Raises ServerUnavailable
        if none answers."""
        assert self._dispatch is not None
        found = await all_answers(self._clients, EngineClient.stats)
        own = [{"replica": at, "up": at in found, **found.get(at, {})} for at in range(self._count)]
        return {**sum_of(found), **self._dispatch.counters(), "replicas": own}

    async def ask(self, kind: Callable[..., ToEngine], *fields: Any) -> Any:
        """As `EngineClient.ask`; the answer is of all engines, or of the one it is about."""
        if kind is GetTree:
            return await self._tree(*fields)
        found = await self._ask_all(kind, *fields)
        if kind is Explain:
            return best_report(list(found.values()))
        if kind is GetPins:
            return self._ids.pins(found)
        assert kind is Unpin
        return any(found.values())

    async def _tree(self, namespace: str | None, under: int, limit: int) -> TreePage:
        if under:
            at, node = self._ids.whose(under)
            page = await self._clients[at].ask(GetTree, namespace, node, limit)
            return self._ids.page({at: page}, whole=False)
        each = max(limit // self._count, 1)
        return self._ids.page(await self._ask_all(GetTree, namespace, 0, each), whole=True)

    async def _ask_all(self, kind: Callable[..., ToEngine], *fields: Any) -> dict[int, Any]:
        return await all_answers(self._clients, lambda client: client.ask(kind, *fields))

    async def stop(self) -> None:
        """Stop all engines; whatever still runs gets `finish="abort"`."""
        self._tell(Dispatch.close)
        await asyncio.gather(*(client.stop() for client in self._clients))

    # ------------------------------------------------------------ engines that come and go

    def _died(self, at: int, left: list[Submitted], in_step: Mapping[int, int]) -> None:
        """An engine is down: what `left` it goes on at others."""
        self._tell(partial(Dispatch.down, at=at))
        if left:
            log.warning("replica %d is down: %d requests go on elsewhere", at, len(left))
        for submitted in left:
            assert self._dispatch is not None
            target = self._dispatch.place(submitted.resumed(0))
            if len(self._gone) == self._count:  # they end with the last of all
                target = at
            self._clients[target].adopt(submitted, in_step)

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


def _pass_on(dispatch: Dispatch, on_update: Callable[[Update], None], update: Update) -> None:
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
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, EngineClient):
                await found.stop()
        raise
