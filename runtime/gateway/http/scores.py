"""`POST /v1/score` and `POST /v1/rerank`: how likely labels are behind texts."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http import one_shot
from rootlace.runtime.gateway.http.body import Body, read_body
from rootlace.runtime.gateway.http.chat.chats import Chats
from rootlace.runtime.gateway.http.chat.request import ChatRequest
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.fields import ignored, refused
from rootlace.runtime.gateway.http.prompts import MAX_PROMPTS, Prompt, parse_prompts
from rootlace.runtime.gateway.http.replies import check_model, envelope, json_response
from rootlace.runtime.gateway.keys.account import admitted
from rootlace.wire.errors import from_code
from rootlace.wire.protocol import (
    Append,
    Close,
    Event,
    Failed,
    Open,
    Part,
    SamplingParams,
    Select,
    Selected,
    Tokens,
)

INSTRUCTION = "Given a query, find passages that answer it."
# The question that rerankers made of language models are trained on.
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_ANSWERS = ("yes", "no")
_OPS = 4


class _Ranked(Body, kw_only=True):
    """What scores and ranks share. `instruction` says what makes a text relevant."""

    model: str | None = None
    instruction: str | None = None
    cache_salt: str | None = None
    user: Annotated[str | None, ignored("it is about the account of clients")] = None
    priority: Annotated[int | None, ignored("requests have no priorities")] = None
    truncate_prompt_tokens: Annotated[
        int | None, refused("a text that is too long is an error; shorten it before you send it")
    ] = None


class ScoreBody(_Ranked, kw_only=True):
    """`POST /v1/score`: pairs of texts (vLLM's `text_1`, `text_2`: how well the second answers the
    first), or a `query` with `items`, and the labels to be scored behind each of them: sglang's
    `label_token_ids`, or texts as `labels`."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    query: str | list[int] | None = None
    items: str | list[str | list[int]] | None = None
    label_token_ids: list[int] | None = None
    labels: list[str] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


class Document(Body):
    text: str


class RerankBody(_Ranked, kw_only=True):
    """`POST /v1/rerank`, in the shapes of Jina and Cohere."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    max_chunks_per_doc: Annotated[int | None, ignored("documents are read as a whole")] = None


@dataclass(frozen=True)
class _Scored:
    """Log-probabilities of the labels behind one text, and the tokens that it took."""

    logprobs: tuple[float, ...]
    tokens: int


class Scores:
    """The handlers."""

    def __init__(self, gateway: Gateway, chats: Chats) -> None:
        self._gateway = gateway
        self._chats = chats

    async def score(self, request: web.Request) -> web.Response:
        body = await read_body(request, ScoreBody)
        model = check_model(self._gateway, body.model)
        if body.text_1 is not None or body.text_2 is not None:
            return json_response(await self._pairs(body, model))
        labels = self._labels(body)
        namespace = body.cache_salt or ""
        if body.label_token_ids is None:
            prompts = self._prompts(body)
            scored = await self._select([p.parts() for p in prompts], labels, namespace)
        else:
            ids = [self._ids(prompt) for prompt in self._prompts(body)]
            scored = await self._append(ids, body.label_token_ids, namespace)
        softmax = bool(body.apply_softmax)
        scores = [_probabilities(one.logprobs, softmax) for one in scored]
        usage = _usage(scored)
        return json_response({"object": "scoring", "model": model, "scores": scores, **usage})

    async def rerank(self, request: web.Request) -> web.Response:
        body = await read_body(request, RerankBody)
        model = check_model(self._gateway, body.model)
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        if not texts:
            raise InvalidParameter("documents", "documents must not be empty")
        if body.top_n is not None and body.top_n < 1:
            raise InvalidParameter("top_n", f"top_n must be at least 1, not {body.top_n}")
        scored = await self._relevance(body, [(body.query, text) for text in texts])
        scores = [_probabilities(one.logprobs, True)[0] for one in scored]
        order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n]
        results: list[dict[str, Any]] = []
        for index in order:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                result["document"] = {"text": texts[index]}
            results.append(result)
        head = {"id": f"rerank-{uuid.uuid4().hex}", "model": model}
        return json_response({**head, "results": results, **_usage(scored)})

    async def _pairs(self, body: ScoreBody, model: str) -> dict[str, Any]:
        first, second = _listed(body.text_1, "text_1"), _listed(body.text_2, "text_2")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidParameter(
                "text_2", f"text_2 has {len(second)} texts for the {len(first)} of text_1"
            )
        scored = await self._relevance(body, list(zip(first, second, strict=True)))
        data = [
            {"index": i, "object": "score", "score": _probabilities(one.logprobs, True)[0]}
            for i, one in enumerate(scored)
        ]
        return {**envelope("score", "list", model), "data": data, **_usage(scored)}

    async def _relevance(self, body: _Ranked, pairs: Sequence[tuple[str, str]]) -> list[_Scored]:
        """How likely "yes" and "no" are as answers whether each text answers its query."""
        _check_count(len(pairs))
        instruction = body.instruction or INSTRUCTION
        parts = []
        for query, text in pairs:
            asked = f"<Instruct>: {instruction}\n\n<Query>: {query}\n\n<Document>: {text}"
            messages = [
                {"role": "system", "content": _JUDGE},
                {"role": "user", "content": asked},
            ]
            request = ChatRequest(messages, {}, template={"enable_thinking": False})
            parts.append(self._chats.render(request, ()))
        return await self._select(parts, _ANSWERS, body.cache_salt or "")

    def _labels(self, body: ScoreBody) -> Sequence[str]:
        if (body.labels is None) == (body.label_token_ids is None):
            raise InvalidParameter("labels", "give either labels or label_token_ids")
        if not (body.labels or body.label_token_ids):
            raise InvalidParameter("labels", "there must be at least one label")
        size = self._gateway.model_info.vocab_size
        for token in body.label_token_ids or ():
            if not 0 <= token < size:
                raise InvalidParameter(
                    "label_token_ids", f"label_token_ids: {token} is not a token id"
                )
        return body.labels or ()

    def _prompts(self, body: ScoreBody) -> list[Prompt]:
        """The query with each of the items."""
        if body.query is None or body.items is None:
            raise InvalidParameter("query", "give query and items, or text_1 and text_2")
        size = self._gateway.model_info.vocab_size
        (query,) = parse_prompts(body.query, "query", size)
        items = parse_prompts(body.items, "items", size)
        _check_count(len(items))
        prompts = []
        for item in items:
            pair = (item, query) if body.item_first else (query, item)
            if (query.text is None) != (item.text is None):
                raise InvalidParameter("items", "query and items must both be texts or token ids")
            if query.text is None:
                prompts.append(Prompt(ids=(*(pair[0].ids or ()), *(pair[1].ids or ()))))
            else:
                prompts.append(Prompt(text=f"{pair[0].text}{pair[1].text}"))
        return prompts

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.ids is not None:
            return prompt.ids
        return tuple(self._gateway.tokenizer.encode(prompt.text or ""))

    async def _append(
        self, prompts: Sequence[tuple[int, ...]], labels: Sequence[int], namespace: str
    ) -> list[_Scored]:
        """Labels that are tokens: each is appended, and its log-probability read."""
        _check_count(len(prompts) * len(labels))
        jobs = [
            one_shot.Job(
                (Tokens((*ids, label)),),
                SamplingParams(max_tokens=0, logprobs=True, prompt_logprobs_from=len(ids)),
                namespace=namespace,
            )
            for ids in prompts
            for label in labels
        ]
        results = await one_shot.run(self._gateway, jobs)
        found = []
        for index, ids in enumerate(prompts):
            mine = results[index * len(labels) : (index + 1) * len(labels)]
            logprobs = tuple(one.prompt_logprobs[-1].logprob or 0.0 for one in mine)
            found.append(_Scored(logprobs, len(ids)))
        return found

    async def _select(
        self, prompts: Sequence[tuple[Part, ...]], labels: Sequence[str], namespace: str
    ) -> list[_Scored]:
        """Labels that are texts, scored by one `Select` for each prompt."""
        events: asyncio.Queue[list[Event]] = asyncio.Queue()
        session = self._gateway.open_session(events.put_nowait, client="http", account=admitted())
        found: dict[int, _Scored] = {}
        try:
            for index, parts in enumerate(prompts):
                op, branch = index * _OPS + 1, index + 1
                session.handle(
                    [
                        Open(op, branch, namespace=namespace),
                        Append(op + 1, branch, parts),
                        Select(op + 2, branch, tuple(labels)),
                        Close(op + 3, branch),
                    ]
                )
            while len(found) < len(prompts):
                for event in await events.get():
                    if isinstance(event, Failed):
                        raise from_code(event.code, event.message)
                    if isinstance(event, Selected):
                        index = (event.op - 1) // _OPS
                        found[index] = _Scored(event.scores, event.usage.prompt_tokens)
        finally:
            session.close()
        return [found[index] for index in range(len(prompts))]


def _probabilities(logprobs: Sequence[float], softmax: bool) -> list[float]:
    """Of the labels, all others left out with `softmax`."""
    if not softmax:
        return [math.exp(one) for one in logprobs]
    most = max(logprobs)
    weights = [math.exp(one - most) for one in logprobs]
    return [weight / sum(weights) for weight in weights]


def _usage(scored: Sequence[_Scored]) -> dict[str, Any]:
    total = sum(one.tokens for one in scored)
    return {"usage": {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}}


def _listed(given: str | list[str] | None, param: str) -> list[str]:
    if not given:
        raise InvalidParameter(param, f"{param} is missing or empty")
    return [given] if isinstance(given, str) else given


def _check_count(count: int) -> None:
    if count > MAX_PROMPTS:
        raise InvalidParameter("items", f"at most {MAX_PROMPTS} texts can be scored, not {count}")
