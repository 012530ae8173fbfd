"""What all sessions share: the engine, the tokenizer, limits and counters."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec
import numpy as np

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.contracts.messages import (
    EngineOutput,
    EngineRequest,
    Explain,
    Ready,
    ToEngine,
)
from rootlace.runtime.server.auth import Account, client_of, origin_of
from rootlace.runtime.server.cache_lint import PromptLint, with_texts
from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.metrics import Metrics
from rootlace.runtime.server.model_texts import name_of
from rootlace.runtime.server.server_state import ServerState, Turn, kept_for_others
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.runtime.server.tool_parsers.listing import chat_format
from rootlace.wire.errors import (
    Cancelled,
    InvalidRequest,
    Overloaded,
    RootlaceError,
    from_code,
)
from rootlace.wire.protocol import CacheReport, ModelInfo, Scope

# Deliveries ---------------------------------------------------------------------------------------
#
# Handing events over, for all sessions in one callback of the event loop.


log = logging.getLogger(__name__)


class Deliveries:
    """Calls those who have something to deliver, once in a turn of the event loop.

    A step of the engine has events for hundreds of sessions: a callback each would cost as much as
    the events.
    """

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def soon(self, deliver: Callable[[], None]) -> None:
        """Call `deliver` in the next turn; what it raises is logged."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(deliver)

    def _run(self) -> None:
        due, self._due = self._due, []
        for deliver in due:
            try:
                deliver()
            except Exception:
                log.exception("events were not delivered")


# Core ---------------------------------------------------------------------------------------------


T = TypeVar("T")
P = ParamSpec("P")

# Texts up to this many characters (well below a millisecond of work) are tokenized in place; a
# thread's round trip costs more.
INLINE_CHARACTERS = 1024


class Engine(Protocol):
    """What the gateway needs of `rootlace.runtime.engine.client.EngineClient`."""

    @property
    def info(self) -> Ready: ...

    @property
    def healthy(self) -> bool: ...

    def next_rid(self) -> int: ...

    def submit(self, request: EngineRequest, on_update: Callable[[EngineOutput], None]) -> None:
        """Raises ClientSuspended."""

    def abort(self, rids: Iterable[int]) -> None: ...

    def release_program(self, program: str, wanted: bool = False) -> None: ...

    def forget_namespace(self, namespace: str) -> None: ...

    def pause(self, paused: bool) -> None: ...

    async def flush(self) -> None: ...

    async def stats(self) -> dict[str, Any]: ...

    async def ask(self, kind: Callable[..., ToEngine], *fields: Any) -> Any: ...

    async def stop(self) -> None: ...


class Owner(Protocol):
    """A program or an HTTP request; `end` is told why the model goes."""

    end: Callable[[RootlaceError], None]


class Core:
    """Engine, tokenizer and chat template of one model, its limits, and counters.

    `eos_ids` end a generation unless it ignores them. `owners`, `branch_count` and `branches_of`
    are kept by `OpenSequences`.
    """

    def __init__(
        self,
        config: GatewayConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        chat: ChatTemplate,
        eos_ids: Iterable[int] = (),
        house: ServerState | None = None,
    ) -> None:
        """`house`: what it shares with other models, if there are any."""
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.chat = chat
        self.eos_ids = frozenset(eos_ids)
        info = engine.info
        refuse = ""
        if config.tools == "template-only":
            refuse = f"the chat template of {name_of(config)!r} has no place for tools"
        self.model_info = ModelInfo(
            name=name_of(config),
            path=config.model,
            context_length=info.context_length,
            vocab_size=info.vocab_size,
            capacity_tokens=info.capacity_tokens,
            block_size=info.block_size,
            chat=chat_format(chat, chat.tool_use or chat, refuse),
            adapters=info.adapters,
            labels=info.labels,
        )
        self.lint = PromptLint(lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
        own = ServerState(config) if house is None else house
        self.keys, self.drain, self.spans = own.keys, own.drain, own.spans
        self.metrics = own.metrics if house is None else Metrics()
        self.last_token = -math.inf
        """When the engine last gave a token, by `time.monotonic`."""
        self.own_pooling = "last"
        """What vector of a text the model was trained for, as `ModelSource` says it."""
        self.deliveries = Deliveries()
        self.numbers = itertools.count(1)
        """Of programs and HTTP requests."""
        self.owners: set[Owner] = set()
        """Programs and HTTP requests that have this model's sequences."""
        self.branch_count = 0
        self.branches_of: Counter[str] = Counter()
        """By client."""
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")

    @property
    def healthy(self) -> bool:
        return self.engine.healthy

    @property
    def session_count(self) -> int:
        """Programs that are connected and HTTP requests that compute."""
        return len(self.owners)

    def check_share(self, client: str) -> None:
        """Raises Overloaded where of the last eighth of all branches, which is for clients that
        have opened less than the mean, this one would take some."""
        count, most = self.branch_count, self.config.max_branches
        own, clients = self.branches_of[client], len(self.branches_of)
        if count < most and kept_for_others(own, clients, count, most):
            raise Overloaded(
                f"{own} branches of this client are open: the last ones are for others"
            )

    @cached_property
    def max_prompt(self) -> int:
        """The longest sequence: the context window, or the KV cache where it is smaller."""
        return min(self.model_info.context_length, self.model_info.capacity_tokens)

    def check_adapter(self, name: str) -> None:
        """Raises InvalidRequest unless there is an adapter of this name, or none is asked for."""
        known = self.model_info.adapters
        if name and name not in known:
            there = f"there are {', '.join(known)}" if known else "there are none"
            raise InvalidRequest(f"the adapter {name!r} is not loaded: {there}")

    async def status(self, account: Account | None = None) -> dict[str, Any]:
        """Counters of the engine and of the gateway; for a key, its own alone: from the others' it
        could see what other keys do."""
        if account is not None:
            return {**account.counted, "branches": self.branches_of[client_of(account, "")]}
        return {
            **await self.engine.stats(),
            "sessions": self.session_count,
            "branches": self.branch_count,
        }

    def shown_path(self, account: Account | None) -> str:
        """The model's path for the operator; for a key its name, for paths tell of the machine."""
        return self.model_info.path if account is None else self.model_info.name

    async def flush(self) -> None:
        """Forget every cached prefix that no running request uses."""
        await self.engine.flush()

    def report_scope(self) -> Scope:
        """What a report may say of the cache. Raises InvalidRequest if that is nothing."""
        scope = self.config.cache_reports
        if scope == "off":
            raise InvalidRequest("this server does not explain its cache (cache_reports is off)")
        # What other keys hold is not for whoever has one.
        return "own" if self.config.keys_file else scope

    async def explain(self, prompt: np.ndarray, namespace: str, adapter: str = "") -> CacheReport:
        """How far `prompt` (int32) is cached, and why no further."""
        report = await self.engine.ask(Explain, prompt, namespace, adapter, self.report_scope())
        return with_texts(report, prompt, self.tokenizer)

    async def tokenize(
        self, characters: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call the tokenizer on that many characters: here if they are few, else in a thread."""
        if characters <= INLINE_CHARACTERS:
            return call(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    def close(self) -> None:
        """End the threads; the engine is the caller's to stop."""
        self._threads.shutdown(wait=False, cancel_futures=True)


# Requests -----------------------------------------------------------------------------------------
#
# The engine requests of one operation, which end together or are aborted together.


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
        self._client, self._origin = client_of(account, source), origin_of(account, source)
        self._running: set[int] = set()
        self._stopped = False
        self._all_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(
        self, make: Callable[[int], EngineRequest], on_update: Callable[[EngineOutput], int | None]
    ) -> int:
        """Submit `make(rid)`. To end the request early, `on_update` returns how many tokens of the
        update it does not want. Raises ClientSuspended."""
        rid = self._engine.next_rid()
        self._running.add(rid)
        account = self._account
        most = None if account is None else account.entry.max_pins
        request = msgspec.structs.replace(
            make(rid), client=self._client, origin=self._origin, max_pins=most
        )
        try:
            self._engine.submit(request, partial(self._pass_on, on_update))
        except BaseException:
            self._running.discard(rid)
            self._abort()  # those before it, which nobody will wait for
            raise
        if self._account is not None:
            self._account.used("prompt", len(request.token_ids) - self._paid)
            self._paid = 0
        return rid

    async def add_all(
        self,
        asked: Iterable[
            tuple[Callable[[int], EngineRequest], Callable[[EngineOutput], int | None]]
        ],
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

    def stop(self) -> None:
        """End all requests; each has a last update with the tokens that came until then."""
        self._stopped = True
        self._engine.abort(self._running - {_MORE})

    def _abort(self) -> None:
        running, self._running = self._running - {_MORE}, set()
        if running:
            self._engine.abort(running)

    def _pass_on(
        self, on_update: Callable[[EngineOutput], int | None], update: EngineOutput
    ) -> None:
        if update.rid not in self._running:
            return
        unwanted: int | None = None
        try:
            if update.finish == "error":
                raise from_code(update.code, update.error)
            if update.finish == "abort" and not self._stopped:
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
