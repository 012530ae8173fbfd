"""A request for an answer, whichever interface it came by, and what becomes of its parts.

Sections: held, request, thinking, blocks, tool choice.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from rootlace.runtime.server.http.body import Body, ignored
from rootlace.runtime.server.http.constraints import Asked, OfTool, json_source
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.tokenizer import Joined, Piece
from rootlace.runtime.server.tool_parsers.base import (
    HERMES,
    Answer,
    CallArguments,
    CallBegin,
    Content,
    Delta,
    Format,
    Reasoning,
)
from rootlace.wire import tool_calls
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint, Output, Part, SamplingParams, Text
from rootlace.wire.sampling import PLAIN, Cache, Handling

# Held ---------------------------------------------------------------------------------------------
#
# What later requests of a conversation may go on from: its text so far, and the tokens of that.


class Written(msgspec.Struct, frozen=True):
    """A prompt: the text of its template and contents, and the tokens of that."""

    text: Joined
    ids: Sequence[int]


@dataclass(eq=False)
class CachedPrefix:
    """A prompt and its answer as the branch had them.

    `ids` are their tokens, the answer's as the model gave them. A prompt goes on from here if it
    begins with the same text: the first `prompt` characters as the same runs of template and
    content, and the answer up to the character `end`, whatever the template takes it for.
    """

    ids: array[int]
    prompt: int
    end: int
    digest: bytes

    @classmethod
    def behind(
        cls, written: Written, output: Output, params: SamplingParams
    ) -> CachedPrefix | None:
        """None where the answer's text is not just that of its tokens: a stop string cut it."""
        if isinstance(output.matched, str):
            return None
        ended = output.matched is not None and not params.no_stop_trim
        ids = output.token_ids[:-1] if ended else output.token_ids
        prompt = len(written.text.text)
        return cls(
            array("i", [*written.ids, *ids]),
            prompt,
            prompt + len(output.text),
            _digest(written.text, prompt, written.text.text + output.text),
        )

    @property
    def size(self) -> int:
        """In bytes."""
        return self.ids.itemsize * len(self.ids)

    def rest(self, text: Joined) -> tuple[Piece, ...] | None:
        """What of a prompt comes behind this; None if it does not begin so."""
        if len(text.text) <= self.end or (
            _digest(text, self.prompt, text.text[: self.end]) != self.digest
        ):
            return None
        return text.cut(self.end)


def pieces_of(parts: Iterable[Part]) -> list[Piece]:
    """The texts among the parts."""
    return [Piece(part.text, part.special) for part in parts if isinstance(part, Text)]


def _digest(text: Joined, prompt: int, characters: str) -> bytes:
    """Of `characters`, and of which runs the first `prompt` of them are."""
    inside = [border for border in text.borders if border < prompt]
    runs = (inside, text.flags[: len(inside) + 1])
    digest = hashlib.blake2b(ascii(runs).encode(), digest_size=16)
    digest.update(characters.encode())
    return digest.digest()


# Request ------------------------------------------------------------------------------------------
#
# A request for an answer, whichever interface it came by.


class Tool(msgspec.Struct, frozen=True):
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


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether the model may, must or must not call a tool; `name`: it must call this one.

    `parallel`: it may make several calls at once. None leaves it to the model where it may call,
    and means one call where it must. `allowed`: it may call no others than these; None: any.
    """

    kind: Literal["auto", "required", "none"] = "auto"
    name: str | None = None
    parallel: bool | None = None
    allowed: tuple[str, ...] | None = None


class Pinned(msgspec.Struct, frozen=True):
    """A conversation is to be pinned up to where `messages` begin to differ from it."""

    messages: list[dict[str, Any]]
    cache: Cache


class Pin(msgspec.Struct, frozen=True):
    """The first `end` characters of a prompt are pinned, in the way that `cache` says."""

    end: int
    cache: Cache


class ChatRequest(msgspec.Struct, frozen=True):
    """A conversation and how to go on with it.

    `messages` are what chat templates take. `fields` are those of `SamplingParams` that were given,
    `names` what the client calls them, and `defaults` what the interface takes for those that
    neither the request nor the model names. `options` says how a constraint is enforced. With
    `keep` the branch stays for later requests, and `behind` is one that stayed, from which this one
    goes on if its conversation begins so. `prediction`: what the answer may be like.
    """

    messages: list[dict[str, Any]]
    fields: dict[str, Any]
    names: Mapping[str, str] = msgspec.field(default_factory=dict)
    defaults: Mapping[str, Any] = msgspec.field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    constraint: Asked | None = None
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    template: Mapping[str, Any] = msgspec.field(default_factory=dict)
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
    behind: CachedPrefix | None = None
    prediction: str = ""
    param: str = "messages"
    """The field that holds the conversation, for errors."""

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think; None leaves it to the template."""
        given = self.template.get("enable_thinking", self.template.get("thinking"))
        return given if isinstance(given, bool) else None


# Thinking -----------------------------------------------------------------------------------------
#
# Whether, and how hard, a model that can is to think: what chat templates are told of it.


Budget = Annotated[int, msgspec.Meta(ge=0)]
"""So many tokens of thoughts at most: behind them they are ended."""


class Thinking(Body):
    """As Anthropic's clients say it."""

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
    budget_tokens: Budget | None = None
    display: Annotated[str | None, ignored("thoughts are shown as they are")] = None


def thinking_arguments(
    thinking: bool | Thinking | None = None, effort: str | None = None
) -> dict[str, Any]:
    """Arguments of chat templates, by the names that the families' templates have for them."""
    arguments: dict[str, Any] = {}
    if thinking is not None:
        enabled = thinking.type != "disabled" if isinstance(thinking, Thinking) else thinking
        arguments = {"thinking": enabled, "enable_thinking": enabled}
    if effort == "none":
        arguments = {"thinking": False, "enable_thinking": False}
    elif effort is not None:
        arguments["reasoning_effort"] = effort
    return arguments


def budget_of(given: int | None, thinking: bool | Thinking | None = None) -> int | None:
    """The bound of a body that says it by itself, or in Anthropic's way."""
    if given is None and isinstance(thinking, Thinking) and thinking.type != "disabled":
        return thinking.budget_tokens
    return given


# Blocks -------------------------------------------------------------------------------------------
#
# An answer as a sequence of blocks that begin, grow and end: how Anthropic and OpenAI's responses
# stream it.


Kind = Literal["text", "thoughts", "call"]


@dataclass
class Block:
    """One of an answer's blocks. `name` is that of the tool that is called. `logprobs`, of its
    tokens as they are shown, are set by who shows them."""

    index: int
    kind: Kind
    name: str = ""
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)


class Begin(msgspec.Struct, frozen=True):
    block: Block


class More(msgspec.Struct, frozen=True):
    block: Block
    text: str
    logprobs: list[Any] = []


class End(msgspec.Struct, frozen=True):
    block: Block


BlockEvent = Begin | More | End


class Blocks:
    """Turns deltas into blocks. At most one is open, and none is empty but a call's."""

    def __init__(self) -> None:
        self._count = 0
        self._open: Block | None = None
        self._spaces: list[str] = []  # they begin no block

    def take(self, deltas: Iterable[Delta]) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        for delta in deltas:
            match delta:
                case Content():
                    events += self._text("text", delta.text)
                case Reasoning():
                    events += self._text("thoughts", delta.text)
                case CallBegin():
                    events += self._begin("call", delta.name)
                case CallArguments():
                    events += self._more(delta.text)
        return events

    def finish(self) -> list[BlockEvent]:
        """The end of the last block."""
        last, self._open = self._open, None
        return [] if last is None else [End(last)]

    def _text(self, kind: Kind, text: str) -> list[BlockEvent]:
        if self._open is not None and self._open.kind == kind:
            return self._more(text)
        self._spaces.append(text)
        if not text.strip():
            return []
        text = "".join(self._spaces)
        return [*self._begin(kind), *self._more(text)]

    def _begin(self, kind: Kind, name: str = "") -> list[BlockEvent]:
        ended = self.finish()
        self._open = Block(self._count, kind, name)
        self._count += 1
        self._spaces = []
        return [*ended, Begin(self._open)]

    def _more(self, text: str) -> list[BlockEvent]:
        assert self._open is not None
        self._open.text += text
        return [More(self._open, text)]


def blocks_of(answer: Answer) -> list[Block]:
    """Those of a whole answer: the same as were streamed."""
    blocks = Blocks()
    events = [*blocks.take(answer.deltas), *blocks.finish()]
    return [event.block for event in events if isinstance(event, End)]


# Tool choice --------------------------------------------------------------------------------------


_NAME = "a_name"


def forced_call(
    choice: ToolChoice, tools: Sequence[Tool], form: Format, options: Mapping[str, Any]
) -> tuple[tuple[Text, ...], Asked]:
    """How the model is made to call: what is written for it, and the constraint of the rest.

    Raises InvalidParameter for an unknown tool.
    """
    if choice.name is not None:
        tools = [tool for tool in tools if tool.name == choice.name]
        if not tools:
            raise InvalidParameter("tool_choice", f"tool_choice: there is no tool {choice.name!r}")
    if choice.parallel or not form.writes_json or all(tool.strict is False for tool in tools):
        return (), _calls(tools, form, options, one=not choice.parallel)
    if form.trigger == HERMES.begin and form.calls.header is None and not form.calls.array:
        # One call's JSON, where the model has learnt to write it, and reads it in a later turn.
        begin = Text(form.begin(_NAME).partition("{")[0], special=True)
        one = len(tools) == 1
        places = [f"{'' if one else f'/anyOf/{i}'}/properties/arguments" for i in range(len(tools))]
        return (begin,), _asked("json_schema", _one_of(tools), options, tools, places)
    if len(tools) == 1:
        asked = _asked("json_schema", _parameters(tools[0]), options, tools)
        # The name is content.
        before, _, behind = form.begin(_NAME).partition(_NAME)
        spelt = form.begin(tools[0].name).removeprefix(before).removesuffix(behind)
        return (Text(before, special=True), Text(spelt), Text(behind, special=True)), asked
    return (), _calls(tools, form, options, one=True)


def calls_among_text(tools: Sequence[Tool], form: Format, options: Mapping[str, Any]) -> Asked:
    """Free text in which every call is of an offered tool, its arguments held as they are by
    `tool_calls.arguments` (where the model may call)."""
    # An object without a tag may be text: it is held only where arguments have to be.
    calls = _begun(tools, form) if not form.calls.bare or any(tool.strict for tool in tools) else []
    begun = [(form.begin_alone(tool.name), _written(tool, form)) for tool in tools]
    also = [(found, content) for found, content in begun if found is not None]
    alone = (also[0][0][0], [(found[1], content) for found, content in also]) if also else None
    tag = tool_calls.among_text(calls, form.trigger, form.end, form.around, alone)
    # Who did not ask for it is served where it cannot be had.
    optional = not any(tool.strict for tool in tools)
    return _asked("structural_tag", tag, {**options, "optional": optional}, tools)


def calls_or_format(asked: Asked, choice: ToolChoice, tools: Sequence[Tool], form: Format) -> Asked:
    """Calls, or a text in the format that is asked for."""
    schema = msgspec.json.decode(asked.constraint.source)
    if form.calls.bare:  # calls are JSON, too
        contents = [*map(_call_alone, tools), tool_calls.as_content(schema)]
        places = ["/properties/parameters"] * len(tools)
        return _with(asked, tools, tool_calls.either_json(contents), places)
    tag = tool_calls.or_json(
        _begun(tools, form),
        form.end,
        schema,
        choice.parallel is False,
        form.around,
        form.answer_prefix(""),
    )
    return _with(asked, tools, tag)


def _with(
    asked: Asked, tools: Sequence[Tool], tag: dict[str, Any], places: Sequence[str] = ()
) -> Asked:
    """The same field's, enforced in the same way."""
    constraint = msgspec.structs.replace(
        asked.constraint, kind="structural_tag", source=json_source(tag)
    )
    return replace(
        asked, constraint=constraint, given=asked.constraint, tools=_named(tools, places)
    )


def _begun(tools: Sequence[Tool], form: Format) -> list[tuple[str, tool_calls.Content]]:
    """How calls begin, and the arguments that follow."""
    return [(form.begin(tool.name), _written(tool, form)) for tool in tools]


def _written(tool: Tool, form: Format) -> tool_calls.Content:
    """The arguments as the format writes them."""
    held = _arguments(tool, tool.strict)
    with _naming(tool):
        return form.content(held)


def _arguments(tool: Tool, strict: bool | None) -> tool_calls.Content:
    with _naming(tool):
        return tool_calls.arguments(tool.parameters, strict)


@contextmanager
def _naming(tool: Tool) -> Iterator[None]:
    """Names the tool in an InvalidConstraint."""
    try:
        yield
    except InvalidConstraint as error:
        raise InvalidConstraint(f"tool {tool.name!r}: {error}", "tools") from None


def _calls(
    tools: Sequence[Tool], form: Format, options: Mapping[str, Any], one: bool = False
) -> Asked:
    """Calls and nothing else, at least one; `one`: no more than that."""
    held = tools
    if all(tool.strict is False for tool in tools):
        # Clients that say so of every tool (LlamaIndex) mean that no schema is to be refused.
        held = [replace(tool, strict=None) for tool in tools]
    tag = tool_calls.nothing_else(_begun(held, form), form.end, one, form.around)
    return _asked("structural_tag", tag, options, tools)


def _asked(
    kind: Any,
    source: dict[str, Any],
    options: Mapping[str, Any],
    tools: Sequence[Tool],
    places: Sequence[str] = (),
) -> Asked:
    constraint = Constraint(kind, json_source(source), **options)
    return Asked(constraint, "tools", tools=_named(tools, places))


def _named(tools: Sequence[Tool], places: Sequence[str]) -> tuple[OfTool, ...]:
    """The tools as errors and warnings name them, and at which places of a schema they are."""
    each = zip(tools, places or [""] * len(tools), strict=True)
    return tuple(OfTool(tool.name, tool.parameters, tool.strict, place) for tool, place in each)


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a forced call's arguments, which may be checked: it need not be lenient."""
    return dict(_arguments(tool, tool.strict is not False)["json_schema"])


def _one_of(tools: Sequence[Tool]) -> dict[str, Any]:
    """The schema of a call."""
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool.name, _parameters(tool), definitions) for tool in tools]
    return _any_of(calls, definitions)


def _call_alone(tool: Tool) -> tool_calls.Content:
    """Its call as a format is asked for beside it."""
    definitions: dict[str, Any] = {}
    held = _arguments(tool, tool.strict)
    call = _call_schema(tool.name, held["json_schema"], definitions, "parameters")
    return {**held, "json_schema": _any_of([call], definitions)}


def _any_of(schemas: list[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {**schema, "$defs": definitions} if definitions else schema


def _call_schema(
    name: str, parameters: dict[str, Any], definitions: dict[str, Any], key: str = "arguments"
) -> dict[str, Any]:
    """The parameters' `$defs` move to `definitions`, up to where their references look."""
    parameters, whose = dict(parameters), f"tool {name!r}"
    own = parameters.pop("$defs", {})
    if not isinstance(own, dict):
        raise InvalidParameter("tools", f"the $defs of {whose} must be an object")
    for defined, definition in own.items():
        if definitions.setdefault(defined, definition) != definition:
            raise InvalidParameter("tools", f"{defined!r} is defined differently by {whose}")
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: parameters},
        "required": ["name", key],
        "additionalProperties": False,
    }
