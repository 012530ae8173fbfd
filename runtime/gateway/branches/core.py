"""The gateway: what sessions share. One per process; used by ZeroMQ and HTTP alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, Protocol, TypeVar

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.contracts.messages import Ready
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.gateway.branches.session import Session
from rootlace.runtime.gateway.tokens.chat import ChatTemplate
from rootlace.runtime.gateway.tokens.tokenizer import Tokenizer
from rootlace.wire.protocol import Event, ModelInfo

T = TypeVar("T")
P = ParamSpec("P")

# Texts up to this many characters (well below a millisecond of work) are tokenized in place; a
# thread's round trip costs more.
INLINE_CHARACTERS = 1024


class Engine(Protocol):
    """What the gateway needs of `rootlace.runtime.engine.client.EngineClient`."""

    info: Ready

    @property
    def healthy(self) -> bool: ...

    def next_rid(self) -> int: ...

    def submit(self, request: Request, on_update: Callable[[Update], None]) -> None: ...

    def abort(self, rids: Iterable[int]) -> None: ...

    def release_program(self, program: str) -> None: ...

    async def flush(self) -> None: ...

    async def stats(self) -> dict[str, Any]: ...


class Gateway:
    """Composes tokenizer, chat template and engine; hands out sessions.

    `eos_ids` end a generation unless it ignores them.
    """

    def __init__(
        self,
        config: GatewayConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        chat: ChatTemplate,
        eos_ids: Iterable[int] = (),
    ) -> None:
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.chat = chat
        self.eos_ids = frozenset(eos_ids)
        self.program_address: str | None = None
        info = engine.info
        self.model_info = ModelInfo(
            name=config.served_name or _folder_name(config.model),
            path=config.model,
            context_length=info.context_length,
            vocab_size=info.vocab_size,
            capacity_tokens=info.capacity_tokens,
            block_size=info.block_size,
            chat=chat.format,
        )
        self.branch_count = 0
        self._sessions: set[Session] = set()
        self._next_session = 0
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")

    @property
    def healthy(self) -> bool:
        return self.engine.healthy

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    @property
    def max_prompt(self) -> int:
        """The longest sequence: the context window, or the KV cache where it is smaller."""
        return min(self.model_info.context_length, self.model_info.capacity_tokens)

    def open_session(self, on_events: Callable[[list[Event]], None], client: str = "") -> Session:
        """A client's session. `on_events` gets what happened, at most once per loop turn."""
        self._next_session += 1
        session = Session(self, on_events, self._next_session, client, self._sessions.discard)
        self._sessions.add(session)
        return session

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

    async def tokenize(
        self, characters: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a tokenizer call on so many characters: here if they are few, else in a thread."""
        if characters <= INLINE_CHARACTERS:
            return call(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    def close(self) -> None:
        """End every session; the engine is the caller's to stop."""
        for session in list(self._sessions):
            session.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _folder_name(path: str) -> str:
    return path.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or path
