"""One operation behind each of several prompts, in a session of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice

import msgspec

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.errors import named
from rootlace.runtime.gateway.http.handling import remaining
from rootlace.runtime.gateway.http.reply_headers import note_usage
from rootlace.runtime.gateway.http.source import source
from rootlace.runtime.gateway.keys.account import admitted, caller
from rootlace.runtime.gateway.large import Turn
from rootlace.wire.errors import from_code
from rootlace.wire.handling import PLAIN, Handling
from rootlace.wire.protocol import (
    Append,
    Close,
    Event,
    Explain,
    Explained,
    Failed,
    Generate,
    Generated,
    Open,
    Part,
    Select,
    Selected,
)

_OPS = 4

Result = Explained | Generated | Selected
Ask = Callable[[int, int], Explain | Generate | Select]
"""Makes the operation, given its number and its branch."""


async def behind_prompts(
    gateway: Gateway,
    asked: Iterable[tuple[tuple[Part, ...], Ask]],
    count: int,
    *,
    namespace: str,
    adapter: str,
    handling: Handling = PLAIN,
    at_once: int = 1,
    free: bool = False,
    param: Callable[[int], str] | None = None,
    choices: str = "choices",
) -> list[Result]:
    """The results, in the order of the `count` prompts. Raises the first error.

    `at_once` prompts at most are under way, so that other requests find room in the queue. `free`:
    nothing is computed, so it is no request of the key's quota. The timeout of `handling` is that
    of all together. `param` names the field that holds a prompt, and `choices` that of choices.
    """
    events: asyncio.Queue[list[Event]] = asyncio.Queue()
    account = caller() if free else admitted()
    session = gateway.open_session(
        events.put_nowait, client="http", account=account, source=source()
    )
    found: dict[int, Result] = {}
    waiting = enumerate(asked)
    clock = asyncio.get_running_loop().time
    started = clock()
    try:
        begun = 0
        turn = Turn()
        while len(found) < count:
            for index, (parts, ask) in islice(waiting, at_once - (begun - len(found))):
                if turn.over:
                    await turn.next()
                begun += 1
                op, branch = index * _OPS + 1, index + 1
                asked_for = ask(op + 2, branch)
                if not isinstance(asked_for, Explain):
                    left = remaining(handling, clock() - started)
                    asked_for = msgspec.structs.replace(asked_for, handling=left)
                session.handle(
                    [
                        Open(
                            op,
                            branch,
                            namespace=namespace,
                            adapter=adapter,
                            share=handling.cache.share,
                        ),
                        Append(op + 1, branch, parts),
                        asked_for,
                        Close(op + 3, branch),
                    ]
                )
            for event in await events.get():
                index = (event.op - 1) // _OPS
                if isinstance(event, Failed):
                    where = param(index) if param is not None and event.op > 0 else None
                    raise named(from_code(event.code, event.message), where, choices)
                if isinstance(event, Generated | Selected):
                    note_usage(event.usage, None)
                if isinstance(event, Result):
                    found[index] = event
    finally:
        session.close()
    return [found[index] for index in range(count)]
