"""The gateway as a whole: engine, tokenizer, and the servers in front of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import msgspec
from aiohttp import web

from rootlace.runtime.config import EngineConfig, GatewayConfig
from rootlace.runtime.engine.client import EngineClient
from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.app import make_runner
from rootlace.runtime.gateway.server import ProgramServer
from rootlace.runtime.gateway.tokens.chat import ChatTemplate
from rootlace.runtime.gateway.tokens.tokenizer import Tokenizer
from rootlace.runtime.model.checkpoint.source import ModelSource, model_source
from rootlace.wire.errors import InvalidRequest, ServerUnavailable


class Listening(msgspec.Struct, frozen=True):
    """Where a gateway answers. `http_address` is a URL without a path, or None."""

    program_address: str
    http_address: str | None
    pid: int


async def serve(
    gateway_config: GatewayConfig,
    engine_config: EngineConfig,
    ready: Callable[[Listening], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Start engine and servers, call `ready`, and run until `stop` is set.

    Everything is stopped again at the end, also when the task is cancelled. Raises a typed error
    if something cannot start, and ServerUnavailable if the engine is gone for good.
    """
    stop = stop or asyncio.Event()
    gone: list[str] = []

    def on_exit(reason: str) -> None:
        gone.append(reason)
        stop.set()

    # The tokenizer's file is read while the engine loads the model.
    starting = asyncio.create_task(EngineClient.start(engine_config, on_exit))
    try:
        source = await asyncio.to_thread(model_source, gateway_config.model)
        tokenizer = await asyncio.to_thread(Tokenizer.read, source)
        chat = load_chat(source, tokenizer)
        eos_ids = load_eos_ids(source, tokenizer)
    except BaseException:
        await _abandon(starting)
        raise
    engine = await starting
    gateway = Gateway(gateway_config, engine, tokenizer, chat, eos_ids)
    gateway.own_pooling = source.pooling()
    programs = ProgramServer(gateway)
    runner: web.AppRunner | None = None
    try:
        gateway.program_address = programs.start()
        http_address = None
        if gateway_config.http_port is not None:
            runner, http_address = await _start_http(gateway)
        if ready is not None:
            ready(Listening(gateway.program_address, http_address, os.getpid()))
        await stop.wait()
    finally:
        if runner is not None:
            await runner.cleanup()
        await programs.stop()
        gateway.close()
        await engine.stop()
    if gone:
        raise ServerUnavailable(gone[0])


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


async def _abandon(starting: asyncio.Task[EngineClient]) -> None:
    starting.cancel()
    try:
        engine = await starting
    except (asyncio.CancelledError, Exception):
        return
    await engine.stop()
