"""Endpoints of a server with several models: each request goes to the model that it names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
from aiohttp import web
from msgspec.structs import replace

from rootlace.runtime.server.auth import caller
from rootlace.runtime.server.http.admin import (
    Info,
    ModelCard,
    ModelEntry,
    ModelList,
    Ready,
    model_list,
)
from rootlace.runtime.server.http.app import Shared, batched, endpoints, make_runner, runner_of
from rootlace.runtime.server.http.batch_runner import BatchService
from rootlace.runtime.server.http.body import RECEIVING
from rootlace.runtime.server.http.endpoint import Endpoint, Reference
from rootlace.runtime.server.http.errors import Handler
from rootlace.runtime.server.http.ollama import unloads, without_text
from rootlace.runtime.server.http.ollama_models import (
    NEVER,
    Entries,
    Entry,
    entry_of,
    running_of,
    with_adapters,
)
from rootlace.runtime.server.http.replies import Status, json_response
from rootlace.runtime.server.http.request_fields import waited
from rootlace.runtime.server.model_registry import ModelRegistry, ModelSlot
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.telemetry import CONTENT_TYPE, Model, text_of_all
from rootlace.wire.errors import RootlaceError, ServerUnavailable
from rootlace.wire.sampling import Seconds

# Endpoints that concern no single model, and need no model loaded.
_OF_THE_SERVER = (
    *("/v1/files", "/v1/batches", "/v1/responses/{id}", "/abort"),
    *("/version", "/api/version", "/page/"),
)
_PAGE = "/"
# Endpoints that observe a loaded model: they neither load it nor keep it loaded.
_WATCHING = (
    *("/get_server_info", "/server_info"),
    *("/cache/tree", "/cache/lint", "/cache/pins", "/cache/pins/{id}"),
)
# Endpoints whose bodies have `keep_alive`; without text the first ones load or unload a model.
_STOPPING = ("/api/chat", "/api/generate")
_KEEPING_ALIVE = (*_STOPPING, "/api/embed", "/api/embeddings")


_Scalar = str | int | float | bool | None
"""Value of any scalar type: the endpoint finds faults later, without time or memory spent here."""


class _Named(msgspec.Struct):
    """Fields of a body about its model: name, timeout, time to stay loaded, and what the model is
    asked. `name` is Ollama's older word for `model`."""

    model: _Scalar = None
    name: _Scalar = None
    timeout: Any = None
    keep_alive: Any = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")


_EMPTY = (b"null", b'""', b"[]")
_named = msgspec.json.Decoder(_Named)


class _Model(msgspec.Struct, frozen=True):
    """Endpoints of one loaded model, by method and path."""

    endpoints: dict[tuple[str, str], Endpoint]
    info: Info


class ModelRoutes:
    """Routes of several models. `all` lists the endpoints for documents and routing."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry
        self._started = int(time.time())
        self.shared = Shared(BatchService(registry))
        self.all: list[Endpoint] = []
        reference = Reference(lambda: registry.names[0], self.all)
        own: dict[str, Callable[..., Awaitable[Any]]] = {
            "/v1/models": self.models,
            "/v1/models/{name:.+}": self.model,
            "/api/tags": self.tags,
            "/api/ps": self.running,
            "/get_model_info": self.model_info,
            "/health": self.health,
            "/ready": self.ready,
            "/metrics": self.metrics,
            "/flush_cache": self.flush_cache,
            "/openapi.json": reference.openapi,
            "/docs": reference.page,
        }
        # These endpoints have no model: only those are called that need none.
        for one in endpoints(cast(ServedModel, None), self.shared):
            call = own.get(one.path)
            if call is None and one.path in _WATCHING:
                call = self._watch(one.method, one.path)
            elif call is None:
                free = one.path == _PAGE or one.path.startswith(_OF_THE_SERVER)
                call = one.call if free else self._dispatch(one.method, one.path)
            self.all.append(replace(one, call=call))
        self.shared.service.answers = {
            path: replace(one, call=self._answer(path)) for path, one in batched(self.all).items()
        }

    # ------------------------------------------------------------ to one model

    def _dispatch(self, method: str, path: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            name, timeout, body = await _named_model(request)
            leaves = path in _KEEPING_ALIVE and unloads(self._registry.config.load, body.keep_alive)
            chat = path == "/api/chat"
            text = body.messages if chat else body.prompt
            if leaves and path in _STOPPING and bytes(text) in _EMPTY:
                slot = self._registry.slot(name)
                if slot.model is None and slot.loading is None:
                    return json_response(without_text(name or slot.name, chat, "unload"))
            async with self._use(name, timeout) as model:
                reply = await model.endpoints[method, path].handle(request)
            if leaves and reply.status < 400:
                self._registry.unload(name)
            return reply

        return handle

    def _watch(self, method: str, path: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            name, *_ = await _named_model(request)
            model = _loaded(self._registry.slot(name))
            return await self._of(model).endpoints[method, path].handle(request)

        return handle

    def _answer(self, path: str) -> Callable[[Any], Awaitable[Any]]:
        async def answer(body: Any) -> Any:
            async with self._use(body.model, getattr(body, "timeout", None)) as model:
                return await model.endpoints["POST", path].call(body)

        return answer

    @asynccontextmanager
    async def _use(self, name: str | None, timeout: float | None) -> AsyncIterator[_Model]:
        """Load the model if necessary; the time that takes counts towards the `timeout`."""
        begun = time.monotonic()
        async with self._registry.use(name, timeout) as model:
            with waited(time.monotonic() - begun):
                yield self._of(model)

    def _of(self, model: ServedModel) -> _Model:
        answering = model.answering
        if not isinstance(answering, _Model):
            listed = endpoints(model, self.shared)
            by_path = {(one.method, one.path): one for one in listed}
            answering = model.answering = _Model(by_path, Info(model))
        return answering

    # ------------------------------------------------------------ of all models

    async def models(self) -> ModelList:
        return model_list([card for slot in self._registry.all for card in self._cards(slot)])

    async def model(self, name: str) -> ModelCard:
        cards = self._cards(self._registry.slot(name))
        return next((one for one in cards if one.id == name), cards[0])

    def _cards(self, slot: ModelSlot) -> list[ModelCard]:
        """Return the model's cards of `/v1/models`; with fewer facts if it is not loaded."""
        if slot.model is not None:
            return self._of(slot.model).info.cards()
        return [
            ModelCard(
                id=slot.name,
                display_name=slot.name,
                created=self._started,
                created_at=_written(self._started),
                root=slot.config.gateway.model if caller() is None else slot.name,
                parent=None,
            )
        ]

    async def tags(self) -> Entries:
        entries: list[Entry] = []
        for slot in self._registry.all:
            entry, model = await self._tag(slot), slot.model
            entries += [entry] if model is None else with_adapters(entry, model.model_info)
        return Entries(models=entries)

    async def running(self) -> Entries:
        return Entries(
            models=[
                running_of(slot.model, await self._tag(slot), _expires(slot))
                for slot in self._registry.all
                if slot.model is not None
            ]
        )

    async def _tag(self, slot: ModelSlot) -> Entry:
        path = slot.config.gateway.model
        return await asyncio.to_thread(entry_of, slot.name, path, _written(self._started))

    async def model_info(self, request: web.Request) -> ModelEntry | dict[str, Any]:
        """Return facts without loading the model: programs ask here where to connect."""
        slot = self._registry.slot(request.query.get("model"))
        if slot.model is not None:
            return await self._of(slot.model).info.model_info()
        path = slot.config.gateway.model if caller() is None else slot.name
        return {
            "model_path": path,
            "tokenizer_path": path,
            "served_model_name": slot.name,
            "program_address": self._registry.server_state.program_address,
        }

    async def health(self, request: web.Request) -> Status:
        """Answer 200 while the engines of all loaded models (or of `?model=`) answer."""
        for slot in self._requested_slots(request):
            if slot.model is not None and not slot.model.healthy:
                raise ServerUnavailable(f"the engine of {slot.name} does not answer")
        return Status("ok")

    async def ready(self, request: web.Request) -> Ready:
        """Answer 200 if a token went through the engine of all loaded models (or of `?model=`)."""
        degraded: list[str] = []
        for slot in self._requested_slots(request):
            if slot.model is not None:
                reply = await self._of(slot.model).endpoints["GET", "/ready"].call(request)
                degraded += [one for one in reply.degraded if one not in degraded]
            elif "model" in request.query:
                _loaded(slot)
        return Ready("ready", tuple(degraded))

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Evict unused prefixes of the named model; a model that is not loaded has none."""
        name, _, _ = await _named_model(request)
        slot = self._registry.slot(name)
        if slot.model is None:
            return web.Response(text=f"The model {slot.name} is not loaded.\n")
        return await self._of(slot.model).info.flush_cache()

    async def metrics(self) -> web.Response:
        """Return the metrics for Prometheus, by model."""
        models: dict[str, Model] = {}
        for slot in self._registry.all:
            model, status = slot.model, None
            if model is not None:  # the model may be unloaded meanwhile
                with suppress(RootlaceError):
                    status = await model.status()
            models[slot.name] = None if model is None else model.metrics, status
        body = text_of_all(self._registry.metrics, models)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    def _requested_slots(self, request: web.Request) -> list[ModelSlot]:
        name = request.query.get("model")
        return self._registry.all if name is None else [self._registry.slot(name)]


def _loaded(slot: ModelSlot) -> ServedModel:
    """Return the loaded model. Raises ServerUnavailable if it is not loaded."""
    if slot.model is None:
        raise ServerUnavailable(f"the model {slot.name} is not loaded")
    return slot.model


def _expires(slot: ModelSlot) -> str:
    """Return when an unused model is unloaded. A key gets `NEVER`: the time would reveal when
    another key used the model last."""
    after = slot.config.gateway.idle_unload
    if after is None or caller() is not None:
        return NEVER
    left = after if slot.users else after - (time.monotonic() - slot.used)
    return (datetime.now(UTC) + timedelta(seconds=left)).isoformat()


def _written(started: int) -> str:
    return datetime.fromtimestamp(started, UTC).isoformat()


async def _named_model(request: web.Request) -> tuple[str | None, float | None, _Named]:
    """Return a request's model, timeout and body; None where missing or unreadable."""
    name: _Scalar = request.query.get("model")
    timeout, body = None, _Named()
    if name is None and request.method == "POST":
        try:
            body = _named.decode(await request.app[RECEIVING].read(request))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None, None, body
        name = body.model or body.name
        with suppress(msgspec.ValidationError):  # the endpoint reports the fault
            timeout = msgspec.convert(body.timeout, Seconds | None)
    return name.removesuffix(":latest") if isinstance(name, str) else None, timeout, body


def runner_for(served: ServedModel | ModelRegistry) -> web.AppRunner:
    """Make a runner of every HTTP endpoint of one model or of several."""
    if isinstance(served, ServedModel):
        return make_runner(served)
    routes = ModelRoutes(served)
    return runner_of(served, routes.all, routes.shared)
