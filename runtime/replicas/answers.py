"""One answer made of those of several engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rootlace.runtime.contracts.messages import (
    Explain,
    GetPins,
    GetTree,
    Ready,
    ToEngine,
    Unpin,
)
from rootlace.runtime.contracts.tree_page import PinnedPrefix, TreeNode, TreePage
from rootlace.wire.errors import ServerUnavailable

PATIENCE_SECONDS = 5.0
"""An engine that has not answered so long after others is left out: a step may take seconds, who
reads metrics waits for ten of them as a rule, and one that hangs is killed after twenty."""


class Asked(Protocol):
    """What answers questions: an engine's client."""

    async def ask(self, kind: Callable[..., ToEngine], *fields: Any) -> Any: ...

    async def flush(self) -> None: ...

    async def stats(self) -> dict[str, Any]: ...


class Asking:
    """Asks several engines, given by their numbers (less than `most`), as if they were one. Each
    method raises ServerUnavailable if none answers."""

    def __init__(self, most: int) -> None:
        self._ids = NodeIds(most)

    async def flush(self, engines: Mapping[int, Asked]) -> None:
        """Those that do not answer forget it when they are back (`Forgets`)."""
        await all_answers(engines, lambda engine: engine.flush())

    async def stats(self, engines: Mapping[int, Asked]) -> dict[str, Any]:
        """The sums of all counters, and each engine's own as `replicas`."""
        found = await all_answers(engines, lambda engine: engine.stats())
        own = [{"replica": at, "up": at in found, **found.get(at, {})} for at in engines]
        return {**sum_of(found), "replicas": own}

    async def ask(
        self, engines: Mapping[int, Asked], kind: Callable[..., ToEngine], *fields: Any
    ) -> Any:
        """The answer is of all engines, or of the one it is about."""
        if kind is GetTree:
            return await self._tree(engines, *fields)
        found = await all_answers(engines, lambda engine: engine.ask(kind, *fields))
        if kind is Explain:
            return max(found.values(), key=lambda report: report.matched)
        if kind is GetPins:
            return self._ids.pins(found)
        assert kind is Unpin
        return any(found.values())

    async def _tree(
        self, engines: Mapping[int, Asked], namespace: str | None, under: int, limit: int
    ) -> TreePage:
        if under:
            at, node = self._ids.whose(under)
            own = {at: engines[at]} if at in engines else {}
            found = await all_answers(
                own, lambda engine: engine.ask(GetTree, namespace, node, limit)
            )
            return self._ids.page(found, whole=False)
        each = max(limit // max(len(engines), 1), 1)
        found = await all_answers(engines, lambda engine: engine.ask(GetTree, namespace, 0, each))
        return self._ids.page(found, whole=True)


async def all_answers(
    engines: Mapping[int, Asked], ask: Callable[[Asked], Awaitable[Any]]
) -> dict[int, Any]:
    """What each says that answers, by its number; one that stands still is not waited for where
    another one answers. Raises ServerUnavailable if none does, and whatever else one raises."""
    asked = {at: asyncio.ensure_future(ask(engine)) for at, engine in engines.items()}
    answered: dict[int, Any] = {}
    waiting = set(asked.values())
    try:
        while waiting:
            patience = PATIENCE_SECONDS if answered else None
            done, waiting = await asyncio.wait(
                waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            for at, answer in asked.items():
                if answer in done and not isinstance(answer.exception(), ServerUnavailable):
                    answered[at] = answer.result()
    finally:
        for answer in waiting:
            answer.cancel()
    if not answered:
        raise ServerUnavailable("no engine is running")
    return dict(sorted(answered.items()))


def one_ready(all_of_them: Sequence[Ready]) -> Ready:
    """What holds wherever a request goes."""
    return msgspec.structs.replace(
        all_of_them[0],
        num_blocks=min(ready.num_blocks for ready in all_of_them),
        capacity_tokens=min(ready.capacity_tokens for ready in all_of_them),
    )


def sum_of(stats: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Counters of all engines together, which were asked for by their numbers."""
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
        """The engine, and the id there."""
        return number % self._replicas, number // self._replicas

    def page(self, pages: Mapping[int, TreePage], whole: bool) -> TreePage:
        """One page of those of several engines, which say of the `whole` tree or of a part."""
        nodes = [self._node(one, at) for at, page in pages.items() for one in page.nodes]
        found = TreePage(tuple(nodes), all(page.complete for page in pages.values()))
        if not whole:
            return found
        return msgspec.structs.replace(
            found,
            total=sum(page.total or 0 for page in pages.values()),
            tokens=sum(page.tokens or 0 for page in pages.values()),
        )

    def pins(self, found: Mapping[int, Sequence[PinnedPrefix]]) -> tuple[PinnedPrefix, ...]:
        """Those that end first come first. The same prompt may be pinned in several caches."""
        every = [
            msgspec.structs.replace(pin, node=self._number(pin.node, at))
            for at, pins in found.items()
            for pin in pins
        ]
        return tuple(sorted(every, key=lambda pin: pin.seconds_left))

    def _node(self, node: TreeNode, at: int) -> TreeNode:
        return msgspec.structs.replace(
            node,
            id=self._number(node.id, at),
            parent=self._number(node.parent, at),
            replica=at,
        )

    def _number(self, node: int, at: int) -> int:
        return node * self._replicas + at if node else 0
