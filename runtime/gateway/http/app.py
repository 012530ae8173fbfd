"""The aiohttp application: its endpoints, and what stands before all of them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.access_log import AccessLogger
from rootlace.runtime.gateway.http.auth import api_key_middleware
from rootlace.runtime.gateway.http.browsers import Pages, allow_page, pages_middleware
from rootlace.runtime.gateway.http.connections import BoundedRunner, most_connections
from rootlace.runtime.gateway.http.content_type import checked
from rootlace.runtime.gateway.http.draining import drain_middleware
from rootlace.runtime.gateway.http.endpoint import Endpoint
from rootlace.runtime.gateway.http.endpoints import Shared, batch_service, endpoints
from rootlace.runtime.gateway.http.errors import Handler, error_middleware
from rootlace.runtime.gateway.http.openai.response_disk import ResponseDisk
from rootlace.runtime.gateway.http.receiving import RECEIVING, Receiving
from rootlace.runtime.gateway.http.reply_headers import add_told_headers, told_middleware
from rootlace.runtime.gateway.http.request_id import echo_request_id, request_id_middleware
from rootlace.runtime.gateway.http.source import source_middleware
from rootlace.runtime.gateway.http.unknown_paths import unknown_path_middleware
from rootlace.runtime.gateway.rooms import Rooms
from rootlace.runtime.gateway.spans import note_request

log = logging.getLogger(__name__)

# Handlers still running this long after the server was told to stop are cancelled.
SHUTDOWN_SECONDS = 0.5
# A connection on which no whole head of a request came for so long is closed.
IDLE_SECONDS = 75.0


def make_app(gateway: Gateway) -> web.Application:
    """Every HTTP endpoint of `gateway`.

    Serve it with `make_runner`: without handler cancellation, a client that has disconnected is
    noticed only when something is written to it.
    """
    shared = Shared(batch_service(gateway))
    return app_of(gateway, endpoints(gateway, shared), shared)


def app_of(server: Gateway | Rooms, served: list[Endpoint], shared: Shared) -> web.Application:
    """The endpoints `served`, behind everything that all of a server's have before them."""
    config = server.config
    pages = Pages.of(config)
    middlewares: list[Middleware] = [
        request_id_middleware,
        told_middleware,
        source_middleware(config.front_secret),
        error_middleware,
        pages_middleware(pages),
    ]
    if server.keys.needed:
        middlewares.append(api_key_middleware(server.keys))
    if server.spans is not None:
        middlewares.append(trace_middleware)
    middlewares.append(drain_middleware(server.drain))
    middlewares.append(unknown_path_middleware(served))
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_bytes)
    app[RECEIVING] = Receiving(config)
    app.add_routes([web.route(one.method, one.path, checked(one)) for one in served])

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        echo_request_id(request, response)
        add_told_headers(response)
        allow_page(pages, request, response)
        resource = request.match_info.route.resource
        # Paths that do not exist are one, however many are tried.
        path = "" if resource is None else resource.canonical
        server.metrics.replied(path, response.status)

    app.on_response_prepare.append(add_headers)

    async def keep_responses(app: web.Application) -> AsyncIterator[None]:
        disk = ResponseDisk(Path(config.state) / "responses.sqlite") if config.state else None
        if disk is not None:
            shared.responses.open(disk)
        yield
        if disk is not None:
            disk.close()

    app.cleanup_ctx.extend((shared.service.lifetime, keep_responses))
    return app


@web.middleware
async def trace_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Spans of the request continue the trace that its headers name."""
    names = ("traceparent", "tracestate")
    note_request(request.path, {n: request.headers[n] for n in names if n in request.headers})
    return await handler(request)


def make_runner(gateway: Gateway) -> web.AppRunner:
    """The application in a runner that cancels a handler when its client disconnects."""
    return runner_of(make_app(gateway), gateway.config)


def runner_of(app: web.Application, config: GatewayConfig) -> web.AppRunner:
    return BoundedRunner(
        app,
        most_connections(config.max_http_connections),
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_SECONDS,
        keepalive_timeout=IDLE_SECONDS,
        access_log=log,
        access_log_class=AccessLogger,
    )
