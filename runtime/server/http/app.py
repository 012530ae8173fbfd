"""The aiohttp application: its endpoints, middleware and runner."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

from rootlace.runtime.server.http import admin, ollama
from rootlace.runtime.server.http.anthropic import Messages
from rootlace.runtime.server.http.batch_runner import BatchService
from rootlace.runtime.server.http.body import RECEIVING, Receiving
from rootlace.runtime.server.http.chat_pipeline import Chats
from rootlace.runtime.server.http.connections import (
    CONNECTIONS,
    BoundedRunner,
    Connections,
    most_connections,
)
from rootlace.runtime.server.http.endpoint import Endpoint, Reference, endpoint
from rootlace.runtime.server.http.middleware import (
    AccessLogger,
    Pages,
    header_writer,
    request_middleware,
)
from rootlace.runtime.server.http.openai_batches import Batches, Files
from rootlace.runtime.server.http.openai_completions import (
    ChatBody,
    ChatCompletions,
    CompletionBody,
    Completions,
)
from rootlace.runtime.server.http.openai_responses import Responses
from rootlace.runtime.server.http.response_store import ResponseDisk, ResponseStore
from rootlace.runtime.server.http.scoring import Scores
from rootlace.runtime.server.http.sglang_generate import Aborts, Generate, GenerateReply
from rootlace.runtime.server.http.sglang_sessions import PrefixHolds, Sessions
from rootlace.runtime.server.model_registry import ModelRegistry
from rootlace.runtime.server.served_model import ServedModel

# Endpoints ----------------------------------------------------------------------------------------


BATCHED = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""Endpoints that rows of batches may call."""


class Shared(msgspec.Struct, frozen=True):
    """State shared by the endpoints of all models of a server."""

    service: BatchService
    responses: ResponseStore = msgspec.field(default_factory=ResponseStore)
    aborts: Aborts = msgspec.field(default_factory=Aborts)


def endpoints(model: ServedModel, shared: Shared | None = None) -> list[Endpoint]:
    """List every endpoint of `model`, in the order of documentation."""
    chats = Chats(model)
    shared = shared or Shared(BatchService(model))
    files, batches, aborts = Files(shared.service), Batches(shared.service), shared.aborts
    info, health, page = admin.Info(model), admin.Health(model), admin.Page()
    api = ollama.Ollama(model, chats)
    holds = PrefixHolds(model)
    sessions = Sessions(model, holds)
    responses = Responses(model, chats, shared.responses, holds)
    messages, scores = Messages(model, chats), Scores(model, chats)
    tokens = admin.Tokenization(model, chats)
    completions, chat = Completions(model), ChatCompletions(model, chats)
    cache = admin.Cache(model, completions, chat)
    generate = Generate(model, aborts, sessions)
    listed: list[Endpoint] = []
    reference = Reference(lambda: model.model_info.name, listed)
    get, post, delete = (partial(endpoint, method) for method in ("GET", "POST", "DELETE"))
    listed += [
        post("/v1/completions", completions.handle, "OpenAI's completions"),
        post("/v1/chat/completions", chat.handle, "OpenAI's chat completions"),
        post("/v1/responses", responses.handle, "OpenAI's responses"),
        post(
            "/v1/responses/input_tokens",
            responses.count,
            "how many tokens the conversation of a response is",
        ),
        get("/v1/responses/{id}", responses.get, "a response that was kept"),
        get(
            "/v1/responses/{id}/input_items",
            responses.inputs,
            "what a response that was kept was made from",
        ),
        delete("/v1/responses/{id}", responses.delete, "forget a response"),
        post("/v1/messages", messages.handle, "Anthropic's messages"),
        post(
            "/v1/messages/count_tokens",
            messages.count_tokens,
            "how many tokens Anthropic's messages are",
        ),
        post("/v1/embeddings", scores.embed, "vectors of texts"),
        post("/v1/score", scores.score, "how likely labels are"),
        post("/v1/rerank", scores.rerank, "texts by relevance"),
        post(
            "/v1/files",
            files.upload,
            "send a file: a form with purpose and file",
            takes="multipart/form-data",
        ),
        get("/v1/files", files.list, "the files that are kept, latest first"),
        get("/v1/files/{id}", files.get, "about a file"),
        get(
            "/v1/files/{id}/content",
            files.content,
            "what a file holds",
            content="application/jsonl",
        ),
        delete("/v1/files/{id}", files.delete, "forget a file"),
        post("/v1/batches", batches.create, "answer a file of requests"),
        get("/v1/batches", batches.list, "the batches, latest first"),
        get("/v1/batches/{id}", batches.get, "how far a batch is"),
        post("/v1/batches/{id}/cancel", batches.cancel, "end a batch"),
        get("/v1/models", info.models, "the served model"),
        # A model's name may hold slashes.
        get("/v1/models/{name:.+}", info.model, "the served model, by name"),
        post("/api/chat", api.chat, "Ollama's chat", reply=ollama.ChatLine),
        post(
            "/api/generate", api.generate, "Ollama's answer to a prompt", reply=ollama.GenerateLine
        ),
        post("/api/embed", api.embed, "Ollama's vectors of texts"),
        post("/api/embeddings", api.embed_one, "Ollama's older way to a text's vector"),
        post("/api/show", api.show, "the served model"),
        get("/api/tags", api.tags, "the served model"),
        get("/api/ps", api.running, "the served model"),
        get("/api/version", info.version, "the server's version"),
        post(
            "/generate",
            generate.handle,
            "sglang's native interface",
            reply=GenerateReply | list[GenerateReply],
        ),
        post("/abort", aborts.handle, "end a request of /generate"),
        post("/abort_request", aborts.handle, "the same"),
        post(
            "/open_session",
            sessions.open,
            "begin a session, in which requests of /generate go on from earlier ones",
        ),
        post("/close_session", sessions.close, "end a session"),
        post("/select", scores.select, "the likeliest of choices behind a prompt"),
        post("/tokenize", tokens.tokenize, "a text or conversation as tokens"),
        post("/detokenize", tokens.detokenize, "tokens as text"),
        get("/tokenizer_info", info.tokenizer_info, "the tokenizer's configuration"),
        get("/health", health.health, "200 while the engine answers"),
        get("/health_generate", health.health_generate, "200 if a token can be made now"),
        get("/ready", health.ready, "200 if a token went through the engine lately"),
        get("/metrics", health.metrics, "for Prometheus", content="text/plain"),
        get("/version", info.version, "the server's version"),
        get("/get_model_info", info.model_info, "what is served"),
        get("/get_server_info", info.server_info, "what is served, and counters"),
        get("/server_info", info.server_info, "the same"),
        get(
            "/", page.index, "a page to try the server on and to see its cache", content="text/html"
        ),
        get("/page/{name}", page.file, "the page's files", content="*/*"),
        get("/cache/lint", cache.lint, "what keeps prompts from sharing more"),
        get("/cache/tree", cache.tree, "what the cache holds, used last first"),
        get("/cache/pins", cache.pins, "the prompts that are pinned"),
        delete("/cache/pins/{id}", cache.unpin, "let a pinned prompt go"),
        post(
            "/cache/explain",
            cache.explain,
            "how far the prompt of a completion or chat completion is cached, and why no further",
            body=CompletionBody,
            other_body=ChatBody,
        ),
        get("/openapi.json", reference.openapi, "this list for machines: OpenAPI"),
        get("/docs", reference.page, "this list for people", content="text/html"),
        post("/flush_cache", info.flush_cache, "forget unused prefixes", content="text/plain"),
        post(
            "/pause_generation",
            info.pause,
            "compute nothing until /continue_generation; requests stay as they are",
        ),
        post("/continue_generation", info.go_on, "go on with what was paused"),
    ]
    return listed


def batched(listed: list[Endpoint]) -> dict[str, Endpoint]:
    """Return the endpoints of `BATCHED`, by path."""
    found = {one.path: one for one in listed}
    return {path: found[path] for path in BATCHED}


# App ----------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

# Time after which a stopping server cancels handlers.
SHUTDOWN_SECONDS = 0.5
# Time after which a connection without the whole head of a request is closed.
IDLE_SECONDS = 75.0


def make_runner(model: ServedModel) -> web.AppRunner:
    """Make a runner of every HTTP endpoint of `model`."""
    shared = Shared(BatchService(model))
    served = endpoints(model, shared)
    shared.service.answers = batched(served)
    return runner_of(model, served, shared)


def runner_of(
    server: ServedModel | ModelRegistry, served: list[Endpoint], shared: Shared
) -> web.AppRunner:
    """Make a runner of the endpoints `served`, with the server's middleware and bounds.

    A disconnect cancels the client's handler; otherwise it would be noticed only at the next write.
    """
    config = server.config
    pages = Pages.of(config)
    middleware = request_middleware(server, pages, served)
    app = web.Application(middlewares=[middleware], client_max_size=config.max_body_bytes)
    app[RECEIVING] = Receiving(config)
    app[CONNECTIONS] = Connections(most_connections(config.max_http_connections))
    app.add_routes([web.route(one.method, one.path, one.handle) for one in served])

    app.on_response_prepare.append(header_writer(server, pages))

    async def keep_responses(app: web.Application) -> AsyncIterator[None]:
        disk = ResponseDisk(Path(config.state) / "responses.sqlite") if config.state else None
        if disk is not None:
            shared.responses.open(disk)
        yield
        if disk is not None:
            disk.close()

    app.cleanup_ctx.extend((shared.service.lifetime, keep_responses))
    return BoundedRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_SECONDS,
        keepalive_timeout=IDLE_SECONDS,
        access_log=log,
        access_log_class=AccessLogger,
    )
