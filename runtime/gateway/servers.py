"""What answers in front of an engine: the servers for programs and for HTTP.

`app` imports this module while the engine starts, which takes longer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web

from rootlace.runtime.config import EngineConfig, GatewayConfig
from rootlace.runtime.engine.client import EngineClient
from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.app import make_runner
from rootlace.runtime.gateway.server import ProgramServer
from rootlace.runtime.gateway.tokens.chat import ChatTemplate
from rootlace.runtime.gateway.tokens.tokenizer import Tokenizer
from rootlace.runtime.model.checkpoint.source import ModelSource, model_source
from rootlace.wire.errors import InvalidRequest


@dataclass(frozen=True)
class ModelTexts:
    """A model's files on texts and tokens, read."""

    source: ModelSource
    tokenizer: Tokenizer
    chat: ChatTemplate
    eos_ids: frozenset[int]

    @classmethod
    def read(cls, model: str) -> ModelTexts:
        source = model_source(model)
        tokenizer = Tokenizer.read(source)
        chat = load_chat(source, tokenizer)
        return cls(source, tokenizer, chat, load_eos_ids(source, tokenizer))


class Servers:
    """Both servers, in front of an engine that is ready."""

    def __init__(
        self,
        gateway_config: GatewayConfig,
        engine_config: EngineConfig,
        engine: EngineClient,
        texts: ModelTexts,
    ) -> None:
        self._gateway = Gateway(gateway_config, engine, texts.tokenizer, texts.chat, texts.eos_ids)
        self._gateway.own_pooling = texts.source.pooling()
        self._gateway.caching = engine_config.cache.enabled
        self._programs = ProgramServer(self._gateway)
        self._runner: web.AppRunner | None = None

    async def start(self) -> tuple[str, str | None]:
        """The addresses for programs and for HTTP, None where there is no HTTP."""
        gateway, http_address = self._gateway, None
        gateway.program_address = self._programs.start()
        if gateway.config.http_port is not None:
            self._runner, http_address = await _start_http(gateway)
        return gateway.program_address, http_address

    async def drain(self, seconds: float, stop: asyncio.Event) -> None:
        """Refuse new work, and wait until what was running has ended, or `seconds` are over, or
        `stop` is set."""
        await self._gateway.drain.run(lambda: self._programs.busy, seconds, stop)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self._programs.stop()
        self._gateway.close()


def load_chat(source: ModelSource, tokenizer: Tokenizer) -> ChatTemplate:
    """The model's chat template, knowing the tokenizer's special tokens."""
    special = [token.content for token in tokenizer.added.values() if token.special]
    bos = "".join(tokenizer.content(id_) or "" for id_ in tokenizer.bos_ids)
    return ChatTemplate.read(source, special, bos)


def load_eos_ids(source: ModelSource, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a text: those that the model's files name, and the tokenizer's own."""
    given = source.eos_token_id()
    ids = {given} if isinstance(given, int) else set(given or ())
    token = tokenizer.config.get("eos_token")
    content = token["content"] if isinstance(token, dict) else token
    own = tokenizer.id_of(content) if content else None
    return frozenset(ids if own is None else ids | {own})


async def _start_http(gateway: Gateway) -> tuple[web.AppRunner, str]:
    config = gateway.config
    runner = make_runner(gateway)
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.http_port).start()
    except OSError as error:
        await runner.cleanup()
        raise InvalidRequest(
            f"cannot listen on {config.host}:{config.http_port}: {error}"
        ) from error
    host, port = runner.addresses[0][:2]
    shown = f"[{host}]" if ":" in host else host
    return runner, f"http://{shown}:{port}"
