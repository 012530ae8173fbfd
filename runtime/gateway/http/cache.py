"""What the cache holds, and why a prompt would be cached as far as it would be."""

from __future__ import annotations

from typing import Annotated, TypeVar

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
from rootlace.runtime.gateway.http.query import read_query
from rootlace.runtime.gateway.http.replies import check_model, json_response, report_fields
from rootlace.runtime.gateway.keys.account import caller, namespace_of
from rootlace.runtime.gateway.lint.finding import Finding
from rootlace.wire.protocol import Explain, Explained

T = TypeVar("T", Finding, TreeNode, PinnedPrefix)

MAX_NODES = 2000
"""Of one page of the tree: making more would hold the engine up."""


class CacheQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`namespace`: which part of the cache; without it all that the server lets its clients see.
    `model`: of which model, where there are several."""

    namespace: str | msgspec.UnsetType = msgspec.UNSET
    model: str | None = None


class TreeQuery(CacheQuery):
    """At most `limit` nodes, of those below the node `under` (0: the roots)."""

    under: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)] = 200


class _Given(msgspec.Struct):
    """What tells a chat completion from a completion; nothing else is made of it."""

    messages: msgspec.Raw = msgspec.Raw()


class Findings(msgspec.Struct):
    """What the lint of prompts noticed."""

    findings: list[Finding]


class Pins(msgspec.Struct):
    """What is pinned."""

    pins: list[PinnedPrefix]


class Released(msgspec.Struct):
    """A pin that is no more."""

    id: str
    deleted: bool = True


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
        if (await read_body(request, _Given)).messages:
            return await self._chat.jobs(await read_body(request, CHAT_BODY))
        jobs = self._completions.jobs(await read_body(request, COMPLETION_BODY))
        if len(jobs) != 1:
            raise InvalidParameter("prompt", f"one prompt is explained at a time, not {len(jobs)}")
        return jobs

    async def lint(self, request: web.Request) -> web.Response:
        """What was noticed about prompts that could share more, what cost most first."""
        namespace = self._namespace(read_query(request, CacheQuery))
        found = self._gateway.lint.findings(namespace)
        return json_response(Findings([_as_asked(finding) for finding in found]))

    async def tree(self, request: web.Request) -> web.Response:
        """A page of the radix tree: the nodes used last, each behind its parent."""
        query = read_query(request, TreeQuery)
        namespace = self._namespace(query)
        page = await self._gateway.engine.ask(GetTree, namespace, query.under, query.limit)
        page = page_with_texts(page, self._gateway.tokenizer)
        return json_response(
            msgspec.structs.replace(page, nodes=tuple(_as_asked(node) for node in page.nodes))
        )

    async def pins(self, request: web.Request) -> web.Response:
        """What is pinned, those that end first."""
        namespace = self._namespace(read_query(request, CacheQuery))
        pins = await self._gateway.engine.ask(GetPins)
        shown = [_as_asked(pin) for pin in pins if namespace in (None, pin.namespace)]
        return json_response(Pins(shown))

    async def unpin(self, request: web.Request) -> web.Response:
        """Let a pin go; its blocks may be evicted from then on."""
        namespace = self._namespace(read_query(request, CacheQuery))
        pin = request.match_info["id"]
        if not await self._gateway.engine.ask(Unpin, pin, namespace):
            raise RecordNotFound("pin", pin)
        return json_response(Released(pin))

    def _namespace(self, query: CacheQuery) -> str | None:
        """The one that is asked for: by default the empty one, or all (None) where clients may look
        into all."""
        check_model(self._gateway, query.model)
        own = self._gateway.report_scope() == "own"
        account = caller()
        if query.namespace is not msgspec.UNSET:
            return namespace_of(account, query.namespace)
        return namespace_of(account, "") if own or account is not None else None


def _as_asked(shown: T) -> T:
    """A node, finding or pin with its namespace as the client's `cache_salt` names it."""
    account = caller()
    if account is None:
        return shown
    return msgspec.structs.replace(shown, namespace=account.salt(shown.namespace))
