"""What is served and how it is doing: models, health, server information; and the cache flush."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.branches.model_name import model_names
from rootlace.runtime.gateway.http.body import raw_body
from rootlace.runtime.gateway.http.replies import Status, check_model, json_response


class ModelCard(msgspec.Struct, kw_only=True):
    """A model, as OpenAI's and Anthropic's clients read it; an adapter's `parent` is its model.
    `default_sampling`: what requests that do not say otherwise are sampled with, and
    `default_sampling_from`: where each comes from; neither is known of a model that is not loaded.
    """

    id: str
    object: str = "model"
    type: str = "model"
    display_name: str
    created: int
    created_at: str
    owned_by: str = "rootlace"
    root: str
    parent: str | None
    max_model_len: int | None = None
    default_sampling: dict[str, float] | None = None
    default_sampling_from: dict[str, str] | None = None


class ModelList(msgspec.Struct, kw_only=True):
    """All that is served; what follows the list is Anthropic's."""

    object: str = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str
    last_id: str


class Version(msgspec.Struct):
    """The server's version."""

    version: str


class ServedModel(msgspec.Struct):
    """What is served; programs connect to `program_address`. `default_sampling` and
    `default_sampling_from` are as `/v1/models` has them."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    served_model_name: str
    context_length: int
    vocab_size: int
    block_size: int
    capacity_tokens: int
    program_address: str | None
    default_sampling: dict[str, float]
    default_sampling_from: dict[str, str]


class ServerInfo(msgspec.Struct):
    """What is served, and counters as `status`."""

    version: str
    model_path: str
    served_model_name: str
    context_length: int
    max_total_num_tokens: int
    page_size: int
    disable_radix_cache: bool
    program_address: str | None
    healthy: bool
    status: dict[str, Any]


class Info:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = int(time.time())

    async def models(self, request: web.Request) -> web.Response:
        return json_response(model_list(self.cards()))

    async def model(self, request: web.Request) -> web.Response:
        return json_response(self._model(check_model(self._gateway, request.match_info["name"])))

    async def model_info(self, request: web.Request) -> web.Response:
        info = self._gateway.model_info
        return json_response(
            ServedModel(
                model_path=info.path,
                tokenizer_path=info.path,
                is_generation=info.labels is None,
                served_model_name=info.name,
                context_length=info.context_length,
                vocab_size=info.vocab_size,
                block_size=info.block_size,
                capacity_tokens=info.capacity_tokens,
                program_address=self._gateway.program_address,
                default_sampling=info.sampling,
                default_sampling_from=info.sampling_from,
            )
        )

    async def version(self, request: web.Request) -> web.Response:
        return json_response(Version(metadata.version("rootlace")))

    async def tokenizer_info(self, request: web.Request) -> web.Response:
        """The tokenizer's configuration and the chat template, as lm-eval asks for them."""
        gateway = self._gateway
        template = {} if gateway.chat.source is None else {"chat_template": gateway.chat.source}
        return json_response({**gateway.tokenizer.config, **template})

    async def server_info(self, request: web.Request) -> web.Response:
        info = self._gateway.model_info
        status = await self._gateway.status()
        return json_response(
            ServerInfo(
                version=metadata.version("rootlace"),
                model_path=info.path,
                served_model_name=info.name,
                context_length=info.context_length,
                max_total_num_tokens=status.get("blocks_total", 0) * info.block_size,
                page_size=info.block_size,
                disable_radix_cache=not self._gateway.model_info.caching,
                program_address=self._gateway.program_address,
                healthy=self._gateway.healthy,
                status=status,
            )
        )

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Forget every cached prefix that no running request uses."""
        await raw_body(request)
        await self._gateway.flush()
        return web.Response(text="Cache flushed.\n")

    async def pause(self, request: web.Request) -> web.Response:
        """Have the engine compute nothing, whatever `mode` sglang's clients name."""
        await raw_body(request)
        self._gateway.engine.pause(True)
        return json_response(Status("paused"))

    async def go_on(self, request: web.Request) -> web.Response:
        await raw_body(request)
        self._gateway.engine.pause(False)
        return json_response(Status("ok"))

    def cards(self) -> list[ModelCard]:
        """The model, and with each of its adapters."""
        return [self._model(name) for name in model_names(self._gateway.model_info)]

    def _model(self, name: str) -> ModelCard:
        info = self._gateway.model_info
        return ModelCard(
            id=name,
            display_name=name,
            created=self._started,
            created_at=datetime.fromtimestamp(self._started, UTC).isoformat(),
            root=info.path,
            parent=None if name == info.name else info.name,
            max_model_len=info.context_length,
            default_sampling=info.sampling,
            default_sampling_from=info.sampling_from,
        )


def model_list(cards: list[ModelCard]) -> ModelList:
    return ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id)
