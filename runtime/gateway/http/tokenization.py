"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.body import read_body
from rootlace.runtime.gateway.http.chat.chats import Chats, check_length
from rootlace.runtime.gateway.http.chat.request import ChatRequest
from rootlace.runtime.gateway.http.openai.conversation import (
    template_arguments,
    template_messages,
    tools_of,
)
from rootlace.runtime.gateway.http.openai.messages import Messages, Tool
from rootlace.runtime.gateway.http.prompts import parse_prompts
from rootlace.runtime.gateway.http.replies import check_model, json_response


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt, or a conversation that the chat template writes."""

    one_of: ClassVar = ("prompt", "messages")
    prompt: str | None = None
    messages: Messages | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[Tool] | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class Tokenized(msgspec.Struct):
    """Tokens, and their texts if they are asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    prompt: str


class Tokenization:
    """The handlers."""

    def __init__(self, gateway: Gateway, chats: Chats) -> None:
        self._gateway = gateway
        self._chats = chats

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request, TokenizeBody)
        check_model(self._gateway, body.model)
        ids = await (self._of_text(body) if body.messages is None else self._of_messages(body))
        strings = None
        if body.return_token_strs:
            text_of = self._gateway.tokenizer.token_text
            strings = await self._gateway.tokenize(len(ids), lambda: [text_of(i) for i in ids])
        longest = self._gateway.model_info.context_length
        return json_response(Tokenized(len(ids), longest, ids, strings))

    async def _of_text(self, body: TokenizeBody) -> list[int]:
        text = body.prompt or ""
        check_length(self._gateway, "prompt", len(text))
        return await self._gateway.tokenize(
            len(text), self._gateway.tokenizer.encode, text, body.add_special_tokens is not False
        )

    async def _of_messages(self, body: TokenizeBody) -> list[int]:
        request = ChatRequest(
            template_messages(body.messages or []),
            {},
            tools=tools_of(body.tools),
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final=bool(body.continue_final_message),
            template=template_arguments(body.chat_template_kwargs),
        )
        return await self._chats.encode(request)

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request, DetokenizeBody)
        check_model(self._gateway, body.model)
        if not body.tokens:
            return json_response(Detokenized(""))
        vocab_size = self._gateway.model_info.vocab_size
        (prompt,) = parse_prompts(body.tokens, "tokens", vocab_size)
        ids = prompt.ids or ()
        check_length(self._gateway, "tokens", len(ids))
        decode = self._gateway.tokenizer.decode
        text = await self._gateway.tokenize(len(ids), decode, ids, skip_special_tokens=False)
        return json_response(Detokenized(text))
