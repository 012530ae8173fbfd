"""`POST /select`, `/v1/embeddings`, `/v1/score` and `/v1/rerank`: scores of choices and labels
behind texts, vectors of texts, and relevance of texts."""

from __future__ import annotations

import base64
import math
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from rootlace.runtime.contracts.messages import Pooling
from rootlace.runtime.server.http.body import SOME, Body, ignored, refused
from rootlace.runtime.server.http.chat_pipeline import Chats, check_length
from rootlace.runtime.server.http.chat_request import ChatRequest
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.http.generation import behind_prompts, vectors
from rootlace.runtime.server.http.replies import PromptTokens, envelope
from rootlace.runtime.server.http.request_fields import (
    MAX_PROMPTS,
    HandlingBody,
    Prompt,
    check_texts,
    parse_prompts,
    placed_unpinned,
)
from rootlace.runtime.server.score import Vector
from rootlace.runtime.server.served_model import ServedModel, check_name
from rootlace.wire.protocol import (
    ChoicesMethod,
    Generate,
    Generated,
    Part,
    SamplingParams,
    Select,
    Selected,
    Text,
    Tokens,
)

# Selections ---------------------------------------------------------------------------------------
#
# `POST /select`: choices scored behind a prompt, as a program's `select` scores them.


class SelectBody(HandlingBody, kw_only=True):
    """Body of `POST /select`. With a temperature, the choice is drawn."""

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
    """Tokens of the prompt, and the cached ones among them."""

    prompt_tokens: int
    cached_tokens: int


class Selection(msgspec.Struct):
    """Result of a select: the likeliest choice, its index, and the scores of all."""

    choice: str
    index: int
    scores: list[float]
    meta_info: PromptUsage


# Embeddings ---------------------------------------------------------------------------------------


class EmbeddingBody(HandlingBody, kw_only=True):
    """Body of `POST /v1/embeddings`. `pooling` and `normalize` are not OpenAI's."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    user: Annotated[str | None, ignored("it is about the account of OpenAI's clients")] = None


class Embedding(msgspec.Struct, kw_only=True):
    """Vector: numbers, or their bytes (float32, little-endian) in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class EmbeddingReply(msgspec.Struct, kw_only=True):
    """Reply to `POST /v1/embeddings`."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


def _encoded(vector: Vector, form: str | None) -> list[float] | str:
    values = vector.values.astype("<f4")
    return base64.b64encode(values.tobytes()).decode() if form == "base64" else values.tolist()


# Scores -------------------------------------------------------------------------------------------


INSTRUCTION = "Given a query, find passages that answer it."
# The question that rerankers based on language models are trained on.
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_ANSWERS = ("yes", "no")
MAX_LABELS = 2 * MAX_PROMPTS
"""Most labels of a request, counted once for each of its texts."""
_AT_ONCE = 256


Method = Literal["judge", "cross-encoder", "embeddings"]


class _Ranked(HandlingBody, kw_only=True):
    """Common fields of scores and ranks. `method` finds a text's relevance: `judge` asks the model
    about it; `cross-encoder` scores both texts with a head of one label; `embeddings` takes the
    cosine of the texts' vectors. By default a model with such a head uses it, a reranker judges,
    and other models use embeddings. `instruction` tells the judge what makes a text relevant."""

    model: str | None = None
    method: Method | None = None
    instruction: str | None = None
    cache_salt: str | None = None
    user: Annotated[str | None, ignored("it is about the account of clients")] = None
    truncate_prompt_tokens: Annotated[
        int | None, refused("a text that is too long is an error; shorten it before you send it")
    ] = None


class ScoreBody(_Ranked, kw_only=True):
    """Body of `POST /v1/score`: pairs of texts (vLLM's `text_1`, `text_2`: relevance of the second
    to the first), or a `query` with `items`, and labels to be scored behind each. Labels are
    sglang's `label_token_ids`, or texts as `labels`."""

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
    """Body of `POST /v1/rerank`, in the shapes of Jina and Cohere."""

    query: str
    documents: Annotated[list[str | Document], SOME]
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool | None = None
    max_chunks_per_doc: Annotated[int | None, ignored("documents are read as a whole")] = None


class ScoreUsage(msgspec.Struct):
    """Tokens of all texts; nothing is generated."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class LabelScores(msgspec.Struct, tag_field="object", tag="scoring"):
    """Probabilities of the labels behind each text."""

    scores: list[list[float]]
    model: str
    usage: ScoreUsage


class PairScore(msgspec.Struct):
    """Relevance of a pair's second text to the first."""

    index: int
    score: float
    object: str = "score"


class PairScores(msgspec.Struct, tag_field="object", tag="list"):
    """Scores of all pairs."""

    id: str
    created: int
    model: str
    method: Method
    data: list[PairScore]
    usage: ScoreUsage


class Ranked(msgspec.Struct):
    """Document, by its index, and its relevance."""

    index: int
    relevance_score: float
    document: Document | msgspec.UnsetType = msgspec.UNSET


class Ranking(msgspec.Struct):
    """Documents, the most relevant one first."""

    id: str
    model: str
    method: Method
    results: list[Ranked]
    usage: ScoreUsage


class _Scored(msgspec.Struct, frozen=True):
    """Log-probabilities of the labels behind one text, and the text's tokens."""

    logprobs: tuple[float, ...]
    tokens: int


_Place = dict[str, Any]
"""Namespace, adapter and handling of prompts."""


class Scores:
    """Handlers of scores and vectors."""

    def __init__(self, served: ServedModel, chats: Chats) -> None:
        self._served = served
        self._chats = chats

    async def select(self, body: SelectBody) -> Selection:
        model = check_name(self._served.model_info, body.model)
        check_texts(body.choices, "choices")
        size = self._served.model_info.vocab_size
        if body.text is not None:
            (prompt,) = parse_prompts([body.text], "text", size)
            if not body.text and not self._served.tokenizer.encode(""):
                raise InvalidParameter("text", "text is empty: no choice follows nothing")
        else:
            (prompt,) = parse_prompts(body.input_ids or [], "input_ids", size)

        select = Select(
            0,
            0,
            tuple(body.choices),
            method=body.method or "token_length_normalized",
            temperature=body.temperature or 0.0,
        )
        (selected,) = await behind_prompts(
            self._served,
            [(prompt.parts(), select)],
            1,
            **placed_unpinned(self._served, body, model),
            param=lambda index: "input_ids" if body.text is None else "text",
        )
        assert isinstance(selected, Selected)
        used = PromptUsage(selected.usage.prompt_tokens, selected.usage.cached_tokens)
        return Selection(selected.choice, selected.index, list(selected.scores), used)

    async def embed(self, body: EmbeddingBody) -> EmbeddingReply:
        model = check_name(self._served.model_info, body.model)
        prompts = parse_prompts(body.input, "input", self._served.model_info.vocab_size)
        embeddings, usage = await vectors(
            self._served,
            [prompt.parts() for prompt in prompts],
            body.pooling,
            normalise=body.normalize is not False,
            dimensions=body.dimensions,
            **placed_unpinned(self._served, body, model),
        )
        form, count = body.encoding_format, usage.prompt_tokens
        data = [
            Embedding(index=i, embedding=_encoded(one, form)) for i, one in enumerate(embeddings)
        ]
        details = PromptTokens(cached_tokens=usage.cached_tokens)
        used = EmbeddingUsage(count, count, details)
        return EmbeddingReply(model=model, data=data, usage=used)

    async def score(self, body: ScoreBody) -> LabelScores | PairScores:
        model = check_name(self._served.model_info, body.model)
        if body.text_1 is not None or body.text_2 is not None:
            return await self._pairs(body, model)
        labels = self._labels(body)
        place = placed_unpinned(self._served, body, model)
        prompts = self._prompts(body)
        if body.label_token_ids is None:
            for prompt in prompts:
                if not (prompt.text or prompt.ids):
                    await self._ids(prompt)  # some tokenizers give tokens to empty texts
            parts = (prompt.parts() for prompt in prompts)
            field = "items" if isinstance(body.items, str) else "items[{}]"
            scored = await self._select(parts, len(prompts), labels, place, field)
        else:
            _check_count(len(prompts) * len(body.label_token_ids), MAX_PROMPTS)
            ids = [await self._ids(prompt) for prompt in prompts]
            scored = await self._append(ids, body.label_token_ids, place)
        softmax = bool(body.apply_softmax)
        scores = [_probabilities(one.logprobs, softmax) for one in scored]
        return LabelScores(scores, model, _usage(scored))

    async def rerank(self, body: RerankBody) -> Ranking:
        model = check_name(self._served.model_info, body.model)
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        pairs = [(body.query, text) for text in texts]
        names = ("query", "documents[{}]")
        method, scores, usage = await self._relevance(body, model, pairs, names)
        order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n]
        shown = body.return_documents is not False
        results = [
            Ranked(index, scores[index], Document(texts[index]) if shown else msgspec.UNSET)
            for index in order
        ]
        return Ranking(f"rerank-{uuid.uuid4().hex}", model, method, results, usage)

    async def _pairs(self, body: ScoreBody, model: str) -> PairScores:
        first, second = _listed(body.text_1, "text_1"), _listed(body.text_2, "text_2")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidParameter(
                "text_2", f"text_2 has {len(second)} texts for the {len(first)} of text_1"
            )
        pairs = list(zip(first, second, strict=True))
        names = (
            "text_1" if isinstance(body.text_1, str) else "text_1[{}]",
            "text_2" if isinstance(body.text_2, str) else "text_2[{}]",
        )
        method, scores, usage = await self._relevance(body, model, pairs, names)
        data = [PairScore(i, score) for i, score in enumerate(scores)]
        head = envelope("score", "list", model)
        return PairScores(head["id"], head["created"], model, method, data, usage)

    async def _relevance(
        self, body: _Ranked, model: str, pairs: Sequence[tuple[str, str]], names: tuple[str, str]
    ) -> tuple[Method, list[float], ScoreUsage]:
        """Return the method, and each text's relevance to its query; `names` are the fields of
        both."""
        method, place = self._method(body), placed_unpinned(self._served, body, model)
        if method == "judge":
            scored = await self._judged(body, pairs, place, names[1])
            return method, [_probabilities(s.logprobs, True)[0] for s in scored], _usage(scored)
        _check_count(len(pairs), MAX_PROMPTS)
        if method == "cross-encoder":
            fields = [names[1].format(index) for index in range(len(pairs))]
            joined = [
                await self._joined(body, pair, field)
                for pair, field in zip(pairs, fields, strict=True)
            ]
            found, usage = await self._vectors(joined, fields, "labels", place)
            return method, [_sigmoid(float(one.values[0])) for one in found], usage
        named: dict[str, str] = {}
        for index, pair in enumerate(pairs):
            for text, name in zip(pair, names, strict=True):
                named.setdefault(text, name.format(index))
        texts = [(Text(text),) for text in named]
        found, usage = await self._vectors(texts, list(named.values()), None, place)
        vectors = {text: one.values for text, one in zip(named, found, strict=True)}
        return method, [float(vectors[query] @ vectors[text]) for query, text in pairs], usage

    async def _vectors(
        self,
        inputs: Sequence[tuple[Part, ...]],
        names: Sequence[str],
        pooling: Pooling | None,
        place: _Place,
    ) -> tuple[list[Vector], ScoreUsage]:
        """Compute a vector of each input; of length 1, for comparisons, if `pooling` is None."""
        rows, usage = await vectors(
            self._served, inputs, pooling, normalise=pooling is None, names=names, **place
        )
        return rows, ScoreUsage(usage.prompt_tokens, usage.prompt_tokens)

    def _method(self, body: _Ranked) -> Method:
        """Return the requested method, or the model's own. Raises InvalidParameter for a method
        that the model has no head for."""
        labels = self._served.model_info.labels
        method: Method = "judge" if labels is None and self._is_reranker() else "embeddings"
        method = body.method or ("cross-encoder" if labels == 1 else method)
        if method == "cross-encoder" and labels != 1:
            head = "a language model" if labels is None else f"of {labels} labels"
            raise InvalidParameter("method", f"the model is {head}: it has no head of one label")
        if method == "judge" and labels is not None:
            raise InvalidParameter("method", "the model generates no text: it cannot judge")
        if body.instruction is not None and not (method == "judge" or self._asks()):
            raise InvalidParameter("instruction", 'instruction needs "method": "judge"')
        return method

    async def _joined(self, body: _Ranked, pair: tuple[str, str], field: str) -> tuple[Part, ...]:
        """Return a cross-encoder's input for a pair: its template's question, else both texts as
        its tokenizer joins them."""
        length = len(pair[0]) + len(pair[1])
        check_length(self._served, field, length + len(body.instruction or ""))
        if self._asks():
            return self._question(body.instruction or INSTRUCTION, *pair)
        join = self._served.tokenizer.encode_pair
        return (Tokens(tuple(await self._served.tokenize(length, join, *pair))),)

    def _asks(self) -> bool:
        """Return whether the template asks the question that rerankers are trained on."""
        return _JUDGE in (self._served.chat.source or "")

    def _is_reranker(self) -> bool:
        """Guess from names whether the model was trained to judge, which no file says."""
        info = self._served.model_info
        path = Path(info.path)
        # Of the folders above the model, only the hub's is named after the model.
        names = (info.name, path.name, *(one for one in path.parts if one.startswith("models--")))
        return "rerank" in " ".join(names).lower() or self._asks()

    async def _judged(
        self, body: _Ranked, pairs: Sequence[tuple[str, str]], place: _Place, field: str
    ) -> list[_Scored]:
        """Score "yes" and "no" as answers to whether each text answers its query."""
        instruction = body.instruction or INSTRUCTION
        for index, (query, text) in enumerate(pairs):
            check_length(
                self._served, field.format(index), len(instruction) + len(query) + len(text)
            )
        parts = (self._question(instruction, query, text) for query, text in pairs)
        return await self._select(parts, len(pairs), _ANSWERS, place, field)

    def _question(self, instruction: str, query: str, text: str) -> tuple[Part, ...]:
        question = f"<Instruct>: {instruction}\n\n<Query>: {query}\n\n<Document>: {text}"
        messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": question}]
        request = ChatRequest(messages, {}, template={"enable_thinking": False})
        return self._chats.render(request, ())

    def _labels(self, body: ScoreBody) -> Sequence[str]:
        if (body.labels is None) == (body.label_token_ids is None):
            raise InvalidParameter("labels", "give either labels or label_token_ids")
        if not (body.labels or body.label_token_ids):
            raise InvalidParameter("labels", "there must be at least one label")
        size = self._served.model_info.vocab_size
        for token in body.label_token_ids or ():
            if not 0 <= token < size:
                raise InvalidParameter(
                    "label_token_ids", f"label_token_ids: {token} is not a token id"
                )
        check_texts(body.labels or (), "labels")
        return body.labels or ()

    def _prompts(self, body: ScoreBody) -> list[Prompt]:
        """Return the query with each of the items."""
        if body.query is None or body.items is None:
            raise InvalidParameter("query", "give query and items, or text_1 and text_2")
        size = self._served.model_info.vocab_size
        (query,) = parse_prompts(body.query, "query", size)
        items = parse_prompts(body.items, "items", size)
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

    async def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Tokenize a prompt. Raises InvalidParameter for a prompt without tokens."""
        ids = prompt.ids
        if ids is None:
            text = prompt.text or ""
            check_length(self._served, "items", len(text))
            encode = self._served.tokenizer.encode
            ids = tuple(await self._served.tokenize(len(text), encode, text))
        if not ids:
            raise InvalidParameter("items", "query and item are empty: no label follows nothing")
        return ids

    async def _append(
        self, prompts: Sequence[tuple[int, ...]], labels: Sequence[int], place: _Place
    ) -> list[_Scored]:
        """Score labels that are tokens: append each, and read its log-probability."""

        def read(ids: tuple[int, ...]) -> Generate:
            params = SamplingParams(max_tokens=0, logprobs=True, prompt_logprobs_from=len(ids))
            return Generate(0, 0, params=params)

        operations = (((Tokens((*ids, label)),), read(ids)) for ids in prompts for label in labels)
        results = await behind_prompts(
            self._served,
            operations,
            len(prompts) * len(labels),
            at_once=_AT_ONCE,
            param=lambda index: f"items[{index // len(labels)}]",
            **place,
        )
        scores = []
        for index, ids in enumerate(prompts):
            mine = results[index * len(labels) : (index + 1) * len(labels)]
            logprobs = []
            for one in mine:
                assert isinstance(one, Generated)
                logprob = one.prompt_logprobs[-1].logprob
                assert logprob is not None  # only a context's first token has none
                logprobs.append(logprob)
            scores.append(_Scored(tuple(logprobs), len(ids)))
        return scores

    async def _select(
        self,
        prompts: Iterable[tuple[Part, ...]],
        count: int,
        labels: Sequence[str],
        place: _Place,
        field: str,
    ) -> list[_Scored]:
        """Score labels that are texts, by one `Select` per prompt; `field` holds the prompts."""
        _check_count(count, MAX_PROMPTS)
        _check_count(count * len(labels), MAX_LABELS)

        operations = ((parts, Select(0, 0, tuple(labels))) for parts in prompts)
        at_once = max(1, _AT_ONCE // len(labels))
        scores = []
        results = await behind_prompts(
            self._served,
            operations,
            count,
            at_once=at_once,
            param=field.format,
            choices="labels",
            **place,
        )
        for one in results:
            assert isinstance(one, Selected)
            scores.append(_Scored(one.scores, one.usage.prompt_tokens))
        return scores


def _probabilities(logprobs: Sequence[float], softmax: bool) -> list[float]:
    """Return the labels' probabilities; `softmax` normalises over the labels alone."""
    if not softmax:
        return [math.exp(one) for one in logprobs]
    most = max(logprobs)
    weights = [math.exp(one - most) for one in logprobs]
    return [weight / sum(weights) for weight in weights]


def _sigmoid(score: float) -> float:
    """Map a score to (0, 1) as sentence-transformers' CrossEncoder and vLLM do for one label."""
    return math.exp(min(score, 0.0)) / (1 + math.exp(-abs(score)))


def _usage(scored: Sequence[_Scored]) -> ScoreUsage:
    total = sum(one.tokens for one in scored)
    return ScoreUsage(total, total)


def _listed(texts: str | list[str] | None, param: str) -> list[str]:
    if not texts:
        raise InvalidParameter(param, f"{param} is missing or empty")
    return [texts] if isinstance(texts, str) else texts


def _check_count(count: int, bound: int) -> None:
    if count > bound:
        raise InvalidParameter(
            "items", f"at most {bound} texts (or texts times labels) can be scored, not {count}"
        )
