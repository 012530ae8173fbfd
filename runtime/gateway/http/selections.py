"""Choices scored behind prompts, as a program's `select` scores them; and `POST /select`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.body import Body, read_body
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.prompts import parse_prompts
from rootlace.runtime.gateway.http.replies import adapter_of, check_model, json_response
from rootlace.runtime.gateway.keys.account import admitted
from rootlace.wire.errors import from_code
from rootlace.wire.protocol import (
    Append,
    ChoicesMethod,
    Close,
    Event,
    Failed,
    Open,
    Part,
    Select,
    Selected,
)

_OPS = 4


class SelectBody(Body, kw_only=True):
    """`POST /select`. With a temperature, the choice is drawn."""

    text: str | None = None
    input_ids: list[int] | None = None
    choices: list[str]
    method: ChoicesMethod | None = None
    temperature: float | None = None
    model: str | None = None
    adapter: str | None = None
    cache_salt: str | None = None


class Selections:
    """The endpoint's handler."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def handle(self, request: web.Request) -> web.Response:
        body = await read_body(request, SelectBody)
        model = check_model(self._gateway, body.model)
        if (body.text is None) == (body.input_ids is None):
            raise InvalidParameter("text", "give either text or input_ids")
        if not body.choices:
            raise InvalidParameter("choices", "choices must not be empty")
        size = self._gateway.model_info.vocab_size
        if body.text is not None:
            (prompt,) = parse_prompts([body.text], "text", size)
        else:
            (prompt,) = parse_prompts(body.input_ids or [], "input_ids", size)
        (found,) = await select(
            self._gateway,
            [prompt.parts()],
            body.choices,
            body.cache_salt or "",
            adapter_of(self._gateway, model, body.adapter),
            body.method or "token_length_normalized",
            body.temperature or 0.0,
        )
        return json_response(
            {
                "choice": found.choice,
                "index": found.index,
                "scores": found.scores,
                "meta_info": {
                    "prompt_tokens": found.usage.prompt_tokens,
                    "cached_tokens": found.usage.cached_tokens,
                },
            }
        )


async def select(
    gateway: Gateway,
    prompts: Sequence[tuple[Part, ...]],
    choices: Sequence[str],
    namespace: str = "",
    adapter: str = "",
    method: ChoicesMethod = "token_length_normalized",
    temperature: float = 0.0,
) -> list[Selected]:
    """One `Select` for each prompt, all together. Raises the first error."""
    events: asyncio.Queue[list[Event]] = asyncio.Queue()
    session = gateway.open_session(events.put_nowait, client="http", account=admitted())
    found: dict[int, Selected] = {}
    try:
        for index, parts in enumerate(prompts):
            op, branch = index * _OPS + 1, index + 1
            session.handle(
                [
                    Open(op, branch, namespace=namespace, adapter=adapter),
                    Append(op + 1, branch, parts),
                    Select(op + 2, branch, tuple(choices), method=method, temperature=temperature),
                    Close(op + 3, branch),
                ]
            )
        while len(found) < len(prompts):
            for event in await events.get():
                if isinstance(event, Failed):
                    raise from_code(event.code, event.message)
                if isinstance(event, Selected):
                    found[(event.op - 1) // _OPS] = event
    finally:
        session.close()
    return [found[index] for index in range(len(prompts))]
