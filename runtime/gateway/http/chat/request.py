"""A request for an answer, whichever interface it came by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rootlace.runtime.gateway.http.chat.held import Held
from rootlace.runtime.gateway.http.constraints import Asked
from rootlace.wire.handling import PLAIN, Cache, Handling


@dataclass(frozen=True)
class Tool:
    """A function that the model may call, without arguments where it has no `parameters`.
    `strict`: its arguments fit them in any case (True), as far as that can be held (None), or are
    any object (False)."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it, without what was not given."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        # Templates that write them are not ready for none.
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may, must or must not call a tool; `name`: it must call this one.

    `parallel`: it may make several calls at once. None leaves it to the model where it may call,
    and means one call where it must. `allowed`: it may call no others than these; None: any.
    """

    kind: Literal["auto", "required", "none"] = "auto"
    name: str | None = None
    parallel: bool | None = None
    allowed: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Pinned:
    """A conversation is to be pinned up to where `messages` begin to differ from it."""

    messages: list[dict[str, Any]]
    cache: Cache


@dataclass(frozen=True)
class ChatRequest:
    """A conversation and how to go on with it.

    `messages` are what chat templates take. `fields` are those of `SamplingParams` that were given,
    `names` what the client calls them, and `defaults` what the interface takes for those that
    neither the request nor the model names. `options` says how a constraint is enforced. With
    `keep` the branch stays for later requests, and `behind` is one that stayed, from which this one
    goes on if its conversation begins so. `prediction`: what the answer may be like.
    """

    messages: list[dict[str, Any]]
    fields: dict[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    constraint: Asked | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final: bool = False
    reasoning: bool = True
    """Whether thoughts are told apart from content."""
    thinking_budget: int | None = None
    """So many tokens of thoughts at most."""
    namespace: str = ""
    cache_report: bool = False
    handling: Handling = PLAIN
    pinned: tuple[Pinned, ...] = ()
    adapter: str = ""
    keep: bool = False
    behind: Held | None = None
    prediction: str = ""
    param: str = "messages"
    """The field that holds the conversation, for errors."""

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think; None leaves it to the template."""
        given = self.template.get("enable_thinking", self.template.get("thinking"))
        return given if isinstance(given, bool) else None
