"""What the cache holds, and why a prompt would be cached as far as it would be."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rootlace.runtime.contracts.tree_page import TreeNode
from rootlace.runtime.gateway.branches.cache_texts import page_with_texts
from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.body import Body, read_body
from rootlace.runtime.gateway.http.chat.chats import Chats
from rootlace.runtime.gateway.http.chat.request import ChatRequest
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.openai.conversation import (
    template_arguments,
    template_messages,
    tools_of,
)
from rootlace.runtime.gateway.http.openai.messages import Message, Tool
from rootlace.runtime.gateway.http.prompts import parse_prompts
from rootlace.runtime.gateway.http.replies import (
    adapter_of,
    check_model,
    json_response,
    report_fields,
)
from rootlace.runtime.gateway.keys.account import caller
from rootlace.runtime.gateway.lint.finding import Finding
from rootlace.wire.cache_report import CacheReport
from rootlace.wire.errors import from_code
from rootlace.wire.protocol import Append, Close, Event, Explain, Explained, Failed, Open, Part

T = TypeVar("T", Finding, TreeNode)

MAX_NODES = 2000
"""Of one page of the tree: making more would hold the engine up."""


class ExplainBody(Body):
    """`POST /cache/explain`: a prompt (text or token ids), or a conversation that the chat template
    writes, as it would be sent to be answered."""

    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    model: str | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


class Cache:
    """The handlers."""

    def __init__(self, gateway: Gateway, chats: Chats) -> None:
        self._gateway = gateway
        self._chats = chats

    async def explain(self, request: web.Request) -> web.Response:
        """How far a prompt is cached now, and why no further; nothing is computed."""
        body = await read_body(request, ExplainBody)
        adapter = adapter_of(self._gateway, check_model(self._gateway, body.model))
        if (body.prompt is None) == (body.messages is None):
            raise InvalidParameter("prompt", "give either prompt or messages")
        report = await self._explained(self._parts(body), body.cache_salt or "", adapter)
        return json_response(report_fields(report))

    async def lint(self, request: web.Request) -> web.Response:
        """What was noticed about prompts that could share more, what cost most first."""
        (namespace,) = self._query(request, "namespace")
        found = self._gateway.lint.findings(namespace)
        return json_response({"findings": [_as_asked(finding) for finding in found]})

    async def tree(self, request: web.Request) -> web.Response:
        """A page of the radix tree: the nodes used last, each behind its parent."""
        namespace, under, limit = self._query(request, "namespace", "under", "limit")
        page = await self._gateway.engine.tree(
            namespace,
            _number(under or "0", "under", 2**53),
            _number(limit or "200", "limit", MAX_NODES),
        )
        page = page_with_texts(page, self._gateway.tokenizer)
        return json_response(
            msgspec.structs.replace(page, nodes=tuple(_as_asked(node) for node in page.nodes))
        )

    def _query(self, request: web.Request, *names: str) -> tuple[str | None, ...]:
        """The named parameters, `namespace` among them: its default is the empty one, or all where
        clients may look into all."""
        for name in request.query.keys() - {*names}:
            raise InvalidParameter(name, f"{name}: there is {' and '.join(names)}")
        default = "" if self._gateway.report_scope() == "own" else None
        asked: dict[str, str | None] = {"namespace": default, **request.query}
        account = caller()
        if account is not None:
            asked["namespace"] = account.namespace(asked["namespace"] or "")
        return tuple(asked.get(name) for name in names)

    def _parts(self, body: ExplainBody) -> tuple[Part, ...]:
        if body.prompt is not None:
            (prompt,) = parse_prompts(body.prompt, "prompt", self._gateway.model_info.vocab_size)
            return prompt.parts()
        request = ChatRequest(
            template_messages(body.messages or []),
            {},
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final=bool(body.continue_final_message),
            template=template_arguments(body.chat_template_kwargs),
        )
        return self._chats.render(request, tools_of(body.tools))

    async def _explained(
        self, parts: tuple[Part, ...], namespace: str, adapter: str
    ) -> CacheReport:
        events: asyncio.Queue[list[Event]] = asyncio.Queue()
        session = self._gateway.open_session(events.put_nowait, client="http", account=caller())
        try:
            session.handle(
                [
                    Open(1, 1, namespace=namespace, adapter=adapter),
                    Append(2, 1, parts),
                    Explain(3, 1),
                    Close(4, 1),
                ]
            )
            while True:
                for event in await events.get():
                    if isinstance(event, Failed):
                        raise from_code(event.code, event.message)
                    if isinstance(event, Explained):
                        return event.report
        finally:
            session.close()


def _as_asked(shown: T) -> T:
    """A node or finding with its namespace as the client's `cache_salt` names it."""
    account = caller()
    if account is None:
        return shown
    return msgspec.structs.replace(shown, namespace=account.salt(shown.namespace))


def _number(text: str, name: str, most: int) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 20 or int(text) > most:
        raise InvalidParameter(name, f"{name} must be a number up to {most}, not {text[:30]!r}")
    return int(text)
