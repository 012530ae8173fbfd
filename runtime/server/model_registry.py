"""Registry of a server's models: loads a model when it is asked for, and unloads idle ones."""

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
from rootlace.runtime.server.open_model import close_model, open_model
from rootlace.runtime.server.served_model import ServedModel, name_of, not_found
from rootlace.runtime.server.server_state import ServerState, in_time
from rootlace.wire.errors import InternalError, RootlaceError, ServerUnavailable, UnsupportedModel

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 60.0
"""First and longest time until a failed load is retried. The time doubles with each failure."""
LOOK_SECONDS = 1.0
"""Time between searches for idle models."""
CLEARED_SECONDS = 1.0
"""Delay before an unloaded model's memory is cleared: others may still be answered then."""


class ModelSlot:
    """Slot of one model: loaded, loading or neither. `users` counts the requests being answered."""

    def __init__(self, name: str, config: RuntimeConfig) -> None:
        self.name = name
        self.config = config
        self.model: ServedModel | None = None
        self.loading: asyncio.Task[ServedModel] | None = None
        self.users = 0
        self.used = time.monotonic()
        self.failure: RootlaceError | None = None
        """Error of the last load, until a load succeeds."""
        self._failures = 0
        self._retry_at = 0.0

    @property
    def idle(self) -> bool:
        """Return whether nobody uses the model. A connected program uses it."""
        return self.model is None or not (self.users or self.model.session_count)

    def check_retry(self) -> None:
        """Raise the last failure again while it is too early to retry."""
        wait = self._retry_at - time.monotonic()
        if self.failure is not None and wait > 0:
            raise type(self.failure)(f"{self.failure} (it is tried again in {math.ceil(wait)} s)")

    def note_loaded(self, failure: RootlaceError | None) -> None:
        """Note that the model was loaded (None), or the error of the attempt."""
        self.failure = failure
        self._failures = 0 if failure is None else self._failures + 1
        wait = FIRST_RETRY_SECONDS * 2 ** min(self._failures - 1, 20)
        self._retry_at = time.monotonic() + min(wait, LAST_RETRY_SECONDS)


class ModelRegistry:
    """Models of a server by name; requests that name no model get the first.

    An engine that dies for good takes its own model away and no other; the next request for the
    model loads it again.
    """

    def __init__(self, configs: Sequence[RuntimeConfig]) -> None:
        self.config = configs[0].gateway
        self.server_state = state = ServerState(self.config)
        self.keys, self.drain, self.metrics = state.keys, state.drain, state.metrics
        self.spans = state.spans
        self.all = [ModelSlot(name_of(config.gateway), config) for config in configs]
        self._closing: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    @property
    def names(self) -> list[str]:
        return [slot.name for slot in self.all]

    def slot(self, name: str | None) -> ModelSlot:
        """Return the slot for a model's name (`NAME` or `NAME:ADAPTER`) or path, the first for
        none. Raises ModelNotFound."""
        if not name or name == "default" or name.startswith("default:"):
            return self.all[0]
        for slot in self.all:
            names = slot.name, slot.config.gateway.model
            if name in names or any(name.startswith(f"{each}:") for each in names):
                return slot
        raise not_found(name, self.names)

    def loaded(self, name: str) -> ServedModel | None:
        """Return the model, if it is loaded. Raises ModelNotFound."""
        slot = self.slot(name)
        slot.used = time.monotonic()
        return slot.model

    async def load(self, name: str) -> ServedModel:
        """Return the model, loaded if it was not. Raises as `open_model` does, or did lately. A
        model that cannot be read is no fault of the caller: ServerUnavailable, without a path.

        A caller that stops waiting leaves the model loading: others may wait, too.
        """
        slot = self.slot(name)
        try:
            return await self._opened(slot)
        except UnsupportedModel as error:
            path = slot.config.gateway.model
            reason = str(error).replace(f"{path}/", "").replace(path, slot.name)
            raise ServerUnavailable(f"the model {slot.name} cannot be loaded: {reason}") from None

    async def _opened(self, slot: ModelSlot) -> ServedModel:
        model = slot.model
        if model is None:
            if slot.loading is None:
                if self.drain.begun:
                    raise self.drain.refusal()
                slot.check_retry()
                slot.loading = asyncio.create_task(self._load(slot))
                slot.loading.add_done_callback(_note_failure)
            model = await asyncio.shield(slot.loading)
        slot.used = time.monotonic()
        return model

    async def _load(self, slot: ModelSlot) -> ServedModel:
        gone: list[str] = []

        def on_exit(reason: str) -> None:
            gone.append(reason)
            log.error("the model %s is gone: %s", slot.name, reason)
            self._close(slot)

        try:
            # Each load sees the memory left by earlier loads and by unloaded models.
            async with self._one_at_a_time:
                if self._closing:
                    await asyncio.wait(self._closing)
                log.info("loading %s", slot.name)
                config = slot.config
                model = await open_model(config.gateway, config.engine, on_exit, self.server_state)
            if gone:
                await close_model(model)
                raise ServerUnavailable(gone[0])
            slot.model = model
            slot.note_loaded(None)
            return model
        except Exception as error:
            known = error if isinstance(error, RootlaceError) else InternalError.of(error)
            slot.note_loaded(known)
            raise
        finally:
            slot.loading = None

    @asynccontextmanager
    async def use(
        self, name: str | None, timeout: float | None = None
    ) -> AsyncIterator[ServedModel]:
        """Give the model, which stays loaded while the block runs. Raises DeadlineExceeded if it is
        not loaded within `timeout` seconds."""
        slot = self.slot(name)
        slot.users += 1
        try:
            model = slot.model
            if model is None:
                async with in_time(timeout):
                    model = await self.load(slot.name)
            yield model
        finally:
            slot.users -= 1
            slot.used = time.monotonic()

    def unload(self, name: str | None) -> None:
        """Unload a model unless it is in use."""
        slot = self.slot(name)
        if slot.model is not None and slot.idle:
            log.info("unloading %s, as a request asks", slot.name)
            self._close(slot)

    async def start(self) -> None:
        """Load all models one after the other, so that each sees the memory left; with `on-demand`,
        none. Raises as `open_model` does."""
        if self.config.load == "start":
            for slot in self.all:
                await self._opened(slot)
        if self.config.idle_unload is not None:
            self._watching = asyncio.create_task(self._unload_idle(self.config.idle_unload))

    async def stop(self) -> None:
        """Unload all models."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        loading = [slot.loading for slot in self.all if slot.loading is not None]
        for task in loading:
            task.cancel()
        if loading:
            await asyncio.wait(loading)
        for slot in self.all:
            self._close(slot)
        if self._closing:
            await asyncio.wait(self._closing)

    async def _unload_idle(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(min(seconds, LOOK_SECONDS))
            now = time.monotonic()
            for slot in self.all:
                if slot.model is not None and slot.idle and now - slot.used >= seconds:
                    log.info("unloading %s: nobody used it for %g s", slot.name, seconds)
                    self._close(slot)

    def _close(self, slot: ModelSlot) -> None:
        """Empty the slot now; its engine ends in the background."""
        model, slot.model = slot.model, None
        if model is not None:
            task = asyncio.create_task(close_model(model))
            self._closing.add(task)
            task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        asyncio.get_running_loop().call_later(CLEARED_SECONDS, _clear)


def _clear() -> None:
    """Free the memory of unloaded models, objects frozen after a start included: garbage
    collections skip these, and seldom search the others."""
    gc.unfreeze()
    gc.collect()
    processes.give_back_memory()


def _note_failure(loading: asyncio.Task[ServedModel]) -> None:
    """Log the failure of a load: perhaps no request waits for it any more."""
    if not loading.cancelled() and (error := loading.exception()) is not None:
        trace = None if isinstance(error, RootlaceError) else error
        log.warning("a model could not be loaded: %s", error, exc_info=trace)
