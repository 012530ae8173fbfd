"""What the cache holds, and why a prompt would be cached as far as it would be."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from rootlace.runtime.contracts.messages import GetPins, GetTree, Unpin
from rootlace.runtime.contracts.tree_page import PinnedPrefix, TreeNode
from rootlace.runtime.gateway.branches.cache_texts import page_with_texts
from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http import one_shot
from rootlace.runtime.gateway.http.behind_prompts import behind_prompts
from rootlace.runtime.gateway.http.body import read_body
from rootlace.runtime.gateway.http.errors import InvalidParameter, RecordNotFound
from rootlace.runtime.gateway.http.openai.chat import CHAT_BODY, ChatCompletions
from rootlace.runtime.gateway.http.openai.completions import COMPLETION_BODY, Completions
from rootlace.runtime.gateway.http.replies import json_response, report_fields
from rootlace.runtime.gateway.keys.account import caller
from rootlace.runtime.gateway.lint.finding import Finding
from rootlace.wire.protocol import Explain, Explained

T = TypeVar("T", Finding, TreeNode, PinnedPrefix)

MAX_NODES = 2000
"""Of one page of the tree: making more would hold the engine up."""


class Cache:
    """The handlers."""

    def __init__(self, gateway: Gateway, completions: Completions, chat: ChatCompletions) -> None:
        self._gateway = gateway
        self._completions = completions
        self._chat = chat

    async def explain(self, request: web.Request) -> web.Response:
        """How far a prompt is cached now, and why no further; nothing is computed."""
        (job,) = await self._jobs(request)
        (found,) = await behind_prompts(
            self._gateway,
            [(job.parts, Explain)],
            1,
            namespace=job.namespace,
            adapter=job.adapter,
            free=True,
        )
        assert isinstance(found, Explained)
        return json_response(report_fields(found.report))

    async def _jobs(self, request: web.Request) -> list[one_shot.Job]:
        """What the body of a completion or chat completion asks for, read as it would be there."""
        try:
            given = msgspec.json.decode(await request.read())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            given = None  # read again below, where it is told what is wrong
        if isinstance(given, dict) and "messages" in given:
            return self._chat.jobs(await read_body(request, CHAT_BODY))
        jobs = self._completions.jobs(await read_body(request, COMPLETION_BODY))
        if len(jobs) != 1:
            raise InvalidParameter("prompt", f"one prompt is explained at a time, not {len(jobs)}")
        return jobs

    async def lint(self, request: web.Request) -> web.Response:
        """What was noticed about prompts that could share more, what cost most first."""
        (namespace,) = self._query(request, "namespace")
        found = self._gateway.lint.findings(namespace)
        return json_response({"findings": [_as_asked(finding) for finding in found]})

    async def tree(self, request: web.Request) -> web.Response:
        """A page of the radix tree: the nodes used last, each behind its parent."""
        namespace, under, limit = self._query(request, "namespace", "under", "limit")
        page = await self._gateway.engine.ask(
            GetTree,
            namespace,
            _number(under or "0", "under", 2**53),
            _number(limit or "200", "limit", MAX_NODES),
        )
        page = page_with_texts(page, self._gateway.tokenizer)
        return json_response(
            msgspec.structs.replace(page, nodes=tuple(_as_asked(node) for node in page.nodes))
        )

    async def pins(self, request: web.Request) -> web.Response:
        """What is pinned, those that end first."""
        (namespace,) = self._query(request, "namespace")
        pins = await self._gateway.engine.ask(GetPins)
        shown = [_as_asked(pin) for pin in pins if namespace in (None, pin.namespace)]
        return json_response({"pins": shown})

    async def unpin(self, request: web.Request) -> web.Response:
        """Let a pin go; its blocks may be evicted from then on."""
        (namespace,) = self._query(request, "namespace")
        pin = request.match_info["id"]
        if not await self._gateway.engine.ask(Unpin, pin, namespace):
            raise RecordNotFound("pin", pin)
        return json_response({"id": pin, "deleted": True})

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


def _as_asked(shown: T) -> T:
    """A node, finding or pin with its namespace as the client's `cache_salt` names it."""
    account = caller()
    if account is None:
        return shown
    return msgspec.structs.replace(shown, namespace=account.salt(shown.namespace))


def _number(text: str, name: str, most: int) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 20 or int(text) > most:
        raise InvalidParameter(name, f"{name} must be a number up to {most}, not {text[:30]!r}")
    return int(text)
