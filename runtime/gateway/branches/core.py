"""What all sessions share: the engine, the tokenizer, limits and counters."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.contracts.messages import Explain, Ready, ToEngine
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.gateway.branches.cache_texts import with_texts
from rootlace.runtime.gateway.branches.deliveries import Deliveries
from rootlace.runtime.gateway.branches.house import House
from rootlace.runtime.gateway.branches.model_name import name_of
from rootlace.runtime.gateway.formats.listing import chat_format
from rootlace.runtime.gateway.lint.prompt_lint import PromptLint
from rootlace.runtime.gateway.metrics import Metrics
from rootlace.runtime.gateway.shares import kept_for_others
from rootlace.runtime.gateway.tokens.chat import ChatTemplate
from rootlace.runtime.gateway.tokens.tokenizer import Tokenizer
from rootlace.wire.cache_report import CacheReport, Scope
from rootlace.wire.errors import InvalidRequest, Overloaded
from rootlace.wire.protocol import ModelInfo

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

    def submit(self, request: Request, on_update: Callable[[Update], None]) -> None:
        """Raises ClientSuspended."""

    def abort(self, rids: Iterable[int]) -> None: ...

    def release_program(self, program: str, wanted: bool = False) -> None: ...

    def forget_namespace(self, namespace: str) -> None: ...

    def pause(self, paused: bool) -> None: ...

    async def flush(self) -> None: ...

    async def stats(self) -> dict[str, Any]: ...

    async def ask(self, kind: Callable[..., ToEngine], *fields: Any) -> Any: ...

    async def stop(self) -> None: ...


class Core:
    """Engine, tokenizer and chat template of one model, its limits, and counters.

    `eos_ids` end a generation unless it ignores them. `session_count`, `branch_count` and
    `branches_of` are kept by the sessions.
    """

    def __init__(
        self,
        config: GatewayConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        chat: ChatTemplate,
        eos_ids: Iterable[int] = (),
        house: House | None = None,
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
        own = House(config) if house is None else house
        self.keys, self.drain, self.spans = own.keys, own.drain, own.spans
        self.metrics = own.metrics if house is None else Metrics()
        self.last_token = -math.inf
        """When the engine last gave a token, by `time.monotonic`."""
        self.own_pooling = "last"
        """What vector of a text the model was trained for, as `ModelSource` says it."""
        self.deliveries = Deliveries()
        self.session_count = 0
        self.branch_count = 0
        self.branches_of: Counter[str] = Counter()
        """By client."""
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")

    @property
    def healthy(self) -> bool:
        return self.engine.healthy

    def check_share(self, client: str) -> None:
        """Raises Overloaded where of the last eighth of all branches, which is for clients that
        have opened less than the mean, this one would take some."""
        count, most = self.branch_count, self.config.max_branches
        own, clients = self.branches_of[client], len(self.branches_of)
        if count < most and kept_for_others(own, clients, count, most):
            raise Overloaded(
                f"{own} branches of this client are open: the last ones are for others"
            )

    @property
    def max_prompt(self) -> int:
        """The longest sequence: the context window, or the KV cache where it is smaller."""
        return min(self.model_info.context_length, self.model_info.capacity_tokens)

    def check_adapter(self, name: str) -> None:
        """Raises InvalidRequest unless there is an adapter of this name, or none is asked for."""
        known = self.model_info.adapters
        if name and name not in known:
            there = f"there are {', '.join(known)}" if known else "there are none"
            raise InvalidRequest(f"the adapter {name!r} is not loaded: {there}")

    async def status(self) -> dict[str, Any]:
        """Counters of the engine and of the gateway."""
        return {
            **await self.engine.stats(),
            "sessions": self.session_count,
            "branches": self.branch_count,
        }

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
