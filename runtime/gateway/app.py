"""The gateway as a whole: engine, tokenizer, and the servers in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from rootlace.runtime import logs
from rootlace.runtime.config import EngineConfig, GatewayConfig
from rootlace.runtime.engine.client import EngineClient
from rootlace.runtime.gateway.keys.key_file import read_keys
from rootlace.wire.errors import ServerUnavailable

if TYPE_CHECKING:
    from rootlace.runtime.gateway.servers import ModelTexts

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

    # The model's texts, and what reads them, while the engine loads its weights.
    starting = asyncio.create_task(EngineClient.start(engine_config, on_exit))
    try:
        texts = await asyncio.to_thread(_read_texts, gateway_config.model)
    except BaseException:
        await _abandon(starting)
        raise
    engine = await starting
    try:
        from rootlace.runtime.gateway.servers import Servers

        servers = Servers(gateway_config, engine_config, engine, texts)
        try:
            program_address, http_address = await servers.start()
            if ready is not None:
                ready(Listening(program_address, http_address, os.getpid()))
            if await _first(stop, drain) is drain:
                log.info("stopping: what is running may end, for %g seconds", drain_seconds)
                await servers.drain(drain_seconds, stop)
        finally:
            await servers.stop()
    finally:
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


def _read_texts(model: str) -> ModelTexts:
    # Only here: the engine should not wait for a web server to be imported.
    from rootlace.runtime.gateway.servers import ModelTexts

    return ModelTexts.read(model)


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
