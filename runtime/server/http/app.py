"""The aiohttp application: its endpoints, and what stands before all of them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.contracts.messages import TreePage
from rootlace.runtime.server.http import ollama
from rootlace.runtime.server.http.admin import (
    Cache,
    CacheQuery,
    DetokenizeBody,
    Detokenized,
    Findings,
    Health,
    Info,
    ModelCard,
    ModelEntry,
    ModelList,
    Page,
    Pins,
    Ready,
    Released,
    ServerInfo,
    Tokenization,
    TokenizeBody,
    Tokenized,
    TreeQuery,
    Version,
)
from rootlace.runtime.server.http.anthropic import (
    MESSAGES_BODY,
    CountBody,
    MessageReply,
    Messages,
    TokenCount,
)
from rootlace.runtime.server.http.batch_runner import Answerer, Answering, BatchService
from rootlace.runtime.server.http.batch_store import Batch, Deleted, File, Listing, PageQuery
from rootlace.runtime.server.http.body import RECEIVING, Receiving
from rootlace.runtime.server.http.chat_pipeline import Chats
from rootlace.runtime.server.http.connections import (
    CONNECTIONS,
    BoundedRunner,
    Connections,
    most_connections,
)
from rootlace.runtime.server.http.middleware import (
    AccessLogger,
    Pages,
    header_writer,
    request_middleware,
)
from rootlace.runtime.server.http.ollama import (
    Answers,
    ChatLine,
    Embedded,
    Entries,
    GenerateLine,
    Models,
    Shown,
)
from rootlace.runtime.server.http.openai_batches import BatchBody, Batches, Files, FilesQuery
from rootlace.runtime.server.http.openai_chat import CHAT_BODY, ChatCompletions, ChatReply
from rootlace.runtime.server.http.openai_completions import (
    COMPLETION_BODY,
    CompletionReply,
    Completions,
)
from rootlace.runtime.server.http.openai_responses import RESPONSES_BODY, ResponseReply, Responses
from rootlace.runtime.server.http.openapi import Endpoint, Reference
from rootlace.runtime.server.http.replies import ReportReply, Status
from rootlace.runtime.server.http.response_store import (
    InputItem,
    InputQuery,
    ResponseDisk,
    ResponseQuery,
    ResponseStore,
)
from rootlace.runtime.server.http.scoring import (
    EmbeddingBody,
    EmbeddingReply,
    Embeddings,
    LabelScores,
    PairScores,
    Ranking,
    RerankBody,
    ScoreBody,
    Scores,
    SelectBody,
    Selection,
    Selections,
)
from rootlace.runtime.server.http.sglang_generate import (
    GENERATE_BODY,
    AbortBody,
    Aborted,
    Aborts,
    Generate,
    GenerateReply,
)
from rootlace.runtime.server.http.sglang_sessions import (
    CloseSessionBody,
    OpenSessionBody,
    PrefixHolds,
    Sessions,
)
from rootlace.runtime.server.model_registry import ModelRegistry
from rootlace.runtime.server.served_model import ServedModel

# Endpoints ----------------------------------------------------------------------------------------
#
# Which path is answered by which handler, and what each takes and gives.


ANSWERED: dict[str, type[Any]] = {
    "/v1/chat/completions": CHAT_BODY,
    "/v1/completions": COMPLETION_BODY,
    "/v1/embeddings": EmbeddingBody,
}
"""What the rows of batches may ask, as requests do."""


def answers_of(gateway: ServedModel) -> dict[str, Answerer]:
    """How each path of `ANSWERED` is answered."""
    return {
        "/v1/chat/completions": ChatCompletions(gateway, Chats(gateway)).answer,
        "/v1/completions": Completions(gateway).answer,
        "/v1/embeddings": Embeddings(gateway).answer,
    }


def batch_service(gateway: ServedModel) -> BatchService:
    """Batches whose rows are answered as requests are."""
    answers = answers_of(gateway)
    return BatchService(
        gateway, {path: Answering(body, answers[path]) for path, body in ANSWERED.items()}
    )


@dataclass(frozen=True)
class Shared:
    """What the endpoints of all models of a server share."""

    service: BatchService
    responses: ResponseStore = field(default_factory=ResponseStore)
    aborts: Aborts = field(default_factory=Aborts)


def endpoints(gateway: ServedModel, shared: Shared | None = None) -> list[Endpoint]:
    """Every endpoint of `gateway`, in the order in which they are listed."""
    chats = Chats(gateway)
    shared = shared or Shared(batch_service(gateway))
    files, batches = Files(shared.service), Batches(shared.service)
    info, health = Info(gateway), Health(gateway)
    answers, models = Answers(gateway, chats), Models(gateway, chats)
    holds = PrefixHolds(gateway)
    sessions = Sessions(gateway, holds)
    responses = Responses(gateway, chats, shared.responses, holds)
    messages = Messages(gateway, chats)
    scores = Scores(gateway, chats)
    tokenization = Tokenization(gateway, chats)
    completions, chat = Completions(gateway), ChatCompletions(gateway, chats)
    cache = Cache(gateway, completions, chat)
    page = Page()
    listed: list[Endpoint] = []
    reference = Reference(lambda: gateway.model_info.name, listed)
    get, post, delete = (partial(Endpoint, method) for method in ("GET", "POST", "DELETE"))
    found = [
        post(
            "/v1/completions",
            completions.handle,
            "OpenAI's completions",
            CompletionReply,
            COMPLETION_BODY,
        ),
        post(
            "/v1/chat/completions", chat.handle, "OpenAI's chat completions", ChatReply, CHAT_BODY
        ),
        post(
            "/v1/responses", responses.handle, "OpenAI's responses", ResponseReply, RESPONSES_BODY
        ),
        get(
            "/v1/responses/{id}",
            responses.get,
            "a response that was kept",
            ResponseReply,
            query=ResponseQuery,
        ),
        get(
            "/v1/responses/{id}/input_items",
            responses.inputs,
            "what a response that was kept was made from",
            Listing[InputItem],
            query=InputQuery,
        ),
        delete("/v1/responses/{id}", responses.delete, "forget a response", Deleted),
        post("/v1/messages", messages.handle, "Anthropic's messages", MessageReply, MESSAGES_BODY),
        post(
            "/v1/messages/count_tokens",
            messages.count_tokens,
            "how many tokens Anthropic's messages are",
            TokenCount,
            CountBody,
        ),
        post(
            "/v1/embeddings",
            Embeddings(gateway).handle,
            "vectors of texts",
            EmbeddingReply,
            EmbeddingBody,
        ),
        post(
            "/v1/score", scores.score, "how likely labels are", LabelScores | PairScores, ScoreBody
        ),
        post("/v1/rerank", scores.rerank, "texts by relevance", Ranking, RerankBody),
        post(
            "/v1/files",
            files.upload,
            "send a file: a form with purpose and file",
            File,
            takes="multipart/form-data",
        ),
        get(
            "/v1/files",
            files.list,
            "the files that are kept, latest first",
            Listing[File],
            query=FilesQuery,
        ),
        get("/v1/files/{id}", files.get, "about a file", File),
        get(
            "/v1/files/{id}/content",
            files.content,
            "what a file holds",
            content="application/jsonl",
        ),
        delete("/v1/files/{id}", files.delete, "forget a file", Deleted),
        post("/v1/batches", batches.create, "answer a file of requests", Batch, BatchBody),
        get(
            "/v1/batches",
            batches.list,
            "the batches, latest first",
            Listing[Batch],
            query=PageQuery,
        ),
        get("/v1/batches/{id}", batches.get, "how far a batch is", Batch),
        post("/v1/batches/{id}/cancel", batches.cancel, "end a batch", Batch),
        get("/v1/models", info.models, "the served model", ModelList),
        # A model's name may hold slashes.
        get("/v1/models/{name:.+}", info.model, "the served model, by name", ModelCard),
        post("/api/chat", answers.chat, "Ollama's chat", ChatLine, ollama.ChatBody),
        post(
            "/api/generate",
            answers.generate,
            "Ollama's answer to a prompt",
            GenerateLine,
            ollama.GenerateBody,
        ),
        post("/api/embed", models.embed, "Ollama's vectors of texts", Embedded, ollama.EmbedBody),
        post(
            "/api/embeddings",
            models.embed_one,
            "Ollama's older way to a text's vector",
            ollama.EmbeddedOne,
            ollama.EmbeddingsBody,
        ),
        post("/api/show", models.show, "the served model", Shown, ollama.ShowBody),
        get("/api/tags", models.tags, "the served model", Entries),
        get("/api/ps", models.running, "the served model", Entries),
        get("/api/version", models.version, "the server's version", Version),
        post(
            "/generate",
            Generate(gateway, shared.aborts, sessions).handle,
            "sglang's native interface",
            GenerateReply | list[GenerateReply],
            GENERATE_BODY,
        ),
        post("/abort", shared.aborts.handle, "end a request of /generate", Aborted, AbortBody),
        post("/abort_request", shared.aborts.handle, "the same", Aborted, AbortBody),
        post(
            "/open_session",
            sessions.open,
            "begin a session, in which requests of /generate go on from earlier ones",
            str,
            OpenSessionBody,
        ),
        post("/close_session", sessions.close, "end a session", Status, CloseSessionBody),
        post(
            "/select",
            Selections(gateway).handle,
            "the likeliest of choices behind a prompt",
            Selection,
            SelectBody,
        ),
        post(
            "/tokenize",
            tokenization.tokenize,
            "a text or conversation as tokens",
            Tokenized,
            TokenizeBody,
        ),
        post("/detokenize", tokenization.detokenize, "tokens as text", Detokenized, DetokenizeBody),
        get(
            "/tokenizer_info", info.tokenizer_info, "the tokenizer's configuration", dict[str, Any]
        ),
        get("/health", health.health, "200 while the engine answers", Status),
        get("/health_generate", health.health_generate, "200 if a token can be made now", Status),
        get("/ready", health.ready, "200 if a token went through the engine lately", Ready),
        get("/metrics", health.metrics, "for Prometheus", content="text/plain"),
        get("/version", info.version, "the server's version", Version),
        get("/get_model_info", info.model_info, "what is served", ModelEntry),
        get("/get_server_info", info.server_info, "what is served, and counters", ServerInfo),
        get("/server_info", info.server_info, "the same", ServerInfo),
        get(
            "/", page.index, "a page to try the server on and to see its cache", content="text/html"
        ),
        get("/page/{name}", page.file, "the page's files", content="*/*"),
        get(
            "/cache/lint",
            cache.lint,
            "what keeps prompts from sharing more",
            Findings,
            query=CacheQuery,
        ),
        get(
            "/cache/tree",
            cache.tree,
            "what the cache holds, used last first",
            TreePage,
            query=TreeQuery,
        ),
        get("/cache/pins", cache.pins, "the prompts that are pinned", Pins, query=CacheQuery),
        delete(
            "/cache/pins/{id}", cache.unpin, "let a pinned prompt go", Released, query=CacheQuery
        ),
        post(
            "/cache/explain",
            cache.explain,
            "how far the prompt of a completion or chat completion is cached, and why no further",
            ReportReply,
            COMPLETION_BODY,
            other_body=CHAT_BODY,
        ),
        get("/openapi.json", reference.openapi, "this list for machines: OpenAPI", dict[str, Any]),
        get("/docs", reference.page, "this list for people", content="text/html"),
        post("/flush_cache", info.flush_cache, "forget unused prefixes", content="text/plain"),
        post(
            "/pause_generation",
            info.pause,
            "compute nothing until /continue_generation; requests stay as they are",
            Status,
        ),
        post("/continue_generation", info.go_on, "go on with what was paused", Status),
    ]
    listed += found
    return listed


# App ----------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

# Handlers still running this long after the server was told to stop are cancelled.
SHUTDOWN_SECONDS = 0.5
# A connection on which no whole head of a request came for so long is closed.
IDLE_SECONDS = 75.0


def make_app(gateway: ServedModel) -> web.Application:
    """Every HTTP endpoint of `gateway`.

    Serve it with `make_runner`: without handler cancellation, a client that has disconnected is
    noticed only when something is written to it.
    """
    shared = Shared(batch_service(gateway))
    return app_of(gateway, endpoints(gateway, shared), shared)


def app_of(
    server: ServedModel | ModelRegistry, served: list[Endpoint], shared: Shared
) -> web.Application:
    """The endpoints `served`, behind everything that all of a server's have before them."""
    config = server.config
    pages = Pages.of(config)
    middleware = request_middleware(server, pages, served)
    app = web.Application(middlewares=[middleware], client_max_size=config.max_body_bytes)
    app[RECEIVING] = Receiving(config)
    app[CONNECTIONS] = Connections(most_connections(config.max_http_connections))
    app.add_routes([web.route(one.method, one.path, one.handler) for one in served])

    app.on_response_prepare.append(header_writer(server, pages))

    async def keep_responses(app: web.Application) -> AsyncIterator[None]:
        disk = ResponseDisk(Path(config.state) / "responses.sqlite") if config.state else None
        if disk is not None:
            shared.responses.open(disk)
        yield
        if disk is not None:
            disk.close()

    app.cleanup_ctx.extend((shared.service.lifetime, keep_responses))
    return app


def make_runner(gateway: ServedModel) -> web.AppRunner:
    """The application in a runner that cancels a handler when its client disconnects."""
    return runner_of(make_app(gateway), gateway.config)


def runner_of(app: web.Application, config: GatewayConfig) -> web.AppRunner:
    return BoundedRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_SECONDS,
        keepalive_timeout=IDLE_SECONDS,
        access_log=log,
        access_log_class=AccessLogger,
    )
