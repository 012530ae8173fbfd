"""One operation behind each of several prompts, in a session of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.keys.account import admitted, caller
from rootlace.wire.errors import from_code
from rootlace.wire.protocol import (
    Append,
    Close,
    Event,
    Explained,
    Failed,
    Generated,
    Op,
    Open,
    Part,
    Selected,
)

_OPS = 4

Result = Explained | Generated | Selected
Ask = Callable[[int, int], Op]
"""Makes the operation, given its number and its branch."""


async def behind_prompts(
    gateway: Gateway,
    asked: Iterable[tuple[tuple[Part, ...], Ask]],
    count: int,
    *,
    namespace: str,
    adapter: str,
    at_once: int = 1,
    free: bool = False,
) -> list[Result]:
    """The results, in the order of the `count` prompts. Raises the first error.

    `at_once` prompts at most are under way, so that other requests find room in the queue. `free`:
    nothing is computed, so it is no request of the key's quota.
    """
    events: asyncio.Queue[list[Event]] = asyncio.Queue()
    account = caller() if free else admitted()
    session = gateway.open_session(events.put_nowait, client="http", account=account)
    found: dict[int, Result] = {}
    waiting = enumerate(asked)
    try:
        begun = 0
        while len(found) < count:
            for index, (parts, ask) in islice(waiting, at_once - (begun - len(found))):
                begun += 1
                op, branch = index * _OPS + 1, index + 1
                session.handle(
                    [
                        Open(op, branch, namespace=namespace, adapter=adapter),
                        Append(op + 1, branch, parts),
                        ask(op + 2, branch),
                        Close(op + 3, branch),
                    ]
                )
            for event in await events.get():
                if isinstance(event, Failed):
                    raise from_code(event.code, event.message)
                if isinstance(event, Result):
                    found[(event.op - 1) // _OPS] = event
    finally:
        session.close()
    return [found[index] for index in range(count)]
