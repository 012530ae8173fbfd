"""Ollama's interface, `/api/...`: answers, vectors, and the served models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec

from rootlace.runtime.server.auth import caller
from rootlace.runtime.server.http.body import MANY, Body, History, ignored, refused, with_fields
from rootlace.runtime.server.http.chat_pipeline import Chats
from rootlace.runtime.server.http.chat_request import (
    Block,
    Blocks,
    Budget,
    ChatRequest,
    End,
    More,
    ToolChoice,
    blocks_of,
    thinking_arguments,
)
from rootlace.runtime.server.http.constraints import Rule, schema_constraint
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.http.generation import (
    AnswerDelta,
    AnswerStream,
    FinalOutput,
    Prepared,
    vectors,
)
from rootlace.runtime.server.http.logprobs import ChosenToken, chat_logprobs, rows_of
from rootlace.runtime.server.http.ollama_models import (
    Entries,
    Entry,
    Shown,
    about_of,
    details_of,
    entry_of,
    files_at,
    running_of,
    with_adapters,
)
from rootlace.runtime.server.http.replies import LINES, Reports, Stream, report_of
from rootlace.runtime.server.http.request_fields import (
    Function,
    HandlingBody,
    Prompt,
    TopLogprobs,
    asked_top,
    call_of,
    placed,
    placed_unpinned,
    sampling_fields,
    tools_of,
    with_sampling,
)
from rootlace.runtime.server.served_model import ServedModel, check_name
from rootlace.runtime.server.server_state import call_for
from rootlace.wire.protocol import Generated, TokenLogprob
from rootlace.wire.sampling import names_in

# Body ---------------------------------------------------------------------------------------------


_SERVER = ignored("the server was started with its own setting")
_ONLY_TEXT = refused("only text is served")

NAMES = names_in("ollama")
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Defaults of Ollama (`DefaultOptions` of its api/types.go) that differ from ours. Not
`repeat_penalty` 1.1: it covers the last 64 tokens there, and would cover all tokens here."""


@with_sampling("ollama")
@with_fields(
    (_SERVER, int, "num_ctx num_batch num_gpu main_gpu num_thread num_keep"),
    (_SERVER, bool, "numa low_vram f16_kv use_mmap use_mlock"),
    (_SERVER, bool, "vocab_only logits_all embedding_only"),
    (ignored("penalties count the whole text"), int, "repeat_last_n"),
    (ignored("a line's end is a token like others"), bool, "penalize_newline"),
    (ignored("there is no mirostat"), float, "mirostat_eta mirostat_tau"),
    (refused("use top_p or min_p", 0), int, "mirostat"),
    (refused("use top_p or min_p", 1.0), float, "tfs_z typical_p"),
)
class OptionsBody(Body):
    """Sampling options, without those that `with_sampling` adds; missing ones are in `DEFAULTS`."""


class Tool(Body):
    function: Function
    type: Literal["function"] = "function"


class Called(History):
    name: str
    arguments: dict[str, Any]


class InputToolCall(History):
    function: Called
    id: str | None = None


class InputMessage(History):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[InputToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Any = None


class AnswerBody(HandlingBody, kw_only=True):
    """Common fields of chat and generate. Streams by default. `priority`, `timeout`, `cache`,
    `cache_salt` and `return_cache_report` are Rootlace's. `temperature`, `top_p` and
    `max_output_tokens` are for clients that do not use options; options take precedence."""

    model: str
    stream: bool | None = None
    options: OptionsBody | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | str | None = None
    thinking_budget: Budget | None = None
    return_cache_report: bool | None = None
    cache_salt: str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


class Choice(Body):
    type: Literal["function"]
    name: str


class ChatBody(AnswerBody, kw_only=True):
    """Body of `POST /api/chat`. Ollama has no `tool_choice`, but clients send it."""

    messages: Annotated[list[InputMessage], MANY] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | Choice | None = None


@with_fields(
    (refused("the model cannot infill"), str, "suffix"),
    (refused("the model's own is used, or none with raw"), str, "template"),
    (refused("send the conversation to /api/chat"), list[int], "context"),
    (_ONLY_TEXT, list[Any], "images"),
    (_ONLY_TEXT, int, "width height steps"),
)
class GenerateBody(AnswerBody, kw_only=True):
    """Body of `POST /api/generate`. Without `raw` the prompt is a conversation's only message."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class ShowBody(Body):
    """Body of `POST /api/show`; `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: Annotated[bool | None, ignored("all there is is shown")] = None


class EmbedBody(HandlingBody, kw_only=True):
    """Body of `POST /api/embed`."""

    model: str
    input: str | list[str]
    cache_salt: str | None = None
    dimensions: int | None = None
    truncate: Annotated[bool | None, ignored("a text that is too long is an error")] = None
    keep_alive: float | str | None = None
    options: Annotated[dict[str, Any] | None, _SERVER] = None


class EmbeddingsBody(HandlingBody, kw_only=True):
    """Body of `POST /api/embeddings`, the older interface: one text's vector, not normalised."""

    model: str
    prompt: str
    cache_salt: str | None = None
    keep_alive: float | str | None = None
    options: Annotated[dict[str, Any] | None, _SERVER] = None


def unloads(load: str, keep_alive: object) -> bool:
    """Return whether to unload a model behind the answer: one loaded on demand, for a `keep_alive`
    of 0, "0", "0s" ... Never for a key: others use the model as well."""
    none = str(keep_alive).rstrip("nuµmsh") in ("0", "0.0")
    return none and load == "on-demand" and caller() is None


def fields_of(body: AnswerBody) -> dict[str, Any]:
    """Return the options, and the fields beside them, by the names of `SamplingParams`."""
    beside: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "max_tokens": body.max_output_tokens,
    }
    named = {name: value for name, value in beside.items() if value is not None}
    if body.options is not None:
        named |= sampling_fields(body.options, "ollama")
    # Negative values have llama.cpp's meaning: greedy, off, no limit, and a random seed.
    below = {"temperature": 0.0, "top_k": 0, "max_tokens": None}
    named |= {name: value for name, value in below.items() if named.get(name, 0) < 0}
    if named.get("seed") == -1:
        del named["seed"]
    return named


def constraint_of(body: AnswerBody) -> Rule | None:
    """Return the constraint of `format`."""
    if body.format is None or body.format == "":
        return None
    schema = {"type": "object"} if body.format == "json" else body.format
    return schema_constraint(schema, "format")


def messages_of(messages: list[InputMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them. Raises InvalidParameter for images, and for a
    message without content that is not the model's."""
    messages_read = []
    for index, sent in enumerate(messages):
        if sent.images:
            param = f"messages[{index}].images"
            raise InvalidParameter(param, f"{param}: only text is served")
        if sent.content is None and sent.role != "assistant":
            param = f"messages[{index}].content"
            raise InvalidParameter(param, f"{param} is missing")
        message: dict[str, Any] = {"role": sent.role, "content": sent.content or ""}
        if sent.tool_calls:
            message["tool_calls"] = [
                call_of(call.id or f"call_{number}", call.function.name, call.function.arguments)
                for number, call in enumerate(sent.tool_calls)
            ]
        for name, value in (
            ("reasoning_content", sent.thinking),
            ("name", sent.tool_name),
            ("tool_call_id", sent.tool_call_id),
        ):
            if value:
                message[name] = value
        messages_read.append(message)
    return messages_read


def choice_of(body: ChatBody) -> ToolChoice:
    choice = body.tool_choice
    if isinstance(choice, Choice):
        return ToolChoice("required", choice.name)
    return ToolChoice(choice or "auto")


def _known(served: ServedModel, name: str) -> str:
    """Return the served model's name, without a client's tag. Raises ModelNotFound for another."""
    return check_name(served.model_info, name.removesuffix(":latest"))


class Embedded(msgspec.Struct):
    """Vectors of length 1. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddedOne(msgspec.Struct):
    """Vector, not normalised."""

    embedding: list[float]


# Answers ------------------------------------------------------------------------------------------


class CalledTool(TypedDict):
    """Tool, and its arguments."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """Call of a tool."""

    function: CalledTool


class AnswerParts(TypedDict, total=False):
    """Parts of an answer beside its text."""

    thinking: str
    tool_calls: list[ToolCall]


class Message(AnswerParts):
    """Answer of a chat, or a piece of it."""

    role: Literal["assistant"]
    content: str


class Line(Reports):
    """Line of a stream, or a whole answer. The last line, or a whole answer that is not empty, has
    the figures. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    logprobs: NotRequired[list[ChosenToken]]
    done_reason: NotRequired[str]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class ChatLine(Line):
    """Line of a chat."""

    message: Message


class GenerateLine(Line, AnswerParts):
    """Line of an answer to a prompt."""

    response: str


class _Request(msgspec.Struct, frozen=True):
    """Body, checked and parsed. `top` is None without log-probabilities."""

    model: str
    prepared: Prepared
    chat: bool
    thoughts: bool
    top: int | None


class Ollama:
    """Handlers of Ollama's interface."""

    def __init__(self, served: ServedModel, chats: Chats) -> None:
        self._served = served
        self._chats = chats
        self._started = datetime.now(UTC).isoformat()

    async def tags(self) -> Entries:
        return Entries(models=with_adapters(await self._entry(), self._served.model_info))

    async def running(self) -> Entries:
        return Entries(models=[running_of(self._served, await self._entry())])

    async def show(self, body: ShowBody) -> Shown:
        _known(self._served, body.model or body.name or "")
        info = self._served.model_info
        template = self._served.chat.source
        able = ["completion", "embedding"]
        shows = self._chats.tool_prompt(with_tools=True)
        if shows.lists or self._served.config.tools == "auto":
            able.append("tools")
        if not (shows.lists or "tools" not in able):
            able.append("tools-in-own-words")
        if self._chats.format.always:
            able.append("thinking")
        about = await asyncio.to_thread(about_of, info.path, files_at(Path(info.path))[1])
        architecture = about.architecture or "rootlace"
        return {
            "modelfile": "",
            "parameters": "\n".join(
                f"{NAMES.get(name, name):<30} {value:g}" for name, value in info.sampling.items()
            ),
            "template": template or "",
            "details": details_of(about),
            "model_info": {
                "general.architecture": architecture,
                "general.basename": info.name,
                **({} if about.numbers is None else {"general.parameter_count": about.numbers}),
                **about.stated,
                f"{architecture}.context_length": info.context_length,
                f"{architecture}.vocab_size": info.vocab_size,
            },
            "capabilities": able,
            "modified_at": self._started,
        }

    async def embed(self, body: EmbedBody) -> Embedded:
        begun, model = time.monotonic(), _known(self._served, body.model)
        texts = [body.input] if isinstance(body.input, str) else body.input
        vectors, total = await self._vectors(body, model, texts, dimensions=body.dimensions)
        return Embedded(model, vectors, _nanoseconds(time.monotonic() - begun), 0, total)

    async def embed_one(self, body: EmbeddingsBody) -> EmbeddedOne:
        model = _known(self._served, body.model)
        if not body.prompt:  # as Ollama
            return EmbeddedOne([])
        vectors, _ = await self._vectors(body, model, [body.prompt], ("prompt",), normalise=False)
        return EmbeddedOne(vectors[0])

    async def _vectors(
        self,
        body: EmbedBody | EmbeddingsBody,
        model: str,
        texts: list[str],
        names: tuple[str, ...] = (),
        dimensions: int | None = None,
        normalise: bool = True,
    ) -> tuple[list[list[float]], int]:
        """Return a vector for each text, and all tokens; errors use the fields `names`."""
        found, usage = await vectors(
            self._served,
            [Prompt(text=text).parts() for text in texts],
            None,
            normalise=normalise,
            dimensions=dimensions,
            names=names,
            **placed_unpinned(self._served, body, model),
        )
        return [vector.values.tolist() for vector in found], usage.prompt_tokens

    async def _entry(self) -> Entry:
        info = self._served.model_info
        return await asyncio.to_thread(entry_of, info.name, info.path, self._started)

    async def chat(self, body: ChatBody) -> dict[str, Any] | Stream:
        model = _known(self._served, body.model)
        if not body.messages:  # Ollama's clients load a model so
            return without_text(model, True, self._loaded(body))
        messages, tools = messages_of(body.messages), tools_of(body.tools)
        wanted = self._wanted(body, model, messages, tools=tools, choice=choice_of(body))
        prepared = await self._chats.prepare(wanted)
        return await self._answer(body, model, prepared, chat=True)

    async def generate(self, body: GenerateBody) -> dict[str, Any] | Stream:
        model = _known(self._served, body.model)
        if not body.prompt:
            return without_text(model, False, self._loaded(body))
        messages = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*messages, {"role": "user", "content": body.prompt}]
        wanted = self._wanted(body, model, messages)
        if body.raw:
            prepared = self._chats.prepare_text(wanted, Prompt(text=body.prompt).parts())
        else:
            prepared = await self._chats.prepare(wanted)
        return await self._answer(body, model, prepared, chat=False)

    def _loaded(self, body: AnswerBody) -> str:
        return "unload" if unloads(self._served.config.load, body.keep_alive) else "load"

    def _wanted(
        self, body: AnswerBody, model: str, messages: list[dict[str, Any]], **more: Any
    ) -> ChatRequest:
        # A level, such as "high", also asks the model to think.
        effort = body.think if isinstance(body.think, str) else None
        thinking = bool(body.think) if body.think is not None else None
        top = asked_top(body.logprobs, body.top_logprobs)
        scores = {"logprobs": top is not None, "top_logprobs": top}
        return ChatRequest(
            messages=messages,
            fields=fields_of(body) | scores,
            names=NAMES,
            defaults=DEFAULTS,
            constraint=constraint_of(body),
            template=thinking_arguments(thinking, effort),
            thinking_budget=body.thinking_budget,
            **placed(self._served, body, model),
            **more,
        )

    async def _answer(
        self, body: AnswerBody, model: str, prepared: Prepared, chat: bool
    ) -> dict[str, Any] | Stream:
        params = prepared.job.params
        top = params.top_logprobs if params.logprobs else None
        request = _Request(model, prepared, chat, body.think is not False, top)
        if body.stream is not False:
            return Stream(self._stream(request), LINES)
        begun = time.monotonic()
        ended, (answer,) = await AnswerStream.whole(self._served, request.prepared)
        generated = ended.generated
        reply = _text(request.chat, answer.content)
        target = reply["message"] if request.chat else reply
        if answer.reasoning and request.thoughts:
            target["thinking"] = answer.reasoning
        if calls := [call for block in blocks_of(answer) if (call := _call(block)) is not None]:
            target["tool_calls"] = calls
        if request.top is not None:
            tokens = generated.outputs[0].logprobs
            rows = rows_of([generated])
            reply["logprobs"] = await call_for(rows, self._logprobs, tokens, request.top)
        return {**_head(request.model), **reply, **_done(generated, begun)}

    def _logprobs(self, tokens: Sequence[TokenLogprob], top: int) -> list[ChosenToken]:
        return chat_logprobs(self._served.tokenizer, tokens, top)["content"]

    async def _stream(self, request: _Request) -> AsyncGenerator[dict[str, Any], None]:
        begun, blocks = time.monotonic(), Blocks()
        with AnswerStream(self._served, request.prepared) as answers:
            async for event in answers.events():
                ended = isinstance(event, FinalOutput)
                changes = (
                    blocks.finish() if isinstance(event, FinalOutput) else blocks.take(event.deltas)
                )
                lines = []
                for change in changes:
                    kind = change.block.kind
                    reply = _text(request.chat, "")
                    target = reply["message"] if request.chat else reply
                    if isinstance(change, More) and kind == "text":
                        reply = _text(request.chat, change.text)
                    elif isinstance(change, More) and kind == "thoughts" and request.thoughts:
                        target["thinking"] = change.text
                    elif isinstance(change, End) and (call := _call(change.block)) is not None:
                        # Ollama's clients take a call in one piece.
                        target["tool_calls"] = [call]
                    else:
                        continue
                    lines.append(reply)
                if request.top is not None and isinstance(event, AnswerDelta) and event.logprobs:
                    lines = lines or [_text(request.chat, "")]
                    lines[-1]["logprobs"] = self._logprobs(event.logprobs, request.top)
                for line in lines:
                    yield {**_head(request.model), **line, "done": False}
                if ended:
                    last = _done(event.generated, begun)  # type: ignore[union-attr]
                    yield {**_head(request.model), **_text(request.chat, ""), **last}


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat()}


def without_text(model: str, chat: bool, reason: str) -> dict[str, Any]:
    """The answer to a request that only loads or unloads a model."""
    return {**_head(model), **_text(chat, ""), "done": True, "done_reason": reason}


def _text(chat: bool, text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}} if chat else {"response": text}


def _call(block: Block) -> dict[str, Any] | None:
    """Return a call; None for another block, or a call cut within its arguments."""
    try:
        arguments = msgspec.json.decode(block.text)
    except (msgspec.DecodeError, RecursionError):
        return None
    if block.kind != "call" or not isinstance(arguments, dict):
        return None
    return {"function": {"name": block.name, "arguments": arguments}}


def _done(generated: Generated, begun: float) -> dict[str, Any]:
    """Return the figures of the last line; durations in nanoseconds."""
    usage, timing = generated.usage, generated.timing
    first = timing.first_token - timing.queued
    return {
        "done": True,
        "done_reason": "length" if generated.outputs[0].finish_reason == "length" else "stop",
        "total_duration": _nanoseconds(time.monotonic() - begun),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(first),
        "eval_count": usage.completion_tokens,
        "eval_duration": _nanoseconds(timing.total - timing.first_token),
        **report_of(generated),
    }


def _nanoseconds(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)
