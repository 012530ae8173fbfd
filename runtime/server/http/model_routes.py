"""The endpoints of a server of several models: each request goes to the model that it names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import msgspec
from aiohttp import web

from rootlace.runtime.server.auth import caller
from rootlace.runtime.server.http.admin import Info, ModelCard, model_list
from rootlace.runtime.server.http.app import (
    ANSWERED,
    Shared,
    answers_of,
    app_of,
    endpoints,
    runner_of,
)
from rootlace.runtime.server.http.batch_runner import Answerer, Answering, BatchService
from rootlace.runtime.server.http.body import RECEIVING
from rootlace.runtime.server.http.errors import Handler
from rootlace.runtime.server.http.ollama import NEVER, Entries, Entry, entry_of, running_of
from rootlace.runtime.server.http.openapi import Endpoint, Reference
from rootlace.runtime.server.http.replies import json_response
from rootlace.runtime.server.http.request_fields import waited
from rootlace.runtime.server.metrics import CONTENT_TYPE, Model, text_of_all
from rootlace.runtime.server.model_registry import ModelRegistry, ModelSlot
from rootlace.runtime.server.served_model import ServedModel
from rootlace.wire.errors import RootlaceError, ServerUnavailable
from rootlace.wire.sampling import Seconds

# Endpoints that are not about one model, and that need none to be loaded.
_OF_THE_SERVER = (
    "/v1/files",
    "/v1/batches",
    "/v1/responses/",
    "/abort",
    "/version",
    "/api/version",
    "/page/",
)
_PAGE = "/"
# Endpoints about what a loaded model does and holds: they neither load it nor keep it loaded.
_WATCHING = (
    "/get_server_info",
    "/server_info",
    "/cache/tree",
    "/cache/lint",
    "/cache/pins",
    "/cache/pins/{id}",
)


_Scalar = str | int | float | bool | None
"""What an endpoint may find wrong, without taking time and memory here."""


class _Named(msgspec.Struct):
    """What says which model a body is for, and how long it may be waited for; `name` is Ollama's
    older word."""

    model: _Scalar = None
    name: _Scalar = None
    timeout: _Scalar = None


_named = msgspec.json.Decoder(_Named)


@dataclass(frozen=True)
class _Model:
    """What answers for one loaded model: its endpoints, and what rows of batches ask."""

    handlers: dict[tuple[str, str], Handler]
    answers: dict[str, Answerer]
    info: Info


class ModelRoutes:
    """`all` are the endpoints as they are listed and routed."""

    def __init__(self, rooms: ModelRegistry) -> None:
        self._rooms = rooms
        self._started = int(time.time())
        answering = {path: Answering(body, self._answer(path)) for path, body in ANSWERED.items()}
        self.shared = Shared(BatchService(rooms, answering))
        self.all: list[Endpoint] = []
        reference = Reference(lambda: rooms.names[0], self.all)
        own: dict[str, Handler] = {
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
        # Those of no model: they are called only where they need none.
        for one in endpoints(cast(ServedModel, None), self.shared):
            handler = own.get(one.path)
            if handler is None and one.path in _WATCHING:
                handler = self._watch(one.method, one.path)
            elif handler is None:
                free = one.path == _PAGE or one.path.startswith(_OF_THE_SERVER)
                handler = one.handler if free else self._dispatch(one.method, one.path)
            self.all.append(replace(one, handler=handler))

    # ------------------------------------------------------------ to one model

    def _dispatch(self, method: str, path: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            async with self._use(*await _asked(request)) as model:
                return await model.handlers[method, path](request)

        return handle

    def _watch(self, method: str, path: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            asked, _ = await _asked(request)
            gateway = _loaded(self._rooms.room(asked))
            return await self._of(gateway).handlers[method, path](request)

        return handle

    def _answer(self, path: str) -> Answerer:
        async def answer(body: Any) -> Mapping[str, Any]:
            async with self._use(body.model, getattr(body, "timeout", None)) as model:
                return await model.answers[path](body)

        return answer

    @asynccontextmanager
    async def _use(self, asked: str | None, timeout: float | None) -> AsyncIterator[_Model]:
        """The model, once it is loaded; the time that this takes is part of the `timeout`."""
        begun = time.monotonic()
        async with self._rooms.use(asked, timeout) as gateway:
            with waited(time.monotonic() - begun):
                yield self._of(gateway)

    def _of(self, gateway: ServedModel) -> _Model:
        found = gateway.answering
        if not isinstance(found, _Model):
            listed = endpoints(gateway, self.shared)
            handlers = {(one.method, one.path): one.handler for one in listed}
            found = gateway.answering = _Model(handlers, answers_of(gateway), Info(gateway))
        return found

    # ------------------------------------------------------------ of all models

    async def models(self, request: web.Request) -> web.Response:
        return json_response(
            model_list([card for room in self._rooms.all for card in self._cards(room)])
        )

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        cards = self._cards(self._rooms.room(name))
        return json_response(next((one for one in cards if one.id == name), cards[0]))

    def _cards(self, room: ModelSlot) -> list[ModelCard]:
        """The model as `/v1/models` has it; less is known of one that is not loaded."""
        if room.gateway is not None:
            return self._of(room.gateway).info.cards()
        return [
            ModelCard(
                id=room.name,
                display_name=room.name,
                created=self._started,
                created_at=_written(self._started),
                root=room.config.gateway.model if caller() is None else room.name,
                parent=None,
            )
        ]

    async def tags(self, request: web.Request) -> web.Response:
        return json_response(Entries(models=[await self._tag(room) for room in self._rooms.all]))

    async def running(self, request: web.Request) -> web.Response:
        return json_response(
            Entries(
                models=[
                    running_of(room.gateway, await self._tag(room), _expires(room))
                    for room in self._rooms.all
                    if room.gateway is not None
                ]
            )
        )

    async def _tag(self, room: ModelSlot) -> Entry:
        path = room.config.gateway.model
        return await asyncio.to_thread(entry_of, room.name, path, _written(self._started))

    async def model_info(self, request: web.Request) -> web.StreamResponse:
        """Programs ask it where to connect, so it loads nothing."""
        room = self._rooms.room(request.query.get("model"))
        if room.gateway is not None:
            return await self._of(room.gateway).info.model_info(request)
        path = room.config.gateway.model if caller() is None else room.name
        return json_response(
            {
                "model_path": path,
                "tokenizer_path": path,
                "served_model_name": room.name,
                "program_address": self._rooms.program_address,
            }
        )

    async def health(self, request: web.Request) -> web.StreamResponse:
        """200 while the engines of all loaded models (or that of `?model=`) answer."""
        for room in self._asked_rooms(request):
            if room.gateway is not None and not room.gateway.healthy:
                raise ServerUnavailable(f"the engine of {room.name} does not answer")
        return json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """200 if a token went through the engine of all loaded models (or that of `?model=`)."""
        for room in self._asked_rooms(request):
            if room.gateway is not None:
                await self._of(room.gateway).handlers["GET", "/ready"](request)
            elif "model" in request.query:
                _loaded(room)
        return json_response({"status": "ready"})

    async def flush_cache(self, request: web.Request) -> web.StreamResponse:
        """A model that is not loaded has nothing to forget."""
        asked, _ = await _asked(request)
        room = self._rooms.room(asked)
        if room.gateway is None:
            return web.Response(text=f"The model {room.name} is not loaded.\n")
        return await self._of(room.gateway).info.flush_cache(request)

    async def metrics(self, request: web.Request) -> web.Response:
        """For Prometheus, by model."""
        found: dict[str, Model] = {}
        for room in self._rooms.all:
            gateway, status = room.gateway, None
            if gateway is not None:  # it may be unloaded while it is asked
                with suppress(RootlaceError):
                    status = await gateway.status()
            found[room.name] = None if gateway is None else gateway.metrics, status
        body = text_of_all(self._rooms.metrics, found)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    def _asked_rooms(self, request: web.Request) -> list[ModelSlot]:
        asked = request.query.get("model")
        return self._rooms.all if asked is None else [self._rooms.room(asked)]


def _loaded(room: ModelSlot) -> ServedModel:
    """Raises ServerUnavailable for a model that is not loaded."""
    if room.gateway is None:
        raise ServerUnavailable(f"the model {room.name} is not loaded")
    return room.gateway


def _expires(room: ModelSlot) -> str:
    """When the model is unloaded if nobody uses it any more."""
    after = room.config.gateway.idle_unload
    if after is None:
        return NEVER
    left = after if room.users else after - (time.monotonic() - room.used)
    return (datetime.now(UTC) + timedelta(seconds=left)).isoformat()


def _written(started: int) -> str:
    return datetime.fromtimestamp(started, UTC).isoformat()


async def _asked(request: web.Request) -> tuple[str | None, float | None]:
    """The model that a request names, and its timeout; None for what it does not say, or what
    cannot be read."""
    asked: _Scalar = request.query.get("model")
    timeout = None
    if asked is None and request.method == "POST":
        try:
            body = _named.decode(await request.app[RECEIVING].read(request))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None, None
        asked = body.model or body.name
        with suppress(msgspec.ValidationError):  # its endpoint says what is wrong
            timeout = msgspec.convert(body.timeout, Seconds | None)
    return asked.removesuffix(":latest") if isinstance(asked, str) else None, timeout


def make_rooms_runner(rooms: ModelRegistry) -> web.AppRunner:
    """As `make_runner`, for several models."""
    found = ModelRoutes(rooms)
    return runner_of(app_of(rooms, found.all, found.shared), rooms.config)
