"""The aiohttp application: which path is answered by which handler."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.typedefs import Middleware

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.auth import api_key_middleware
from rootlace.runtime.gateway.http.errors import error_middleware
from rootlace.runtime.gateway.http.info import Info
from rootlace.runtime.gateway.http.native import Generate
from rootlace.runtime.gateway.http.openai_chat import ChatCompletions
from rootlace.runtime.gateway.http.openai_completions import Completions
from rootlace.runtime.gateway.http.tokenization import Tokenization

log = logging.getLogger(__name__)

# Handlers still running this long after the server was told to stop are cancelled.
SHUTDOWN_SECONDS = 0.5


def make_app(gateway: Gateway) -> web.Application:
    """Every HTTP endpoint of `gateway`.

    Serve it with `make_runner`: without handler cancellation, a client that has disconnected is
    noticed only when something is written to it.
    """
    config = gateway.config
    middlewares: list[Middleware] = [error_middleware]
    if config.api_key:
        middlewares.append(api_key_middleware(config.api_key))
    app = web.Application(middlewares=middlewares, client_max_size=config.max_message_bytes)
    info = Info(gateway)
    tokenization = Tokenization(gateway)
    app.add_routes(
        [
            web.post("/v1/completions", Completions(gateway).handle),
            web.post("/v1/chat/completions", ChatCompletions(gateway).handle),
            web.get("/v1/models", info.models),
            # A model's name may hold slashes.
            web.get("/v1/models/{name:.+}", info.model),
            web.get("/health", info.health),
            web.get("/health_generate", info.health_generate),
            web.post("/generate", Generate(gateway).handle),
            web.get("/get_model_info", info.model_info),
            web.get("/get_server_info", info.server_info),
            web.get("/flush_cache", info.flush_cache),
            web.post("/flush_cache", info.flush_cache),
            web.post("/tokenize", tokenization.tokenize),
            web.post("/detokenize", tokenization.detokenize),
        ]
    )
    return app


def make_runner(gateway: Gateway) -> web.AppRunner:
    """The application in a runner that cancels a handler when its client disconnects."""
    return web.AppRunner(
        make_app(gateway),
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_SECONDS,
        access_log=log,
    )
