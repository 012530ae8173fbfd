"""`POST /v1/embeddings`: vectors of texts."""

from __future__ import annotations

import base64
from typing import Annotated, Literal, TypedDict

from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.branches.vectors import Vector, find_vectors
from rootlace.runtime.gateway.http.body import read_body
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.fields import ignored
from rootlace.runtime.gateway.http.handling import HandlingBody, handling_without_pin
from rootlace.runtime.gateway.http.prompts import parse_prompts
from rootlace.runtime.gateway.http.replies import (
    PromptTokens,
    adapter_of,
    check_model,
    json_response,
)
from rootlace.runtime.gateway.http.reply_headers import note_usage
from rootlace.runtime.gateway.http.source import source
from rootlace.runtime.gateway.keys.account import admitted, namespace_of
from rootlace.wire.protocol import Usage


class EmbeddingBody(HandlingBody, kw_only=True):
    """`POST /v1/embeddings`. `pooling` and `normalize` are not OpenAI's."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    user: Annotated[str | None, ignored("it is about the account of OpenAI's clients")] = None


class Embedding(TypedDict):
    """A vector: numbers, or their bytes (float32, little-endian) in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class EmbeddingReply(TypedDict):
    """The reply to `POST /v1/embeddings`."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class Embeddings:
    """The endpoint's handler."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def handle(self, request: web.Request) -> web.Response:
        return json_response(await self.answer(await read_body(request, EmbeddingBody)))

    async def answer(self, body: EmbeddingBody) -> EmbeddingReply:
        """The whole reply."""
        model = check_model(self._gateway, body.model)
        size = self._gateway.engine.info.hidden_size
        if body.dimensions is not None and not 0 < body.dimensions <= size:
            raise InvalidParameter("dimensions", f"dimensions must be from 1 to {size}")
        prompts = parse_prompts(body.input, "input", self._gateway.model_info.vocab_size)
        account = admitted()
        found = await find_vectors(
            self._gateway,
            [prompt.parts() for prompt in prompts],
            body.pooling,
            normalise=body.normalize is not False,
            dimensions=body.dimensions,
            namespace=namespace_of(account, body.cache_salt),
            account=account,
            source=source(),
            adapter=adapter_of(self._gateway, model, body.adapter),
            handling=handling_without_pin(body),
        )
        total = sum(vector.prompt_tokens for vector in found)
        cached = sum(vector.cached_tokens for vector in found)
        note_usage(Usage(prompt_tokens=total, cached_tokens=cached), None)
        return {
            "object": "list",
            "model": model,
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _encoded(vector, body.encoding_format),
                }
                for index, vector in enumerate(found)
            ],
            "usage": {
                "prompt_tokens": total,
                "total_tokens": total,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }


def _encoded(vector: Vector, form: str | None) -> list[float] | str:
    values = vector.values.astype("<f4")
    return base64.b64encode(values.tobytes()).decode() if form == "base64" else values.tolist()
