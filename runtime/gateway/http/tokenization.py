"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.http.body import read_body
from rootlace.runtime.gateway.http.prompts import parse_prompts
from rootlace.runtime.gateway.http.replies import check_model, json_response

if TYPE_CHECKING:
    from rootlace.runtime.gateway.core import Gateway


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class Tokenization:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request, TokenizeBody)
        check_model(self._gateway, body.model)
        tokenizer = self._gateway.tokenizer
        ids = tokenizer.encode(body.prompt)
        reply: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._gateway.model_info.context_length,
            "tokens": list(ids),
            "token_strs": [tokenizer.decode([i]) for i in ids] if body.return_token_strs else None,
        }
        return json_response(reply)

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request, DetokenizeBody)
        check_model(self._gateway, body.model)
        if not body.tokens:
            return json_response({"prompt": ""})
        vocab_size = self._gateway.model_info.vocab_size
        (prompt,) = parse_prompts(body.tokens, "tokens", vocab_size)
        return json_response({"prompt": self._gateway.tokenizer.decode(list(prompt.ids or ()))})
