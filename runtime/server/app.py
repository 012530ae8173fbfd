"""The whole server: engines, tokenizers, and the servers in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rootlace.runtime import processes
from rootlace.runtime.config import OWN_CONFIGS, GatewayConfig, RuntimeConfig
from rootlace.runtime.server.auth import read_keys, read_program_key
from rootlace.runtime.server.open_model import close_model, open_model
from rootlace.wire.errors import InvalidRequest, ServerUnavailable

if TYPE_CHECKING:
    from aiohttp.web import AppRunner

    from rootlace.runtime.server.model_registry import ModelRegistry
    from rootlace.runtime.server.programs import ProgramServer
    from rootlace.runtime.server.served_model import Engine, ServedModel
    from rootlace.runtime.server.session_store import SessionStore

log = logging.getLogger(__name__)

SETTLED_SECONDS = 1.0
"""Time until the garbage of a start is collected, so that a first request need not wait."""
COLLECTED_TOGETHER = 50_000
"""Net new objects until a garbage collection. Requests leave none, but hundreds of running ones are
100,000 objects: searched 700 at a time, they cost a fifth of the server's time."""


class Listening(msgspec.Struct, frozen=True):
    """Addresses of a server. `http_address` is a URL without a path, or None."""

    program_address: str
    http_address: str | None
    pid: int


async def serve(
    models: Sequence[RuntimeConfig],
    ready: Callable[[Listening], None] | None = None,
    stop: asyncio.Event | None = None,
    drain: asyncio.Event | None = None,
    engines: Callable[[], Coroutine[Any, Any, Engine]] | None = None,
) -> None:
    """Start engines and servers, call `ready`, and run until `stop` is set.

    The first model's options decide what is not about a model, such as ports and keys. Once `drain`
    is set, new work is refused, and the server ends with the running work, or `drain_seconds`
    later. `engines` starts engines of a single model elsewhere. All is stopped at the end, also
    when the task is cancelled. Raises a typed error if something cannot start, and
    ServerUnavailable if a single model's engine is gone for good.
    """
    config = models[0].gateway
    if config.keys_file:
        read_keys(config.keys_file)  # raises before anything is started
    if config.program_key:
        read_program_key(config.program_key)
    if config.otlp:
        from rootlace.runtime.server.telemetry import exporter_class

        exporter_class()
    if config.default_sampling or config.generation_config not in OWN_CONFIGS:
        from rootlace.runtime.server.model_texts import check_sampling

        check_sampling(config)
    store = _open_store(config.state)
    stop, drain = stop or asyncio.Event(), drain or asyncio.Event()
    gone: list[str] = []

    def on_exit(reason: str) -> None:
        gone.append(reason)
        stop.set()

    several = len(models) > 1 or config.load == "on-demand" or config.idle_unload is not None
    async with AsyncExitStack() as stack:
        if store is not None:
            stack.callback(store.close)
        served: ServedModel | ModelRegistry
        if several:
            served = await stack.enter_async_context(_several(models))
        else:
            served = await stack.enter_async_context(_single(models[0], on_exit, engines))
        programs, http_address = await stack.enter_async_context(_answering(served, store))
        if ready is not None:
            ready(Listening(programs.address, http_address, os.getpid()))
        if await _first(stop, drain) is drain:
            log.info("stopping: what is running may end, for %g seconds", config.drain_seconds)
            await served.drain.run(lambda: programs.busy, config.drain_seconds, stop)
    if gone:
        raise ServerUnavailable(gone[0])


def _open_store(folder: str) -> SessionStore | None:
    """Open and lock the store in a folder, before anything starts. Raises InvalidRequest."""
    if not folder:
        return None
    from rootlace.runtime.server.session_store import SessionStore

    return SessionStore(Path(folder), asyncio.get_running_loop().call_later)


@asynccontextmanager
async def _single(
    model: RuntimeConfig,
    on_exit: Callable[[str], None],
    engines: Callable[[], Coroutine[Any, Any, Engine]] | None,
) -> AsyncIterator[ServedModel]:
    served = await open_model(
        model.gateway, model.engine, on_exit, meanwhile=_import_servers, start=engines
    )
    try:
        yield served
    finally:
        await close_model(served)


@asynccontextmanager
async def _several(models: Sequence[RuntimeConfig]) -> AsyncIterator[ModelRegistry]:
    from rootlace.runtime.server.model_registry import ModelRegistry

    registry = ModelRegistry(models)
    try:
        await registry.start()
        yield registry
    finally:
        await registry.stop()


def _import_servers() -> None:
    """Import the servers early, so that a first engine need not wait for the import."""
    import rootlace.runtime.server.http.model_routes
    import rootlace.runtime.server.programs  # noqa: F401


@asynccontextmanager
async def _answering(
    served: ServedModel | ModelRegistry, store: SessionStore | None
) -> AsyncIterator[tuple[ProgramServer, str | None]]:
    """Run the servers for programs and HTTP while the block runs, in front of one model or several.
    Gives the server for programs, and the HTTP address, None where there is none."""
    from rootlace.runtime.server.http.connections import quiet_accepts
    from rootlace.runtime.server.http.model_routes import runner_for
    from rootlace.runtime.server.programs import ProgramServer

    programs, http_address = ProgramServer(served, store), None
    runner: AppRunner | None = None
    try:
        served.server_state.program_address = programs.start()
        if served.config.http_port is not None:
            runner = runner_for(served)
            http_address = await _listen(runner, served.config)
            quiet_accepts(asyncio.get_running_loop())
        yield programs, http_address
    finally:
        if runner is not None:
            await runner.cleanup()
        await programs.stop()


async def _listen(runner: AppRunner, config: GatewayConfig) -> str:
    """Begin to answer HTTP, and return the URL."""
    from aiohttp.web import TCPSite

    await runner.setup()
    try:
        await TCPSite(runner, config.host, config.http_port).start()
    except OSError as error:
        await runner.cleanup()
        raise InvalidRequest(
            f"cannot listen on {config.host}:{config.http_port}: {error}"
        ) from error
    host, port = runner.addresses[0][:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


async def serve_until(
    models: Sequence[RuntimeConfig],
    ready: Callable[[Listening], None],
    stop: asyncio.Event,
    drain: asyncio.Event,
) -> None:
    """Run `serve` as the whole process: set up logs, and collect garbage again once ready. An event
    set while a model is loading ends the loading at once."""
    processes.set_up_logs(models[0].engine.logs, "gateway")
    processes.take_descriptors()
    is_ready = False

    def on_ready(listening: Listening) -> None:
        nonlocal is_ready
        is_ready = True
        ready(listening)
        processes.give_back_memory()  # of the tokenizer's construction
        asyncio.get_running_loop().call_later(SETTLED_SECONDS, _settle)

    serving = asyncio.create_task(serve(models, on_ready, stop, drain))
    ending = asyncio.create_task(_first(stop, drain))
    await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    if not is_ready:
        serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _settle() -> None:
    """Collect garbage now, and seldom later; objects that exist now are never searched again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_TOGETHER, 10, 10)
    gc.enable()


async def _first(*events: asyncio.Event) -> asyncio.Event:
    """Return the first of the events that is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    return next(event for event in events if event.is_set())
