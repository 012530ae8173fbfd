"""What a response was made from, as a list of items, and the queries about kept responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from rootlace.runtime.gateway.http.batches.paging import PageQuery
from rootlace.runtime.gateway.http.fields import ignored, refused
from rootlace.runtime.gateway.http.openai.response_items import (
    OutputCall,
    OutputReasoning,
    OutputText,
    ReasoningText,
)

PAGE = 20
_ALL = ignored("all there is is included")


class ResponseQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How a kept response is shown."""

    stream: Annotated[bool | None, refused("a kept response is given whole")] = None
    starting_after: Annotated[int | None, refused("a kept response is given whole")] = None
    include: Annotated[str | None, _ALL] = None
    includes: Annotated[str | None, _ALL] = msgspec.field(name="include[]", default=None)
    include_obfuscation: Annotated[bool | None, ignored("nothing is obfuscated")] = None


class InputQuery(PageQuery, forbid_unknown_fields=True):
    """Which items of a list are shown."""

    include: Annotated[str | None, _ALL] = None
    includes: Annotated[str | None, _ALL] = msgspec.field(name="include[]", default=None)


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """Text for the model."""

    text: str


class InputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """What anybody said."""

    id: str
    role: str
    content: list[InputText | OutputText]
    status: str = "completed"


class CallOutput(msgspec.Struct, tag_field="type", tag="function_call_output"):
    """What a function gave."""

    id: str
    call_id: str
    output: str
    status: str = "completed"


InputItem = InputMessage | OutputReasoning | OutputCall | CallOutput


def input_items(response_id: str, messages: Sequence[dict[str, Any]]) -> list[InputItem]:
    """The messages as items, whose ids are always the same."""
    own = response_id.removeprefix("resp_")
    found: list[InputItem] = []
    for message in messages:
        for item in _items(message):
            item.id += f"_{own}_{len(found)}"
            found.append(item)
    return found


def _items(message: dict[str, Any]) -> Iterator[InputItem]:
    role, content = message["role"], message["content"]
    if role == "tool":
        yield CallOutput("fco", message["tool_call_id"], content)
        return
    if thoughts := message.get("reasoning_content"):
        yield OutputReasoning("rs", "completed", [ReasoningText(thoughts)])
    calls = message.get("tool_calls", ())
    if content or not calls:
        text = OutputText(content) if role == "assistant" else InputText(content)
        yield InputMessage("msg", role, [text])
    for call in calls:
        function = call["function"]
        given = function["arguments"]
        source = given if isinstance(given, str) else msgspec.json.encode(given).decode()
        yield OutputCall("fc", "completed", call["id"], function["name"], source)
