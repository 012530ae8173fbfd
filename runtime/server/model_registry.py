"""Several models behind one gateway: which are loaded, and who asks for which."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rootlace.runtime import processes
from rootlace.runtime.config import RuntimeConfig
from rootlace.runtime.server.open_model import close_room, open_room
from rootlace.runtime.server.served_model import ServedModel, name_of, not_found
from rootlace.runtime.server.server_state import ServerState, in_time
from rootlace.wire.errors import (
    InternalError,
    RootlaceError,
    ServerUnavailable,
    UnsupportedModel,
)

# Rooms --------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 60.0
"""How long a model that could not be loaded is not tried again: twice as long with each failure."""
LOOK_SECONDS = 1.0
"""How often a model that nobody uses is looked for."""
CLEARED_SECONDS = 1.0
"""When the memory of a model is cleared away behind its end: others may still be answered then."""


class ModelSlot:
    """One model: loaded, loading or not. `users` are the requests that are being answered."""

    def __init__(self, name: str, config: RuntimeConfig) -> None:
        self.name = name
        self.config = config
        self.gateway: ServedModel | None = None
        self.loading: asyncio.Task[ServedModel] | None = None
        self.users = 0
        self.used = time.monotonic()
        self.failure: RootlaceError | None = None
        """Why it could not be loaded, until it is."""
        self._failures = 0
        self._retry_at = 0.0

    @property
    def idle(self) -> bool:
        """Whether nobody would notice if it were gone. A program that is connected would."""
        return self.gateway is None or not (self.users or self.gateway.session_count)

    def check_retry(self) -> None:
        """Raises the last failure again while it is too early to try."""
        wait = self._retry_at - time.monotonic()
        if self.failure is not None and wait > 0:
            raise type(self.failure)(f"{self.failure} (it is tried again in {math.ceil(wait)} s)")

    def note_loaded(self, failure: RootlaceError | None) -> None:
        """It was loaded, or it could not be."""
        self.failure = failure
        self._failures = 0 if failure is None else self._failures + 1
        wait = FIRST_RETRY_SECONDS * 2 ** min(self._failures - 1, 20)
        self._retry_at = time.monotonic() + min(wait, LAST_RETRY_SECONDS)


class ModelRegistry:
    """The models of a server by name; the first is what a request gets that names none.

    An engine that dies for good takes its own model away, and no other; the next request for it
    loads it again.
    """

    def __init__(self, configs: Sequence[RuntimeConfig]) -> None:
        self.config = configs[0].gateway
        self.house = ServerState(self.config)
        self.keys, self.drain, self.metrics = self.house.keys, self.house.drain, self.house.metrics
        self.spans = self.house.spans
        self.program_address: str | None = None
        self.all = [ModelSlot(name_of(config.gateway), config) for config in configs]
        self._closing: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    @property
    def names(self) -> list[str]:
        return [room.name for room in self.all]

    def room(self, asked: str | None) -> ModelSlot:
        """The room of a model's name (`NAME` or `NAME:ADAPTER`), path, or of none, which is the
        first's. Raises ModelNotFound."""
        if not asked or asked == "default" or asked.startswith("default:"):
            return self.all[0]
        for room in self.all:
            names = room.name, room.config.gateway.model
            if asked in names or any(asked.startswith(f"{name}:") for name in names):
                return room
        raise not_found(asked, self.names)

    def loaded(self, asked: str) -> ServedModel | None:
        """The model's gateway, if it is loaded. Raises ModelNotFound."""
        room = self.room(asked)
        room.used = time.monotonic()
        return room.gateway

    async def load(self, asked: str) -> ServedModel:
        """The model's gateway, loaded if it was not. Raises what `open_room` does, or did lately,
        but ServerUnavailable, which names no path, for a model that cannot be read: it is no fault
        of who asks.

        Whoever stops waiting for it leaves it loading: others may wait, too.
        """
        room = self.room(asked)
        try:
            return await self._opened(room)
        except UnsupportedModel as error:
            path = room.config.gateway.model
            reason = str(error).replace(f"{path}/", "").replace(path, room.name)
            raise ServerUnavailable(f"the model {room.name} cannot be loaded: {reason}") from None

    async def _opened(self, room: ModelSlot) -> ServedModel:
        gateway = room.gateway
        if gateway is None:
            if room.loading is None:
                if self.drain.begun:
                    raise self.drain.refusal()
                room.check_retry()
                room.loading = asyncio.create_task(self._load(room))
                room.loading.add_done_callback(_note_failure)
            gateway = await asyncio.shield(room.loading)
        gateway.program_address = self.program_address
        room.used = time.monotonic()
        return gateway

    async def _load(self, room: ModelSlot) -> ServedModel:
        gone: list[str] = []

        def on_exit(reason: str) -> None:
            gone.append(reason)
            log.error("the model %s is gone: %s", room.name, reason)
            self._close(room)

        try:
            # Each sees what memory is left by the one before, and by those that were unloaded.
            async with self._one_at_a_time:
                if self._closing:
                    await asyncio.wait(self._closing)
                log.info("loading %s", room.name)
                config = room.config
                gateway = await open_room(config.gateway, config.engine, on_exit, self.house)
            if gone:
                await close_room(gateway)
                raise ServerUnavailable(gone[0])
            room.gateway = gateway
            room.note_loaded(None)
            return gateway
        except Exception as error:
            known = error if isinstance(error, RootlaceError) else InternalError.of(error)
            room.note_loaded(known)
            raise
        finally:
            room.loading = None

    @asynccontextmanager
    async def use(
        self, asked: str | None, timeout: float | None = None
    ) -> AsyncIterator[ServedModel]:
        """The model's gateway, which stays loaded while the block runs. Raises DeadlineExceeded
        where it is not loaded within the `timeout`."""
        room = self.room(asked)
        room.users += 1
        try:
            gateway = room.gateway
            if gateway is None:
                async with in_time(timeout):
                    gateway = await self.load(room.name)
            yield gateway
        finally:
            room.users -= 1
            room.used = time.monotonic()

    def unload(self, asked: str | None) -> None:
        """Unload a model, unless somebody uses it."""
        room = self.room(asked)
        if room.gateway is not None and room.idle:
            log.info("unloading %s, as a request asks", room.name)
            self._close(room)

    async def start(self) -> None:
        """Load all models, one after the other, so that each sees what memory is left; or, on
        demand, none. Raises what loading one raises."""
        if self.config.load == "start":
            for room in self.all:
                await self._opened(room)
        if self.config.idle_unload is not None:
            self._watching = asyncio.create_task(self._unload_idle(self.config.idle_unload))

    async def stop(self) -> None:
        """Unload all."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        loading = [room.loading for room in self.all if room.loading is not None]
        for task in loading:
            task.cancel()
        if loading:
            await asyncio.wait(loading)
        for room in self.all:
            self._close(room)
        if self._closing:
            await asyncio.wait(self._closing)

    async def _unload_idle(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(min(seconds, LOOK_SECONDS))
            now = time.monotonic()
            for room in self.all:
                if room.gateway is not None and room.idle and now - room.used >= seconds:
                    log.info("unloading %s: nobody used it for %g s", room.name, seconds)
                    self._close(room)

    def _close(self, room: ModelSlot) -> None:
        """From now on the room is empty; its engine ends in the background."""
        gateway, room.gateway = room.gateway, None
        if gateway is not None:
            task = asyncio.create_task(close_room(gateway))
            self._closing.add(task)
            task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        asyncio.get_running_loop().call_later(CLEARED_SECONDS, _clear)


def _clear() -> None:
    """Collect what unloaded models leave, also of those that were there when a start ended: garbage
    collections do not look at these by themselves, and seldom at the others."""
    gc.unfreeze()
    gc.collect()
    processes.give_back_memory()


def _note_failure(loading: asyncio.Task[ServedModel]) -> None:
    """Those who wait are told; perhaps nobody waits any more."""
    if not loading.cancelled() and (error := loading.exception()) is not None:
        trace = None if isinstance(error, RootlaceError) else error
        log.warning("a model could not be loaded: %s", error, exc_info=trace)
