"""Bodies of Ollama's interface."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from rootlace.runtime.gateway.http.body import MANY, Body, History
from rootlace.runtime.gateway.http.chat.request import Tool as ChatTool
from rootlace.runtime.gateway.http.chat.thinking import Budget
from rootlace.runtime.gateway.http.constraints import Asked, json_source
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.fields import ignored, refused
from rootlace.runtime.gateway.http.handling import HandlingBody
from rootlace.wire.protocol import Constraint
from rootlace.wire.sampling import PARAMETERS

_SERVER = ignored("the server was started with its own setting")
_STAYS = ignored("the model stays loaded")
_ONLY_TEXT = refused("only text is served")
_LOGPROBS = refused("use /v1/chat/completions")

# Ollama's names of the parameters that it calls otherwise, by ours.
NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's own (`DefaultOptions` of its api/types.go), as far as they are not ours as well; but for
`repeat_penalty` 1.1, which is about the last 64 tokens there: of all tokens it would be another."""


class Options(Body):
    """How to sample; see `DEFAULTS` for what is not given."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    num_ctx: Annotated[int | None, _SERVER] = None
    num_batch: Annotated[int | None, _SERVER] = None
    num_gpu: Annotated[int | None, _SERVER] = None
    main_gpu: Annotated[int | None, _SERVER] = None
    num_thread: Annotated[int | None, _SERVER] = None
    num_keep: Annotated[int | None, _SERVER] = None
    numa: Annotated[bool | None, _SERVER] = None
    low_vram: Annotated[bool | None, _SERVER] = None
    f16_kv: Annotated[bool | None, _SERVER] = None
    use_mmap: Annotated[bool | None, _SERVER] = None
    use_mlock: Annotated[bool | None, _SERVER] = None
    vocab_only: Annotated[bool | None, _SERVER] = None
    logits_all: Annotated[bool | None, _SERVER] = None
    embedding_only: Annotated[bool | None, _SERVER] = None
    repeat_last_n: Annotated[int | None, ignored("penalties count the whole text")] = None
    penalize_newline: Annotated[bool | None, ignored("a line's end is a token like others")] = None
    mirostat_eta: Annotated[float | None, ignored("there is no mirostat")] = None
    mirostat_tau: Annotated[float | None, ignored("there is no mirostat")] = None
    mirostat: Annotated[int | None, refused("use top_p or min_p", 0)] = None
    tfs_z: Annotated[float | None, refused("use top_p or min_p", 1.0)] = None
    typical_p: Annotated[float | None, refused("use top_p or min_p", 1.0)] = None


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    function: Function
    type: Literal["function"] = "function"


class Called(History):
    name: str
    arguments: dict[str, Any]


class ToolCall(History):
    function: Called
    id: str | None = None


class Message(History):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Any = None


class AnswerBody(HandlingBody, kw_only=True):
    """What chat and generate share. Without `stream` it is a stream. `priority`, `timeout`,
    `cache`, `cache_salt` and `return_cache_report` are ours."""

    model: str
    stream: bool | None = None
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | str | None = None
    thinking_budget: Budget | None = None
    return_cache_report: bool | None = None
    cache_salt: str | None = None
    keep_alive: Annotated[float | str | None, _STAYS] = None
    logprobs: Annotated[bool | None, _LOGPROBS] = None
    top_logprobs: Annotated[int | None, _LOGPROBS] = None


class ChatBody(AnswerBody, kw_only=True):
    """`POST /api/chat`."""

    messages: Annotated[list[Message], MANY] | None = None
    tools: list[Tool] | None = None


class GenerateBody(AnswerBody, kw_only=True):
    """`POST /api/generate`. Without `raw` the prompt is a conversation's only message."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Annotated[str | None, refused("the model cannot infill")] = None
    template: Annotated[str | None, refused("the model's own is used, or none with raw")] = None
    context: Annotated[list[int] | None, refused("send the conversation to /api/chat")] = None
    images: Annotated[list[Any] | None, _ONLY_TEXT] = None
    width: Annotated[int | None, _ONLY_TEXT] = None
    height: Annotated[int | None, _ONLY_TEXT] = None
    steps: Annotated[int | None, _ONLY_TEXT] = None


class ShowBody(Body):
    """`POST /api/show`; `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: Annotated[bool | None, ignored("all there is is shown")] = None


class EmbedBody(HandlingBody, kw_only=True):
    """`POST /api/embed`."""

    model: str
    input: str | list[str]
    cache_salt: str | None = None
    dimensions: int | None = None
    truncate: Annotated[bool | None, ignored("a text that is too long is an error")] = None
    keep_alive: Annotated[float | str | None, _STAYS] = None
    options: Annotated[dict[str, Any] | None, _SERVER] = None


def fields_of(options: Options | None) -> dict[str, Any]:
    """The options by the names of `SamplingParams`."""
    named: dict[str, Any] = {}
    for ours in PARAMETERS:
        value = getattr(options, NAMES.get(ours, ours), None)
        if value is not None:
            named[ours] = value
    if "stop" in named:
        stop = named["stop"]
        named["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    # What is below 0 is to llama.cpp: greedy, off, no limit, and a seed that is drawn.
    below = {"temperature": 0.0, "top_k": 0, "max_tokens": None}
    named |= {name: value for name, value in below.items() if named.get(name, 0) < 0}
    if named.get("seed") == -1:
        del named["seed"]
    return named


def constraint_of(body: AnswerBody) -> Asked | None:
    """That of `format`."""
    if not body.format:
        return None
    schema = {"type": "object"} if body.format == "json" else body.format
    return Asked(Constraint("json_schema", json_source(schema)), "format")


def messages_of(messages: list[Message]) -> list[dict[str, Any]]:
    """As chat templates take them. Raises InvalidParameter for images, and where there is nothing
    that somebody else than the model said."""
    found = []
    for index, given in enumerate(messages):
        if given.images:
            param = f"messages[{index}].images"
            raise InvalidParameter(param, f"{param}: only text is served")
        if given.content is None and given.role != "assistant":
            param = f"messages[{index}].content"
            raise InvalidParameter(param, f"{param} is missing")
        message: dict[str, Any] = {"role": given.role, "content": given.content or ""}
        if given.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{number}",
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments,
                    },
                }
                for number, call in enumerate(given.tool_calls)
            ]
        for name, value in (
            ("reasoning_content", given.thinking),
            ("name", given.tool_name),
            ("tool_call_id", given.tool_call_id),
        ):
            if value:
                message[name] = value
        found.append(message)
    return found


def tools_of(tools: list[Tool] | None) -> tuple[ChatTool, ...]:
    functions = [tool.function for tool in tools or ()]
    return tuple(ChatTool(f.name, f.description, f.parameters) for f in functions)
