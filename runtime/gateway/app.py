"""The gateway as a whole: engine, tokenizer, and the servers in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

import msgspec
from aiohttp import web

from rootlace.runtime import logs
from rootlace.runtime.config import EngineConfig, GatewayConfig
from rootlace.runtime.engine.client import EngineClient
from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.app import make_runner
from rootlace.runtime.gateway.keys.key_file import read_keys
from rootlace.runtime.gateway.server import ProgramServer
from rootlace.runtime.gateway.tokens.chat import ChatTemplate
from rootlace.runtime.gateway.tokens.tokenizer import Tokenizer
from rootlace.runtime.model.checkpoint.source import ModelSource, model_source
from rootlace.wire.errors import InvalidRequest, ServerUnavailable

log = logging.getLogger(__name__)


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
    drain: asyncio.Event | None = None,
) -> None:
    """Start engine and servers, call `ready`, and run until `stop` is set.

    Once `drain` is set, new work is refused, and the end comes when what was running has ended, or
    `drain_seconds` later. Everything is stopped again at the end, also when the task is cancelled.
    Raises a typed error if something cannot start, and ServerUnavailable if the engine is gone for
    good.
    """
    if gateway_config.keys_file:
        read_keys(gateway_config.keys_file)  # raises before anything is started
    stop, drain = stop or asyncio.Event(), drain or asyncio.Event()
    drain_seconds = gateway_config.drain_seconds
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
    gateway.caching = engine_config.cache.enabled
    programs = ProgramServer(gateway)
    runner: web.AppRunner | None = None
    try:
        gateway.program_address = programs.start()
        http_address = None
        if gateway_config.http_port is not None:
            runner, http_address = await _start_http(gateway)
        if ready is not None:
            ready(Listening(gateway.program_address, http_address, os.getpid()))
        if await _first(stop, drain) is drain:
            log.info("stopping: what is running may end, for %g seconds", drain_seconds)
            await gateway.drain.run(lambda: programs.busy, drain_seconds, stop)
    finally:
        if runner is not None:
            await runner.cleanup()
        await programs.stop()
        gateway.close()
        await engine.stop()
    if gone:
        raise ServerUnavailable(gone[0])


async def serve_until(
    gateway_config: GatewayConfig,
    engine_config: EngineConfig,
    ready: Callable[[Listening], None],
    stop: asyncio.Event,
    drain: asyncio.Event,
) -> None:
    """All of a gateway's process: as `serve`, with its logs set up; but if an event is set while
    the model is loading, the loading ends at once."""
    logs.set_up(engine_config.logs, "gateway")
    is_ready = False

    def on_ready(listening: Listening) -> None:
        nonlocal is_ready
        is_ready = True
        ready(listening)

    serving = asyncio.create_task(serve(gateway_config, engine_config, on_ready, stop, drain))
    ending = asyncio.create_task(_first(stop, drain))
    await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    if not is_ready:
        serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


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


async def _first(*events: asyncio.Event) -> asyncio.Event:
    """The first of the events that is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    return next(event for event in events if event.is_set())


async def _abandon(starting: asyncio.Task[EngineClient]) -> None:
    starting.cancel()
    try:
        engine = await starting
    except (asyncio.CancelledError, Exception):
        return
    await engine.stop()
