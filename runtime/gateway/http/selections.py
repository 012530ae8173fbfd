"""`POST /select`: choices scored behind a prompt, as a program's `select` scores them."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.behind_prompts import behind_prompts
from rootlace.runtime.gateway.http.body import SOME, read_body
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.handling import HandlingBody, handling_without_pin
from rootlace.runtime.gateway.http.prompts import check_texts, parse_prompts
from rootlace.runtime.gateway.http.replies import adapter_of, check_model, json_response
from rootlace.wire.protocol import ChoicesMethod, Select, Selected


class SelectBody(HandlingBody, kw_only=True):
    """`POST /select`. With a temperature, the choice is drawn."""

    one_of: ClassVar = ("text", "input_ids")
    text: str | None = None
    input_ids: list[int] | None = None
    choices: Annotated[list[str], SOME]
    method: ChoicesMethod | None = None
    temperature: float | None = None
    model: str | None = None
    adapter: str | None = None
    cache_salt: str | None = None


class PromptUsage(msgspec.Struct):
    """The tokens of the prompt, and those of them that were found in the cache."""

    prompt_tokens: int
    cached_tokens: int


class Selection(msgspec.Struct):
    """The likeliest choice, its index, and the scores of all."""

    choice: str
    index: int
    scores: list[float]
    meta_info: PromptUsage


class Selections:
    """The endpoint's handler."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def handle(self, request: web.Request) -> web.Response:
        body = await read_body(request, SelectBody)
        model = check_model(self._gateway, body.model)
        check_texts(body.choices, "choices")
        size = self._gateway.model_info.vocab_size
        if body.text is not None:
            (prompt,) = parse_prompts([body.text], "text", size)
            if not body.text and not self._gateway.tokenizer.encode(""):
                raise InvalidParameter("text", "text is empty: no choice follows nothing")
        else:
            (prompt,) = parse_prompts(body.input_ids or [], "input_ids", size)

        def select(op: int, branch: int) -> Select:
            return Select(
                op,
                branch,
                tuple(body.choices),
                method=body.method or "token_length_normalized",
                temperature=body.temperature or 0.0,
            )

        (found,) = await behind_prompts(
            self._gateway,
            [(prompt.parts(), select)],
            1,
            namespace=body.cache_salt or "",
            adapter=adapter_of(self._gateway, model, body.adapter),
            handling=handling_without_pin(body),
            param=lambda index: "input_ids" if body.text is None else "text",
        )
        assert isinstance(found, Selected)
        used = PromptUsage(found.usage.prompt_tokens, found.usage.cached_tokens)
        return json_response(Selection(found.choice, found.index, list(found.scores), used))
