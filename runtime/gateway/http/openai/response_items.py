"""What a response consists of: its items, whole and as they grow."""

from __future__ import annotations

import uuid
from typing import Any

from rootlace.runtime.gateway.http.chat.blocks import Begin, Block, BlockEvent, More

_PREFIXES = {"text": "msg", "thoughts": "rs", "call": "fc"}
_PARTS = {"text": "output_text", "thoughts": "reasoning_text"}
_NAMES = {"text": "output_text", "thoughts": "reasoning_text", "call": "function_call_arguments"}


class Items:
    """Writes blocks as items. An item keeps its ids from its first event to the whole response."""

    def __init__(self) -> None:
        self._ids: dict[int, tuple[str, str]] = {}

    def item(self, block: Block, status: str = "completed") -> dict[str, Any]:
        """The item of a block; without content while it is in progress."""
        item_id, call_id = self._of(block)
        head = {"id": item_id, "status": status}
        if block.kind == "call":
            return {
                **head,
                "type": "function_call",
                "call_id": call_id,
                "name": block.name,
                "arguments": "" if status == "in_progress" else block.text,
            }
        content = [] if status == "in_progress" else [_part(block, block.text)]
        if block.kind == "thoughts":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def events(self, change: BlockEvent) -> list[dict[str, Any]]:
        """What is streamed of a change, but for the numbers of the events."""
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
        return [*events, _item_event("response.output_item.done", block, self.item(block))]

    def call_id(self, block: Block) -> str:
        return self._of(block)[1]

    def _of(self, block: Block) -> tuple[str, str]:
        if block.index not in self._ids:
            self._ids[block.index] = (
                f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}",
                f"call_{uuid.uuid4().hex[:24]}",
            )
        return self._ids[block.index]


def _item_event(kind: str, block: Block, item: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "output_index": block.index, "item": item}


def _part(block: Block, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": _PARTS[block.kind], "text": text, **more}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"arguments": block.text, "name": block.name}
    return {"text": block.text, **({"logprobs": []} if block.kind == "text" else {})}
