"""OpenAI's messages and tools, as bodies carry them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from rootlace.runtime.gateway.http.body import SOME, Body
from rootlace.runtime.gateway.http.fields import ignored

CLIENTS_RUN = "tools are run by the client"
CACHED = ignored("every prompt is cached")


class ContentPart(Body):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    cache_control: Annotated[Any, CACHED] = None


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body, kw_only=True):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall
    index: int | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # what a reply of ours (or OpenAI's) carries when a client sends it back as history
    refusal: str | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None
    cache_control: Annotated[Any, CACHED] = None


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
