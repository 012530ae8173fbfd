"""One answer made of those of several engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from rootlace.runtime.contracts.messages import Ready
from rootlace.runtime.contracts.tree_page import PinnedPrefix, TreeNode, TreePage
from rootlace.runtime.engine.client import EngineClient
from rootlace.wire.cache_report import CacheReport
from rootlace.wire.errors import ServerUnavailable


def one_ready(all_of_them: Sequence[Ready]) -> Ready:
    """What holds wherever a request goes."""
    return msgspec.structs.replace(
        all_of_them[0],
        num_blocks=min(ready.num_blocks for ready in all_of_them),
        capacity_tokens=min(ready.capacity_tokens for ready in all_of_them),
    )


async def all_answers(
    clients: Sequence[EngineClient], ask: Callable[[EngineClient], Awaitable[Any]]
) -> dict[int, Any]:
    """What each says that answers, by its number. Raises ServerUnavailable if none does, and
    whatever else one raises."""
    found = await asyncio.gather(*(ask(client) for client in clients), return_exceptions=True)
    answered: dict[int, Any] = {}
    for at, answer in enumerate(found):
        if not isinstance(answer, BaseException):
            answered[at] = answer
        elif not isinstance(answer, ServerUnavailable):
            raise answer
    if not answered:
        raise ServerUnavailable("no engine is running")
    return answered


def sum_of(stats: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Counters of all engines together, which were asked for by their numbers."""
    total: dict[str, Any] = {}
    for counters in stats.values():
        for name, value in counters.items():
            total[name] = total.get(name, 0) + value
    return total


def best_report(reports: Sequence[CacheReport]) -> CacheReport:
    """That of the engine which has most of the prompt."""
    return max(reports, key=lambda report: report.matched)


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
