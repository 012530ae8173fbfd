"""Served model, for programs and HTTP clients alike: engine, tokenizer, limits, counters."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.server.auth import Account, Asker
from rootlace.runtime.server.cache_lint import PromptLint
from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.server_state import ServerState, plenty
from rootlace.runtime.server.telemetry import Metrics
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.runtime.server.tool_parsers.listing import chat_format
from rootlace.wire.errors import InvalidRequest, ModelNotFound, RootlaceError, ServerUnavailable
from rootlace.wire.protocol import ModelInfo, Scope

if TYPE_CHECKING:
    from rootlace.runtime.engine.client.engine_client import EngineClient
    from rootlace.runtime.replicas.replicas import Replicas

    Engine = EngineClient | Replicas

# Model name ---------------------------------------------------------------------------------------


def name_of(config: GatewayConfig) -> str:
    """Return the chosen name (`served_name`), else the name of the model's folder."""
    path = config.model
    return config.served_name or path.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or path


def model_names(info: ModelInfo) -> list[str]:
    """List the model's name, then one `MODEL:ADAPTER` for each adapter."""
    return [info.name, *(f"{info.name}:{adapter}" for adapter in info.adapters)]


def check_name(info: ModelInfo, name: str | None) -> str:
    """Return the one of `model_names` that is asked for. Raises ModelNotFound for another model."""
    if not name or name in (info.name, info.path, "default"):
        return info.name
    for adapter in info.adapters:
        if name in (f"{info.name}:{adapter}", f"{info.path}:{adapter}", f"default:{adapter}"):
            return f"{info.name}:{adapter}"
    raise not_found(name, model_names(info))


def not_found(name: str, names: list[str]) -> ModelNotFound:
    return ModelNotFound(
        f"the model {name!r} does not exist; this server has {', '.join(map(repr, names))}"
    )


# Deliveries ---------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


class Deliveries:
    """Batch of delivery callbacks: calls each of them once in a turn of the event loop.

    A step of the engine has events for hundreds of sessions. A loop callback for each session would
    cost as much as the events.
    """

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def soon(self, deliver: Callable[[], None]) -> None:
        """Call `deliver` in the next turn of the loop; an exception of `deliver` is logged."""
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


# Served model -------------------------------------------------------------------------------------


T = TypeVar("T")
P = ParamSpec("P")

# Texts up to this many characters (well below a millisecond of work) are tokenized in place; a
# thread's round trip costs more.
INLINE_CHARACTERS = 1024


class Owner(Protocol):
    """Program or HTTP request; `end` gets the error that says why the model goes."""

    end: Callable[[RootlaceError], None]


class ServedModel:
    """Engine, tokenizer and chat template of one model, its limits, and counters.

    `eos_ids` end a generation unless the request ignores them. `OpenSequences` keeps `owners`,
    `branch_count` and `branches_of`.
    """

    def __init__(
        self,
        config: GatewayConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        chat: ChatTemplate,
        eos_ids: Iterable[int] = (),
        server_state: ServerState | None = None,
    ) -> None:
        """`server_state`: the state shared with other models of the server, if there are any."""
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
        self.server_state = state = ServerState(config) if server_state is None else server_state
        self.keys, self.drain, self.spans = state.keys, state.drain, state.spans
        self.metrics = state.metrics if server_state is None else Metrics()
        self.last_token = -math.inf
        """Time of the engine's last token, by `time.monotonic`."""
        self.own_pooling = "last"
        """Pooling that the model was trained for, as `ModelSource` names it."""
        self.deliveries = Deliveries()
        self.numbers = itertools.count(1)
        """Numbers for programs and HTTP requests."""
        self.owners: set[Owner] = set()
        """Programs and HTTP requests that have sequences of this model."""
        self.branch_count = 0
        self.plenty_branches = plenty(config.max_branches)
        self.branches_of: Counter[str] = Counter()
        """Open branches per client."""
        self.answering: object = None
        """The model's HTTP endpoints where the server has several models: unloading drops both."""
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")

    @property
    def healthy(self) -> bool:
        return self.engine.healthy

    @property
    def session_count(self) -> int:
        """Count connected programs and HTTP requests that compute."""
        return len(self.owners)

    @cached_property
    def max_prompt(self) -> int:
        """Most tokens of a sequence: the smaller of context window and KV cache."""
        return min(self.model_info.context_length, self.model_info.capacity_tokens)

    def loaded(self, name: str) -> ServedModel:
        """Return this model, the only one. Raises ModelNotFound if `name` is another."""
        check_name(self.model_info, name)
        return self

    async def load(self, name: str) -> ServedModel:
        """Return this model, as `loaded` does."""
        return self.loaded(name)

    def check_adapter(self, name: str) -> None:
        """Raise InvalidRequest unless `name` is empty or names a loaded adapter."""
        known = self.model_info.adapters
        if name and name not in known:
            there = f"there are {', '.join(known)}" if known else "there are none"
            raise InvalidRequest(f"the adapter {name!r} is not loaded: {there}")

    async def status(self, account: Account | None = None) -> dict[str, Any]:
        """Return counters of engine and server; for a key, the key's own counters alone. Counters
        of the others would show a key what other keys do."""
        if account is not None:
            return {**account.counted, "branches": self.branches_of[Asker.of(account, "").client]}
        return {
            **await self.engine.stats(),
            "sessions": self.session_count,
            "branches": self.branch_count,
        }

    def shown_path(self, account: Account | None) -> str:
        """Return the model's path, or for a key its name: paths tell of the machine."""
        return self.model_info.path if account is None else self.model_info.name

    async def flush(self) -> None:
        """Evict every cached prefix that no running request uses."""
        await self.engine.flush()

    def report_scope(self) -> Scope:
        """Return the scope of cache reports. Raises InvalidRequest if reports are off."""
        scope = self.config.cache_reports
        if scope == "off":
            raise InvalidRequest("this server does not explain its cache (cache_reports is off)")
        # No key may see what other keys have cached.
        return "own" if self.config.keys_file else scope

    async def tokenize(
        self, characters: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call the tokenizer on `characters` of text: here if they are few, else in a thread."""
        if characters <= INLINE_CHARACTERS:
            return call(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    def close(self) -> None:
        """End every program and request; the caller stops the engine."""
        error = ServerUnavailable(f"the model {self.model_info.name} was unloaded")
        for owner in list(self.owners):
            owner.end(error)
        self._threads.shutdown(wait=False, cancel_futures=True)
