"""Endpoints for operation: models, cache, health, tokens, server information, the page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from typing import Annotated, Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import web

from rootlace.runtime.assets import page_folder
from rootlace.runtime.contracts.messages import (
    GetPins,
    GetTree,
    PinnedPrefix,
    TreeNode,
    TreePage,
    Unpin,
)
from rootlace.runtime.server.auth import Account, caller, namespace_of
from rootlace.runtime.server.cache_lint import Finding, page_with_texts
from rootlace.runtime.server.http import generation
from rootlace.runtime.server.http.body import read_body
from rootlace.runtime.server.http.chat_pipeline import Chats, check_length
from rootlace.runtime.server.http.chat_request import ChatRequest
from rootlace.runtime.server.http.constraints import Rule
from rootlace.runtime.server.http.errors import InvalidParameter, NotFound
from rootlace.runtime.server.http.generation import behind_prompts
from rootlace.runtime.server.http.openai_completions import (
    ChatBody,
    ChatCompletions,
    CompletionBody,
    Completions,
)
from rootlace.runtime.server.http.replies import ReportReply, Status, report_fields
from rootlace.runtime.server.http.request_fields import (
    Messages,
    Prompt,
    Tool,
    parse_prompts,
    template_arguments,
    template_messages,
    tools_of,
)
from rootlace.runtime.server.score import find_vectors
from rootlace.runtime.server.sequence import program_name
from rootlace.runtime.server.served_model import ServedModel, check_name, model_names
from rootlace.runtime.server.telemetry import CONTENT_TYPE
from rootlace.wire.errors import InvalidConstraint, RootlaceError, ServerUnavailable
from rootlace.wire.protocol import Constraint, Explain, Explained, SamplingParams

log = logging.getLogger(__name__)

# Cache --------------------------------------------------------------------------------------------
#
# Contents of the cache, and explanations of a prompt's cached length.


T = TypeVar("T", Finding, TreeNode, PinnedPrefix)

MAX_NODES = 2000
"""Most nodes of one page of the tree: making more would hold the engine up."""
MAX_NUMBERS = 4 * MAX_NODES
"""Most nodes, and most requests, with a remembered number of a key."""


class CacheQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`namespace`: one part of the cache; without it, everything that clients may see. `model`: one
    of several models."""

    namespace: str | msgspec.UnsetType = msgspec.UNSET
    model: str | None = None


class TreeQuery(CacheQuery):
    """At most `limit` nodes below the node `under` (0: the roots)."""

    under: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)] = 200


class _ChatMark(msgspec.Struct):
    """Field that tells a chat completion from a completion; the rest stays undecoded."""

    messages: msgspec.Raw = msgspec.Raw()


class Findings(msgspec.Struct):
    """Findings about prompts."""

    findings: list[Finding]


class Pins(msgspec.Struct):
    """Pinned prefixes."""

    pins: list[PinnedPrefix]


class Released(msgspec.Struct):
    """Released pin."""

    id: str
    deleted: bool = True


class OwnNumbers:
    """Numbers from 1 for ids shown to one key, in the order of their first use.

    The engine counts nodes and requests of all clients together. Its ids would show a key how much
    the others do.
    """

    def __init__(self, limit: int = MAX_NUMBERS) -> None:
        """Beyond `limit` ids, the least recently used ids get new numbers."""
        self._limit = limit
        self._last = 0
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        self._ids: dict[int, Hashable] = {}

    def of(self, key: Hashable) -> int:
        """Return the number of an id."""
        if key not in self._numbers:
            self._last += 1
            self._numbers[key], self._ids[self._last] = self._last, key
            if len(self._numbers) > self._limit:
                del self._ids[self._numbers.popitem(last=False)[1]]
        self._numbers.move_to_end(key)
        return self._numbers[key]

    def id_of(self, number: int) -> Hashable | None:
        """Return the id with that number; None without one."""
        found = self._ids.get(number)
        if found is not None:
            self._numbers.move_to_end(found)
        return found


class KeyView:
    """View of the cache for one key: its own nodes, pins and requests under numbers of its own, and
    its own names of programs."""

    def __init__(self) -> None:
        self._nodes = OwnNumbers()
        self._requests = OwnNumbers()

    def node_of(self, number: int) -> int | None:
        """Return the engine's id of the node that the key knows as `number`; 0 stays 0."""
        node = self._nodes.id_of(number) if number else 0
        assert node is None or isinstance(node, int)
        return node

    def page(self, page: TreePage) -> TreePage:
        """Return the page without the count of all nodes, which would reveal other clients'."""
        return TreePage(tuple(self._node(node) for node in page.nodes), page.complete)

    def pin(self, pin: PinnedPrefix) -> PinnedPrefix:
        return msgspec.structs.replace(pin, node=self._nodes.of(pin.node))

    def _node(self, node: TreeNode) -> TreeNode:
        # Engines of several replicas each count their requests from 0.
        requests = [self._requests.of((node.replica, one)) for one in sorted(node.requests)]
        return msgspec.structs.replace(
            node,
            id=self._nodes.of(node.id),
            parent=self._nodes.of(node.parent) if node.parent else 0,
            requests=tuple(requests),
            programs=tuple(map(program_name, node.programs)),
        )


class Cache:
    """Handlers of `/cache`."""

    def __init__(self, model: ServedModel, completions: Completions, chat: ChatCompletions) -> None:
        self._model = model
        self._completions = completions
        self._chat = chat
        self._views: WeakKeyDictionary[Account, KeyView] = WeakKeyDictionary()

    async def explain(self, request: web.Request) -> ReportReply:
        """Explain how far a prompt is cached now, without computing anything."""
        # The body is read as the endpoint of completions or chat completions would.
        if (await read_body(request, _ChatMark)).messages:
            jobs = await self._chat.jobs(await read_body(request, ChatBody))
        else:
            jobs = self._completions.jobs(await read_body(request, CompletionBody))
        if len(jobs) != 1:
            raise InvalidParameter("prompt", f"one prompt is explained at a time, not {len(jobs)}")
        (job,) = jobs
        (explained,) = await behind_prompts(
            self._model,
            [(job.parts, Explain(0, 0))],
            1,
            namespace=job.namespace,
            adapter=job.adapter,
            free=True,
        )
        assert isinstance(explained, Explained)
        return report_fields(explained.report)

    async def lint(self, query: CacheQuery) -> Findings:
        """Return findings about prompts that could share more, the costliest first."""
        findings = self._model.lint.findings(self._namespace(query))
        return Findings([_as_asked(finding) for finding in findings])

    async def tree(self, query: TreeQuery) -> TreePage:
        """Return a page of the radix tree: nodes used last, each behind its parent."""
        namespace, view = self._namespace(query), self._view()
        under = query.under if view is None else view.node_of(query.under)
        if under is None:  # the reply for a node that was evicted
            return TreePage(())
        page = await self._model.engine.ask(GetTree, namespace, under, query.limit)
        page = page_with_texts(page if view is None else view.page(page), self._model.tokenizer)
        return msgspec.structs.replace(page, nodes=tuple(_as_asked(node) for node in page.nodes))

    async def pins(self, query: CacheQuery) -> Pins:
        """Return the pinned prefixes, those that expire first in front."""
        namespace, view = self._namespace(query), self._view()
        pins = await self._model.engine.ask(GetPins)
        shown_pins = [pin for pin in pins if namespace in (None, pin.namespace)]
        if view is not None:
            shown_pins = [view.pin(pin) for pin in shown_pins]
        return Pins([_as_asked(pin) for pin in shown_pins])

    async def unpin(self, id: str, query: CacheQuery) -> Released:
        """Release a pin; its blocks may be evicted from then on."""
        if not await self._model.engine.ask(Unpin, id, self._namespace(query)):
            raise NotFound(f"there is no pin {id!r}")
        return Released(id)

    def _namespace(self, query: CacheQuery) -> str | None:
        """Return the requested namespace. The default is the empty one, or all (None) where clients
        may look into all."""
        check_name(self._model.model_info, query.model)
        own_only = self._model.report_scope() == "own"
        account = caller()
        if query.namespace is not msgspec.UNSET:
            return namespace_of(account, query.namespace)
        return namespace_of(account, "") if own_only or account is not None else None

    def _view(self) -> KeyView | None:
        """Return the view of the caller's key; None for callers that may see the engine's ids."""
        account = caller()
        return None if account is None else self._views.setdefault(account, KeyView())


def _as_asked(shown: T) -> T:
    """Return a node, finding or pin with its namespace as the client's `cache_salt` names it."""
    account = caller()
    if account is None:
        return shown
    return msgspec.structs.replace(shown, namespace=account.salt(shown.namespace))


# Warming up ---------------------------------------------------------------------------------------
#
# Generating before the first request, so that nothing has to be made at a first use.


WARM_UP_TOKENS = 8
WARM_UP_SCHEMA = '{"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}'


async def warm_up(model: ServedModel, replicas: int = 1) -> None:
    """Generate some free text, then some JSON of a schema, on each of `replicas` engines at once.
    Raises the runtime's typed errors."""
    await generate(model, WARM_UP_TOKENS, copies=replicas)
    if model.model_info.labels is not None:
        return
    try:
        rule = Rule(Constraint("json_schema", WARM_UP_SCHEMA), "warm_up")
        await generate(model, WARM_UP_TOKENS, rule, copies=replicas)
    except InvalidConstraint as error:
        log.warning("answers of this model cannot be constrained: %s", error)


async def generate(
    model: ServedModel, tokens: int, rule: Rule | None = None, copies: int = 1
) -> None:
    """Generate `tokens` tokens, `copies` times at once; a model without tokens computes vectors."""
    prompts = [Prompt(ids=(index,)).parts() for index in range(copies)]
    if model.model_info.labels is not None:
        await find_vectors(model, prompts, "last")
        return
    params = SamplingParams(max_tokens=tokens, ignore_eos=rule is None)
    requests = [generation.GenerateRequest(parts, params, rule) for parts in prompts]
    await generation.run(model, requests)


# Health -------------------------------------------------------------------------------------------
#
# Liveness, readiness and metrics of the server.


READY_SECONDS = 10.0
"""Age of the last token up to which the engine counts as working; also a probe's timeout."""
LOOK_SECONDS = 0.2
"""Time that the answer of `/ready` waits for the engine's counters."""


class Ready(Status, omit_defaults=True):
    """`degraded`: faults while the server serves."""

    degraded: tuple[str, ...] = ()


class Health:
    """Handlers of health, readiness and metrics."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._probe: asyncio.Task[None] | None = None
        self._looks: asyncio.Task[None] | None = None
        self._degraded: tuple[str, ...] = ()

    async def health(self) -> Status:
        """Answer 200 while the engine answers; needs no API key."""
        if not self._model.healthy:
            raise ServerUnavailable("the engine does not answer")
        return Status("ok")

    async def health_generate(self) -> Status:
        """Answer 200 if a token can be generated now."""
        await generate(self._model, 1)
        return Status("ok")

    async def ready(self, request: web.Request) -> Ready:
        """Answer 200 if a token went through the engine lately; needs no API key. Answers 404 if
        `?model=` names another model.

        Without a recent token a probe generates one, a single one however many callers ask.
        """
        check_name(self._model.model_info, request.query.get("model"))
        if time.monotonic() - self._model.last_token > READY_SECONDS:
            if self._probe is None or self._probe.done():
                self._probe = asyncio.create_task(generate(self._model, 1))
            try:
                await asyncio.wait_for(asyncio.shield(self._probe), READY_SECONDS)
            except TimeoutError:
                raise ServerUnavailable(
                    f"no token went through the engine in {READY_SECONDS:g} seconds"
                ) from None
            except RootlaceError as error:
                raise ServerUnavailable(f"no token can be made: {error}") from None
        if self._looks is None or self._looks.done():
            self._looks = asyncio.create_task(self._look())
        # A long step must not make the server look unready: the last counters are used then.
        await asyncio.wait((self._looks,), timeout=LOOK_SECONDS)
        return Ready("ready", self._degraded)

    async def _look(self) -> None:
        with suppress(RootlaceError):
            status = await self._model.status()
            faults = {
                "the disk of --cache-disk is full: blocks there are read, and none are written": (
                    status.get("disk_full")
                ),
                "the disk of --cache-disk failed, and is not used any more": (
                    status.get("disk_failed")
                ),
            }
            self._degraded = tuple(text for text, holds in faults.items() if holds)

    async def metrics(self) -> web.Response:
        """Return the metrics for Prometheus."""
        try:
            status = await self._model.status()
        except RootlaceError:
            status = None
        body = self._model.metrics.text(status)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


# Tokenization -------------------------------------------------------------------------------------
#
# `POST /tokenize` and `POST /detokenize`, in vLLM's shapes.


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Prompt, or conversation for the chat template."""

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
    """Tokens, and their texts if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    prompt: str


class Tokenization:
    """Handlers of tokenization."""

    def __init__(self, model: ServedModel, chats: Chats) -> None:
        self._model = model
        self._chats = chats

    async def tokenize(self, body: TokenizeBody) -> Tokenized:
        check_name(self._model.model_info, body.model)
        if body.messages is None:
            text = body.prompt or ""
            check_length(self._model, "prompt", len(text))
            begins, encode = body.add_special_tokens is not False, self._model.tokenizer.encode
            ids = await self._model.tokenize(len(text), encode, text, begins)
        else:
            request = ChatRequest(
                template_messages(body.messages),
                {},
                tools=tools_of(body.tools),
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final=bool(body.continue_final_message),
                template=template_arguments(body.chat_template_kwargs or {}),
            )
            ids = await self._chats.encode(request)
        strings = None
        if body.return_token_strs:
            text_of = self._model.tokenizer.token_text
            strings = await self._model.tokenize(len(ids), lambda: [text_of(i) for i in ids])
        longest = self._model.model_info.context_length
        return Tokenized(len(ids), longest, ids, strings)

    async def detokenize(self, body: DetokenizeBody) -> Detokenized:
        check_name(self._model.model_info, body.model)
        if not body.tokens:
            return Detokenized("")
        vocab_size = self._model.model_info.vocab_size
        (prompt,) = parse_prompts(body.tokens, "tokens", vocab_size)
        ids = prompt.ids or ()
        check_length(self._model, "tokens", len(ids))
        decode = self._model.tokenizer.decode
        text = await self._model.tokenize(len(ids), decode, ids, skip_special_tokens=False)
        return Detokenized(text)


# Info ---------------------------------------------------------------------------------------------


class ModelCard(msgspec.Struct, kw_only=True):
    """Model in the form of OpenAI's and Anthropic's APIs; an adapter's `parent` is its model.
    `default_sampling`: sampling of requests without parameters; `default_sampling_from`: where each
    value comes from. Both are null for a model that is not loaded."""

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
    """List of all served models; the fields behind `data` are Anthropic's."""

    object: str = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str
    last_id: str


class Version(msgspec.Struct):
    """Version of the server."""

    version: str


class ModelEntry(msgspec.Struct):
    """Served model; programs connect to `program_address`. `default_sampling` and
    `default_sampling_from` are as in `/v1/models`."""

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
    """Served model, and counters as `status`: for a key of the file, its own alone."""

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
    """Handlers of models and server information."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._started = int(time.time())

    async def models(self) -> ModelList:
        return model_list(self.cards())

    async def model(self, name: str) -> ModelCard:
        return self._card(check_name(self._model.model_info, name))

    async def model_info(self) -> ModelEntry:
        info = self._model.model_info
        return ModelEntry(
            model_path=self._model.shown_path(caller()),
            tokenizer_path=self._model.shown_path(caller()),
            is_generation=info.labels is None,
            served_model_name=info.name,
            context_length=info.context_length,
            vocab_size=info.vocab_size,
            block_size=info.block_size,
            capacity_tokens=info.capacity_tokens,
            program_address=self._model.server_state.program_address,
            default_sampling=info.sampling,
            default_sampling_from=info.sampling_from,
        )

    async def version(self) -> Version:
        return Version(metadata.version("rootlace"))

    async def tokenizer_info(self) -> dict[str, Any]:
        """Return the tokenizer's configuration and the chat template, as lm-eval asks for them."""
        model = self._model
        template = {} if model.chat.source is None else {"chat_template": model.chat.source}
        return {**model.tokenizer.config, **template}

    async def server_info(self) -> ServerInfo:
        info = self._model.model_info
        status = await self._model.status(caller())
        blocks = self._model.engine.info.num_blocks
        return ServerInfo(
            version=metadata.version("rootlace"),
            model_path=self._model.shown_path(caller()),
            served_model_name=info.name,
            context_length=info.context_length,
            max_total_num_tokens=status.get("blocks_total", blocks) * info.block_size,
            page_size=info.block_size,
            disable_radix_cache=not self._model.model_info.caching,
            program_address=self._model.server_state.program_address,
            healthy=self._model.healthy,
            status=status,
        )

    async def flush_cache(self) -> web.Response:
        """Evict every cached prefix that no running request uses."""
        await self._model.flush()
        return web.Response(text="Cache flushed.\n")

    async def pause(self) -> Status:
        """Pause the engine. Any `mode` of sglang's clients means the same."""
        self._model.engine.pause(True)
        return Status("paused")

    async def go_on(self) -> Status:
        self._model.engine.pause(False)
        return Status("ok")

    def cards(self) -> list[ModelCard]:
        """Return a card of the model, and one of each adapter."""
        return [self._card(name) for name in model_names(self._model.model_info)]

    def _card(self, name: str) -> ModelCard:
        info = self._model.model_info
        return ModelCard(
            id=name,
            display_name=name,
            created=self._started,
            created_at=datetime.fromtimestamp(self._started, UTC).isoformat(),
            root=self._model.shown_path(caller()),
            parent=None if name == info.name else info.name,
            max_model_len=info.context_length,
            default_sampling=info.sampling,
            default_sampling_from=info.sampling_from,
        )


def model_list(cards: list[ModelCard]) -> ModelList:
    return ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id)


# Page ---------------------------------------------------------------------------------------------
#
# The page at `/`: playground, cache and load. Its files come with the package.
#
# The files reveal nothing of the model, so they need no API key; the page asks for the key.


# Nothing is loaded from elsewhere, nothing is sent elsewhere, and no other page may frame this one.
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_PAGE_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


class Page:
    """Handlers of the page."""

    def __init__(self) -> None:
        self._files = {path.name: path for path in page_folder().iterdir()}

    async def index(self) -> web.FileResponse:
        return await self.file("index.html")

    async def file(self, name: str) -> web.FileResponse:
        path = self._files.get(name)
        if path is None:
            raise NotFound(f"the page has no file {name!r}")
        kind = f"{_PAGE_TYPES[path.suffix]}; charset=utf-8"
        return web.FileResponse(path, headers={**_PAGE_HEADERS, "Content-Type": kind})
