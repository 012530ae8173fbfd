"""From OpenAI's messages to what chat templates expect."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from rootlace.runtime.server.http.body import SOME, Body, History, ignored, refused
from rootlace.runtime.server.http.chat_request import Tool as ChatTool
from rootlace.runtime.server.http.constraints import OpenAIConstraintBody
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.wire.sampling import Cache, Priority, Seconds

# Body ---------------------------------------------------------------------------------------------
#
# What the bodies of OpenAI's endpoints have in common.
#
# Every field may be null, which means its default. Fields that clients send and that do not change
# what a text model answers are typed and then ignored; any other unknown field is refused, because
# a misspelt parameter that does nothing is worse than an error.


ACCOUNT = ignored("it is about the account of OpenAI's clients")
CACHE = ignored("every prompt is cached")
_NO_BEAMS = "there is no beam search"


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, ignored("nothing is obfuscated")] = None
    continuous_usage_stats: Annotated[
        bool | None, refused("the usage comes at the end, by include_usage")
    ] = None


class SamplingBody(OpenAIConstraintBody):
    """What completions and chat completions share, but for what `with_sampling` adds."""

    model: str | None = None
    max_tokens: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    adapter: str | None = None
    cache_salt: str | None = None
    return_cache_report: bool | None = None
    request_id: str | None = None
    # Those of a `HandlingBody`: a struct cannot have two others for its bases.
    priority: Priority | None = None
    timeout: Seconds | None = None
    cache: Cache | None = None

    guided_decoding_backend: Annotated[str | None, ignored("the server chose its backend")] = None
    user: Annotated[str | None, ACCOUNT] = None
    metadata: Annotated[dict[str, str] | None, ACCOUNT] = None
    store: Annotated[bool | None, ignored("nothing is stored")] = None
    service_tier: Annotated[str | None, ACCOUNT] = None
    safety_identifier: Annotated[str | None, ACCOUNT] = None
    prompt_cache_key: Annotated[str | None, CACHE] = None
    prompt_cache_retention: Annotated[str | None, CACHE] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, CACHE] = None
    cache_control: Annotated[dict[str, Any] | None, CACHE] = None
    keep_alive: Annotated[int | float | str | None, ignored("the model stays loaded")] = None

    length_penalty: Annotated[float | None, refused(_NO_BEAMS, 1.0)] = None
    use_beam_search: Annotated[bool | None, refused(_NO_BEAMS)] = None
    early_stopping: Annotated[bool | None, refused(_NO_BEAMS)] = None
    prompt_logprobs: Annotated[
        int | None, refused("/v1/completions gives them with echo and logprobs")
    ] = None
    spaces_between_special_tokens: Annotated[
        bool | None, ignored("it concerns slow tokenizers")
    ] = None
    return_token_ids: Annotated[bool | None, refused("/generate gives them as output_ids")] = None
    bad_words: Annotated[list[str] | None, refused("give the tokens to logit_bias")] = None
    truncate_prompt_tokens: Annotated[
        int | None, refused("a prompt that is too long is an error; shorten it before you send it")
    ] = None


def check_best_of(body: SamplingBody, n: int) -> None:
    """Raises InvalidParameter if more samples were to be drawn than are returned."""
    if body.best_of is not None and body.best_of != n:
        raise InvalidParameter("best_of", f"best_of is only supported equal to n ({n})")


# Messages -----------------------------------------------------------------------------------------
#
# OpenAI's messages and tools, as bodies carry them.


CLIENTS_RUN = "tools are run by the client"
CACHED = ignored("every prompt is cached")


class ContentPart(History):
    """Only text can be read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(History):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(History, kw_only=True):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(History):
    """What anybody said. `reasoning` is what others call `reasoning_content`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    # These would be content, were they anything else.
    function_call: None = None
    audio: None = None


Messages = Annotated[list[Message], SOME]


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    ONLY: ClassVar[str] = CLIENTS_RUN

    type: Literal["function"]
    function: Function
    cache_control: Annotated[Any, CACHED] = None


# Conversation -------------------------------------------------------------------------------------


_TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final"})


def template_arguments(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`. Raises InvalidParameter for what has a field of its own."""
    for name in sorted(_TEMPLATE_ARGUMENTS & (given or {}).keys()):
        raise InvalidParameter(
            f"chat_template_kwargs.{name}", f"{name} belongs outside of chat_template_kwargs"
        )
    return dict(given or {})


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as dictionaries with plain text content and decoded tool arguments.

    Raises InvalidParameter for content that is not text.
    """
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def tools_of(tools: list[Tool] | None) -> tuple[ChatTool, ...]:
    """The tools of a body."""
    functions = [tool.function for tool in tools] if tools else []
    return tuple([ChatTool(f.name, f.description, f.parameters, f.strict) for f in functions])


def _message(message: Message, param: str) -> dict[str, Any]:
    # "developer" is OpenAI's newer name of the system role; templates know only the old one.
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": _content(message, param)}
    if message.tool_calls:
        if message.role != "assistant":
            raise InvalidParameter(
                f"{param}.tool_calls", "only an assistant message has tool calls"
            )
        found["tool_calls"] = [
            call_of(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls
        ]
    # Some servers answer with a text here, others with an object.
    other = message.reasoning if isinstance(message.reasoning, str) else None
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", message.reasoning_content or other),
    ):
        if value is not None:
            found[name] = value
    return found


def _content(message: Message, param: str) -> str:
    if message.content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise InvalidParameter(f"{param}.content", f"{param}.content is missing")
    return text_of(message.content, f"{param}.content")


def text_of(content: str | list[ContentPart], param: str) -> str:
    """A content's text. Raises InvalidParameter for a part, below `param`, that is none."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        where, name = f"{param}[{index}]", "refusal" if part.type == "refusal" else "text"
        if not part.type.endswith(("text", "refusal")):  # also `input_text` and the like
            raise InvalidParameter(where, f"{where}: only text is served, not {part.type!r}")
        text = part.refusal if name == "refusal" else part.text
        if text is None:
            raise InvalidParameter(f"{where}.{name}", f"{where}.{name} is missing")
        texts.append(text)
    return "".join(texts)


def call_of(
    call_id: str | None, name: str, arguments: str | dict[str, Any] | None
) -> dict[str, Any]:
    """A call as chat templates expect it."""
    if isinstance(arguments, str):
        # Templates write the arguments as JSON themselves; text that is none stays as it is.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments or "{}")
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": call_id, "type": "function", "function": function}
