"""OpenAI's messages and tools, as bodies carry them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from rootlace.runtime.gateway.http.body import SOME, Body, History
from rootlace.runtime.gateway.http.fields import ignored

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
