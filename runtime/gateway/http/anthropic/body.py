"""Bodies of Anthropic's messages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from rootlace.runtime.gateway.http.body import SOME, Body, History
from rootlace.runtime.gateway.http.chat.thinking import Thinking
from rootlace.runtime.gateway.http.fields import ignored, refused
from rootlace.runtime.gateway.http.handling import HandlingBody

_ACCOUNT = ignored("it is about the account of Anthropic's clients")
_NO_SERVER_TOOLS = refused("tools are run by the client")


class CacheControl(Body):
    """The prompt is pinned up to here, if there is room for it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


_CacheControl = CacheControl | None


class TextBlock(History, tag_field="type", tag="text"):
    ONLY: ClassVar[str] = "only text can be read"

    text: str
    cache_control: _CacheControl = None


class ThinkingBlock(History, tag_field="type", tag="thinking"):
    thinking: str


class RedactedThinkingBlock(History, tag_field="type", tag="redacted_thinking"):
    """Left out: nobody here can read it."""


class ToolUseBlock(History, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: _CacheControl = None


class ToolResultBlock(History, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    cache_control: _CacheControl = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class Message(History):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Body):
    """A tool that the client runs."""

    ONLY: ClassVar[str] = "tools are run by the client"

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: _CacheControl = None
    input_examples: Annotated[Any, ignored("templates have no place for them")] = None
    eager_input_streaming: Annotated[bool | None, ignored("calls stream as written")] = None
    defer_loading: Annotated[bool | None, refused("there is no search for tools")] = None
    allowed_callers: Annotated[Any, ignored("the model is the only caller")] = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: str | None = None


class CountBody(HandlingBody, kw_only=True):
    """`POST /v1/messages/count_tokens`, and what a request for an answer adds to."""

    messages: Annotated[list[Message], SOME]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: _CacheControl = None
    context_management: Annotated[Any, ignored("the whole conversation is read")] = None
    speed: Annotated[str | None, ignored("there is one speed")] = None
    mcp_servers: Annotated[Any, _NO_SERVER_TOOLS] = None
    container: Annotated[Any, _NO_SERVER_TOOLS] = None


class MessagesBody(CountBody, kw_only=True):
    """`POST /v1/messages`. `cache_salt`, `return_cache_report`, `priority`, `timeout`
    and `cache` are ours."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    return_cache_report: bool | None = None
    metadata: Annotated[Any, _ACCOUNT] = None
    user_profile_id: Annotated[str | None, _ACCOUNT] = None
    diagnostics: Annotated[Any, ignored("the usage says what was found in the cache")] = None
    service_tier: Annotated[str | None, _ACCOUNT] = None
    inference_geo: Annotated[str | None, _ACCOUNT] = None
