"""The engine requests of one operation, which end together or are aborted together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import msgspec

from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.gateway.branches.core import Engine
from rootlace.runtime.gateway.keys.account import Account, client_of
from rootlace.runtime.gateway.large import Turn
from rootlace.wire.errors import Cancelled, from_code

_MORE = -1
"""In the place of those that are still to be added."""


class Requests:
    """Submits requests, passes on their updates, and waits for all. If one fails, all end.

    Their tokens are charged to the `account`, also those of requests that do not end well, but not
    what came behind an answer's end, nor what was computed for a wrong prediction. Without one,
    they take their turns as those of `source`. `paid`: so many tokens of the first prompt were
    charged before.
    """

    def __init__(
        self, engine: Engine, account: Account | None = None, source: str = "", paid: int = 0
    ) -> None:
        self._engine = engine
        self._account = account
        self._paid = paid
        self._client = client_of(account, source)
        self._running: set[int] = set()
        self._all_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, make: Callable[[int], Request], on_update: Callable[[Update], int | None]) -> int:
        """Submit `make(rid)`. To end the request early, `on_update` returns how many tokens of the
        update it does not want. Raises ClientSuspended."""
        rid = self._engine.next_rid()
        self._running.add(rid)
        account = self._account
        most = None if account is None else account.entry.max_pins
        request = msgspec.structs.replace(make(rid), client=self._client, max_pins=most)
        self._engine.submit(request, partial(self._pass_on, on_update))
        if self._account is not None:
            self._account.used("prompt", len(request.token_ids) - self._paid)
            self._paid = 0
        return rid

    async def add_all(
        self,
        asked: Iterable[tuple[Callable[[int], Request], Callable[[Update], int | None]]],
        wait: Callable[[asyncio.Future[None]], Awaitable[None]],
    ) -> None:
        """`add` each, and let others have their turns in between, by `wait`. Where it raises, all
        are aborted; where one fails meanwhile, no more are added, and `finish` raises."""
        self._running.add(_MORE)
        try:
            turn = Turn()
            for make, on_update in asked:
                if self._all_ended.done():
                    break
                self.add(make, on_update)
                if turn.over:
                    await wait(turn.next())
        except BaseException:
            self._abort()
            raise
        self._running.discard(_MORE)

    async def finish(self, wait: Callable[[asyncio.Future[None]], Awaitable[None]]) -> None:
        """Wait until every request has ended, by `wait`. Raises the error of the first that failed.

        If the wait ends early (a failure, the branch interrupted), the rest is aborted.
        """
        try:
            if self._running:
                await wait(self._all_ended)
        finally:
            self._abort()

    def _abort(self) -> None:
        running, self._running = self._running - {_MORE}, set()
        if running:
            self._engine.abort(running)

    def _pass_on(self, on_update: Callable[[Update], int | None], update: Update) -> None:
        if update.rid not in self._running:
            return
        unwanted: int | None = None
        try:
            if update.finish == "error":
                raise from_code(update.code, update.error)
            if update.finish == "abort":
                raise Cancelled("the engine ended the request")
            unwanted = on_update(update)
        except Exception as error:
            self._fail(error)
            return
        finally:
            if self._account is not None and update.token_ids:
                self._account.used("completion", len(update.token_ids) - (unwanted or 0))
        if update.finish is None and unwanted is None:
            return
        self._running.discard(update.rid)
        if update.finish is None:
            self._engine.abort((update.rid,))
        if not self._running and not self._all_ended.done():
            self._all_ended.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self._all_ended.done():
            self._all_ended.set_exception(error)
