"""What a response consists of: its items, whole and as they grow."""

from __future__ import annotations

import uuid
from typing import Any, Literal

import msgspec

from rootlace.runtime.gateway.http.chat.blocks import Begin, Block, BlockEvent, More


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text for the user."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Text that the model wrote to itself."""

    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: str
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """What the model thought."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: tuple[()] = ()


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function that is to be called, and its arguments as JSON."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall

_PREFIXES = {"text": "msg", "thoughts": "rs", "call": "fc"}
_NAMES = {"text": "output_text", "thoughts": "reasoning_text", "call": "function_call_arguments"}


class Items:
    """Writes blocks as items. An item keeps its ids from its first event to the whole response."""

    def __init__(self) -> None:
        self._ids: dict[int, tuple[str, str]] = {}

    def item(self, block: Block, status: str = "completed") -> OutputItem:
        """The item of a block; without content while it is in progress."""
        item_id, call_id = self._of(block)
        written = status != "in_progress"
        if block.kind == "call":
            arguments = block.text if written else ""
            return OutputCall(item_id, status, call_id, block.name, arguments)
        if block.kind == "thoughts":
            return OutputReasoning(item_id, status, [ReasoningText(block.text)] if written else [])
        return OutputMessage(item_id, status, [OutputText(block.text)] if written else [])

    def events(self, change: BlockEvent, status: str = "completed") -> list[dict[str, Any]]:
        """What is streamed of a change, but for the numbers of the events. `status` is that of an
        item that ends."""
        block = change.block
        at: dict[str, Any] = {"item_id": self._of(block)[0], "output_index": block.index}
        inside = at if block.kind == "call" else {**at, "content_index": 0}
        name = f"response.{_NAMES[block.kind]}"
        if isinstance(change, More):
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            return [{"type": f"{name}.delta", **inside, "delta": change.text, **more}]
        if isinstance(change, Begin):
            item = self.item(block, "in_progress")
            events = [_item_event("response.output_item.added", block, item)]
            if block.kind != "call":
                part = _part(block, "")
                events.append({"type": "response.content_part.added", **inside, "part": part})
            return events
        events = [{"type": f"{name}.done", **inside, **_whole(block)}]
        if block.kind != "call":
            part = _part(block, block.text)
            events.append({"type": "response.content_part.done", **inside, "part": part})
        return [*events, _item_event("response.output_item.done", block, self.item(block, status))]

    def call_id(self, block: Block) -> str:
        return self._of(block)[1]

    def _of(self, block: Block) -> tuple[str, str]:
        if block.index not in self._ids:
            self._ids[block.index] = (
                f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}",
                f"call_{uuid.uuid4().hex[:24]}",
            )
        return self._ids[block.index]


def _item_event(kind: str, block: Block, item: OutputItem) -> dict[str, Any]:
    return {"type": kind, "output_index": block.index, "item": item}


def _part(block: Block, text: str) -> OutputText | ReasoningText:
    return OutputText(text) if block.kind == "text" else ReasoningText(text)


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"arguments": block.text, "name": block.name}
    return {"text": block.text, **({"logprobs": []} if block.kind == "text" else {})}
