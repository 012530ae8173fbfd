"""The gateway as a whole: engine, tokenizer, and the servers in front of them."""

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
from rootlace.runtime.server.open_model import close_room, open_room
from rootlace.wire.errors import InvalidRequest, ServerUnavailable

if TYPE_CHECKING:
    from aiohttp.web import AppRunner

    from rootlace.runtime.server.model_registry import ModelRegistry
    from rootlace.runtime.server.programs import ProgramServer
    from rootlace.runtime.server.served_model import Engine, ServedModel
    from rootlace.runtime.server.session_store import SessionStore

log = logging.getLogger(__name__)

SETTLED_SECONDS = 1.0
"""When what a start left is cleared away: a first request should not wait for it."""
COLLECTED_TOGETHER = 50_000
"""Net new objects until those are looked at for garbage. Requests leave none, but hundreds of them
under way are 100,000 objects: looked at 700 at a time, they cost a fifth of the server's time."""


class Listening(msgspec.Struct, frozen=True):
    """Where a gateway answers. `http_address` is a URL without a path, or None."""

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

    What is not about a model, such as ports and keys, is that of the first. Once `drain` is set,
    new work is refused, and the end comes when what was running has ended, or `drain_seconds`
    later. `engines` starts those of a single model that are somewhere else. Everything is stopped
    again at the end, also when the task is cancelled. Raises a typed
    error if something cannot start, and ServerUnavailable if the engine of a single model is gone
    for good.
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
    """The store in a folder; locked, before anything is started. Raises InvalidRequest."""
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
    gateway = await open_room(
        model.gateway, model.engine, on_exit, meanwhile=_import_servers, start=engines
    )
    try:
        yield gateway
    finally:
        await close_room(gateway)


@asynccontextmanager
async def _several(models: Sequence[RuntimeConfig]) -> AsyncIterator[ModelRegistry]:
    from rootlace.runtime.server.model_registry import ModelRegistry

    rooms = ModelRegistry(models)
    try:
        await rooms.start()
        yield rooms
    finally:
        await rooms.stop()


def _import_servers() -> None:
    """So that a first engine need not wait for a web server to be imported."""
    import rootlace.runtime.server.http.model_routes
    import rootlace.runtime.server.programs  # noqa: F401


@asynccontextmanager
async def _answering(
    served: ServedModel | ModelRegistry, store: SessionStore | None
) -> AsyncIterator[tuple[ProgramServer, str | None]]:
    """The servers for programs and for HTTP, in front of one model or of several, while the block
    runs. Gives that for programs, and the address for HTTP, None where there is none."""
    from rootlace.runtime.server.http.connections import quiet_accepts
    from rootlace.runtime.server.http.model_routes import runner_for
    from rootlace.runtime.server.programs import ProgramServer

    programs, http_address = ProgramServer(served, store), None
    runner: AppRunner | None = None
    try:
        served.program_address = programs.start()
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
    """Begin to answer; the URL."""
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
    """All of a gateway's process: as `serve`, with its logs set up; but if an event is set while
    a model is loading, the loading ends at once. Looks for garbage again once it is ready."""
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
    """Collect garbage, and from now on seldom. What exists now stays alive: it is not looked at
    again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECTED_TOGETHER, 10, 10)
    gc.enable()


async def _first(*events: asyncio.Event) -> asyncio.Event:
    """The first of the events that is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    return next(event for event in events if event.is_set())
