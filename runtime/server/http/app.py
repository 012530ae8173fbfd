"""The aiohttp application: its endpoints, and what stands before all of them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
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
    found = [
        Endpoint(
            "POST",
            "/v1/completions",
            completions.handle,
            "OpenAI's completions",
            COMPLETION_BODY,
            reply=CompletionReply,
        ),
        Endpoint(
            "POST",
            "/v1/chat/completions",
            chat.handle,
            "OpenAI's chat completions",
            CHAT_BODY,
            reply=ChatReply,
        ),
        Endpoint(
            "POST",
            "/v1/responses",
            responses.handle,
            "OpenAI's responses",
            RESPONSES_BODY,
            reply=ResponseReply,
        ),
        Endpoint(
            "GET",
            "/v1/responses/{id}",
            responses.get,
            "a response that was kept",
            query=ResponseQuery,
            reply=ResponseReply,
        ),
        Endpoint(
            "GET",
            "/v1/responses/{id}/input_items",
            responses.inputs,
            "what a response that was kept was made from",
            query=InputQuery,
            reply=Listing[InputItem],
        ),
        Endpoint(
            "DELETE", "/v1/responses/{id}", responses.delete, "forget a response", reply=Deleted
        ),
        Endpoint(
            "POST",
            "/v1/messages",
            messages.handle,
            "Anthropic's messages",
            MESSAGES_BODY,
            reply=MessageReply,
        ),
        Endpoint(
            "POST",
            "/v1/messages/count_tokens",
            messages.count_tokens,
            "how many tokens Anthropic's messages are",
            CountBody,
            reply=TokenCount,
        ),
        Endpoint(
            "POST",
            "/v1/embeddings",
            Embeddings(gateway).handle,
            "vectors of texts",
            EmbeddingBody,
            reply=EmbeddingReply,
        ),
        Endpoint(
            "POST",
            "/v1/score",
            scores.score,
            "how likely labels are",
            ScoreBody,
            reply=LabelScores | PairScores,
        ),
        Endpoint(
            "POST", "/v1/rerank", scores.rerank, "texts by relevance", RerankBody, reply=Ranking
        ),
        Endpoint(
            "POST",
            "/v1/files",
            files.upload,
            "send a file: a form with purpose and file",
            reply=File,
            takes="multipart/form-data",
        ),
        Endpoint(
            "GET",
            "/v1/files",
            files.list,
            "the files that are kept, latest first",
            query=FilesQuery,
            reply=Listing[File],
        ),
        Endpoint("GET", "/v1/files/{id}", files.get, "about a file", reply=File),
        Endpoint(
            "GET",
            "/v1/files/{id}/content",
            files.content,
            "what a file holds",
            content="application/jsonl",
        ),
        Endpoint("DELETE", "/v1/files/{id}", files.delete, "forget a file", reply=Deleted),
        Endpoint(
            "POST",
            "/v1/batches",
            batches.create,
            "answer a file of requests",
            BatchBody,
            reply=Batch,
        ),
        Endpoint(
            "GET",
            "/v1/batches",
            batches.list,
            "the batches, latest first",
            query=PageQuery,
            reply=Listing[Batch],
        ),
        Endpoint("GET", "/v1/batches/{id}", batches.get, "how far a batch is", reply=Batch),
        Endpoint("POST", "/v1/batches/{id}/cancel", batches.cancel, "end a batch", reply=Batch),
        Endpoint("GET", "/v1/models", info.models, "the served model", reply=ModelList),
        # A model's name may hold slashes.
        Endpoint(
            "GET", "/v1/models/{name:.+}", info.model, "the served model, by name", reply=ModelCard
        ),
        Endpoint(
            "POST", "/api/chat", answers.chat, "Ollama's chat", ollama.ChatBody, reply=ChatLine
        ),
        Endpoint(
            "POST",
            "/api/generate",
            answers.generate,
            "Ollama's answer to a prompt",
            ollama.GenerateBody,
            reply=GenerateLine,
        ),
        Endpoint(
            "POST",
            "/api/embed",
            models.embed,
            "Ollama's vectors of texts",
            ollama.EmbedBody,
            reply=Embedded,
        ),
        Endpoint(
            "POST",
            "/api/embeddings",
            models.embed_one,
            "Ollama's older way to a text's vector",
            ollama.EmbeddingsBody,
            reply=ollama.EmbeddedOne,
        ),
        Endpoint(
            "POST", "/api/show", models.show, "the served model", ollama.ShowBody, reply=Shown
        ),
        Endpoint("GET", "/api/tags", models.tags, "the served model", reply=Entries),
        Endpoint("GET", "/api/ps", models.running, "the served model", reply=Entries),
        Endpoint("GET", "/api/version", models.version, "the server's version", reply=Version),
        Endpoint(
            "POST",
            "/generate",
            Generate(gateway, shared.aborts, sessions).handle,
            "sglang's native interface",
            GENERATE_BODY,
            reply=GenerateReply | list[GenerateReply],
        ),
        Endpoint(
            "POST",
            "/abort",
            shared.aborts.handle,
            "end a request of /generate",
            AbortBody,
            reply=Aborted,
        ),
        Endpoint(
            "POST", "/abort_request", shared.aborts.handle, "the same", AbortBody, reply=Aborted
        ),
        Endpoint(
            "POST",
            "/open_session",
            sessions.open,
            "begin a session, in which requests of /generate go on from earlier ones",
            OpenSessionBody,
            reply=str,
        ),
        Endpoint(
            "POST",
            "/close_session",
            sessions.close,
            "end a session",
            CloseSessionBody,
            reply=Status,
        ),
        Endpoint(
            "POST",
            "/select",
            Selections(gateway).handle,
            "the likeliest of choices behind a prompt",
            SelectBody,
            reply=Selection,
        ),
        Endpoint(
            "POST",
            "/tokenize",
            tokenization.tokenize,
            "a text or conversation as tokens",
            TokenizeBody,
            reply=Tokenized,
        ),
        Endpoint(
            "POST",
            "/detokenize",
            tokenization.detokenize,
            "tokens as text",
            DetokenizeBody,
            reply=Detokenized,
        ),
        Endpoint(
            "GET",
            "/tokenizer_info",
            info.tokenizer_info,
            "the tokenizer's configuration",
            reply=dict[str, Any],
        ),
        Endpoint("GET", "/health", health.health, "200 while the engine answers", reply=Status),
        Endpoint(
            "GET",
            "/health_generate",
            health.health_generate,
            "200 if a token can be made now",
            reply=Status,
        ),
        Endpoint(
            "GET",
            "/ready",
            health.ready,
            "200 if a token went through the engine lately",
            reply=Ready,
        ),
        Endpoint("GET", "/metrics", health.metrics, "for Prometheus", content="text/plain"),
        Endpoint("GET", "/version", info.version, "the server's version", reply=Version),
        Endpoint("GET", "/get_model_info", info.model_info, "what is served", reply=ModelEntry),
        Endpoint(
            "GET",
            "/get_server_info",
            info.server_info,
            "what is served, and counters",
            reply=ServerInfo,
        ),
        Endpoint("GET", "/server_info", info.server_info, "the same", reply=ServerInfo),
        Endpoint(
            "GET",
            "/",
            page.index,
            "a page to try the server on and to see its cache",
            content="text/html",
        ),
        Endpoint("GET", "/page/{name}", page.file, "the page's files", content="*/*"),
        Endpoint(
            "GET",
            "/cache/lint",
            cache.lint,
            "what keeps prompts from sharing more",
            query=CacheQuery,
            reply=Findings,
        ),
        Endpoint(
            "GET",
            "/cache/tree",
            cache.tree,
            "what the cache holds, used last first",
            query=TreeQuery,
            reply=TreePage,
        ),
        Endpoint(
            "GET",
            "/cache/pins",
            cache.pins,
            "the prompts that are pinned",
            query=CacheQuery,
            reply=Pins,
        ),
        Endpoint(
            "DELETE",
            "/cache/pins/{id}",
            cache.unpin,
            "let a pinned prompt go",
            query=CacheQuery,
            reply=Released,
        ),
        Endpoint(
            "POST",
            "/cache/explain",
            cache.explain,
            "how far the prompt of a completion or chat completion is cached, and why no further",
            COMPLETION_BODY,
            other_body=CHAT_BODY,
            reply=ReportReply,
        ),
        Endpoint(
            "GET",
            "/openapi.json",
            reference.openapi,
            "this list for machines: OpenAPI",
            reply=dict[str, Any],
        ),
        Endpoint("GET", "/docs", reference.page, "this list for people", content="text/html"),
        Endpoint(
            "POST", "/flush_cache", info.flush_cache, "forget unused prefixes", content="text/plain"
        ),
        Endpoint(
            "POST",
            "/pause_generation",
            info.pause,
            "compute nothing until /continue_generation; requests stay as they are",
            reply=Status,
        ),
        Endpoint(
            "POST", "/continue_generation", info.go_on, "go on with what was paused", reply=Status
        ),
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
