"""Chat request of any interface, and the treatment of its parts.

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
from rootlace.runtime.server.http.constraints import OfTool, Rule, json_source
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
# State from which later requests of a conversation may go on: its text so far, and its tokens.


class Written(msgspec.Struct, frozen=True):
    """Prompt as text, template and contents, and as tokens."""

    text: Joined
    ids: Sequence[int]


@dataclass(eq=False)
class CachedPrefix:
    """Prompt and answer of a branch, as a prefix of later prompts.

    `ids` are their tokens, the answer's as the model gave them. A prompt goes on from here if it
    begins with the same text. The first `prompt` characters must be the same runs of template and
    content. The answer's text, up to the character `end`, may be template or content in the prompt.
    """

    ids: array[int]
    prompt: int
    end: int
    digest: bytes

    @classmethod
    def behind(
        cls, written: Written, output: Output, params: SamplingParams
    ) -> CachedPrefix | None:
        """Make the prefix; None if a stop string cut the text, which lacks tokens then."""
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
        """Size in bytes."""
        return self.ids.itemsize * len(self.ids)

    def rest(self, text: Joined) -> tuple[Piece, ...] | None:
        """Return the part of a prompt behind this prefix; None if the prompt begins otherwise."""
        if len(text.text) <= self.end or (
            _digest(text, self.prompt, text.text[: self.end]) != self.digest
        ):
            return None
        return text.cut(self.end)


def pieces_of(parts: Iterable[Part]) -> list[Piece]:
    """Return the texts among the parts."""
    return [Piece(part.text, part.special) for part in parts if isinstance(part, Text)]


def _digest(text: Joined, prompt: int, characters: str) -> bytes:
    """Hash `characters`, and the runs of the first `prompt` of them."""
    inside = [border for border in text.borders if border < prompt]
    runs = (inside, text.flags[: len(inside) + 1])
    digest = hashlib.blake2b(ascii(runs).encode(), digest_size=16)
    digest.update(characters.encode())
    return digest.digest()


# Request ------------------------------------------------------------------------------------------
#
# Chat request of any interface.


class Tool(msgspec.Struct, frozen=True):
    """Function that the model may call; without `parameters` it takes no arguments. `strict`:
    whether arguments must fit the parameters (True), fit as far as enforceable (None), or are any
    object (False)."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it, without missing fields."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        # Templates that write parameters cannot cope with none.
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class ToolChoice(msgspec.Struct, frozen=True):
    """Choice of whether the model may, must or must not call a tool; `name`: the one it must call.

    `parallel`: several calls at once are allowed. None leaves that to the model where it may call,
    and means one call where it must. `allowed`: the only tools it may call; None: any.
    """

    kind: Literal["auto", "required", "none"] = "auto"
    name: str | None = None
    parallel: bool | None = None
    allowed: tuple[str, ...] | None = None


class Pinned(msgspec.Struct, frozen=True):
    """Request to pin a conversation up to where `messages` begin to differ from it."""

    messages: list[dict[str, Any]]
    cache: Cache


class Pin(msgspec.Struct, frozen=True):
    """Pin of a prompt's first `end` characters, with the lifetime in `cache`."""

    end: int
    cache: Cache


class ChatRequest(msgspec.Struct, frozen=True):
    """Conversation, and how to go on with it.

    `messages` have the form of chat templates. `fields` are the given fields of `SamplingParams`,
    and `names` the client's names for them. `defaults` are the interface's values for fields that
    neither request nor model sets. `options` says how a constraint is enforced. With `keep` the
    branch stays open for later requests; `behind` is an earlier kept branch, from which this
    request goes on if its conversation begins so. `prediction`: text that the answer may resemble.
    """

    messages: list[dict[str, Any]]
    fields: dict[str, Any]
    names: Mapping[str, str] = msgspec.field(default_factory=dict)
    defaults: Mapping[str, Any] = msgspec.field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    constraint: Rule | None = None
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    template: Mapping[str, Any] = msgspec.field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final: bool = False
    reasoning: bool = True
    """True if thoughts are separated from content."""
    thinking_budget: int | None = None
    """Most tokens of thoughts."""
    namespace: str = ""
    cache_report: bool = False
    handling: Handling = PLAIN
    pinned: tuple[Pinned, ...] = ()
    adapter: str = ""
    keep: bool = False
    behind: CachedPrefix | None = None
    prediction: str = ""
    param: str = "messages"
    """Field of the body that holds the conversation, for errors."""

    @property
    def thinks(self) -> bool | None:
        """Return whether the model is to think; None leaves that to the template."""
        enabled = self.template.get("enable_thinking", self.template.get("thinking"))
        return enabled if isinstance(enabled, bool) else None


# Thinking -----------------------------------------------------------------------------------------
#
# Arguments of chat templates that say whether and how hard a model is to think.


Budget = Annotated[int, msgspec.Meta(ge=0)]
"""Most tokens of thoughts, after which they are ended."""


class Thinking(Body):
    """Anthropic's field for thinking."""

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
    budget_tokens: Budget | None = None
    display: Annotated[str | None, ignored("thoughts are shown as they are")] = None


def thinking_arguments(
    thinking: bool | Thinking | None = None, effort: str | None = None
) -> dict[str, Any]:
    """Return arguments of chat templates under all names that families' templates use."""
    arguments: dict[str, Any] = {}
    if thinking is not None:
        enabled = thinking.type != "disabled" if isinstance(thinking, Thinking) else thinking
        arguments = {"thinking": enabled, "enable_thinking": enabled}
    if effort == "none":
        arguments = {"thinking": False, "enable_thinking": False}
    elif effort is not None:
        arguments["reasoning_effort"] = effort
    return arguments


def budget_of(budget: int | None, thinking: bool | Thinking | None = None) -> int | None:
    """Return the token bound of thoughts: the body's own field, else Anthropic's."""
    if budget is None and isinstance(thinking, Thinking) and thinking.type != "disabled":
        return thinking.budget_tokens
    return budget


# Blocks -------------------------------------------------------------------------------------------
#
# Answers as sequences of blocks that begin, grow and end, as Anthropic's API and OpenAI's responses
# stream them.


Kind = Literal["text", "thoughts", "call"]


@dataclass
class Block:
    """Block of an answer. `name` is the called tool's. `logprobs` of the block's tokens are set by
    the endpoint that shows them."""

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
    """Converter of deltas into blocks. At most one block is open, and only a call may be empty."""

    def __init__(self) -> None:
        self._count = 0
        self._open: Block | None = None
        self._spaces: list[str] = []  # white space begins no block

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
        """Return the end of the open block, if any."""
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
    """Return the blocks of a whole answer, the same as its stream would have."""
    blocks = Blocks()
    events = [*blocks.take(answer.deltas), *blocks.finish()]
    return [event.block for event in events if isinstance(event, End)]


# Tool choice --------------------------------------------------------------------------------------


_NAME = "a_name"


def forced_call(
    choice: ToolChoice, tools: Sequence[Tool], form: Format, options: Mapping[str, Any]
) -> tuple[tuple[Text, ...], Rule]:
    """Return the text that begins a forced call, and the constraint of the rest.

    Raises InvalidParameter for an unknown tool.
    """
    if choice.name is not None:
        tools = [tool for tool in tools if tool.name == choice.name]
        if not tools:
            raise InvalidParameter("tool_choice", f"tool_choice: there is no tool {choice.name!r}")
    if choice.parallel or not form.writes_json or all(tool.strict is False for tool in tools):
        return (), _calls(tools, form, options, one=not choice.parallel)
    if form.trigger == HERMES.begin and form.calls.header is None and not form.calls.array:
        # One call's JSON, in the form that the model has learnt to write, and reads in a later
        # turn.
        begin = Text(form.begin(_NAME).partition("{")[0], special=True)
        one = len(tools) == 1
        places = [f"{'' if one else f'/anyOf/{i}'}/properties/arguments" for i in range(len(tools))]
        return (begin,), _tools_constraint("json_schema", _one_of(tools), options, tools, places)
    if len(tools) == 1:
        rule = _tools_constraint("json_schema", _parameters(tools[0]), options, tools)
        # The name is content.
        before, _, behind = form.begin(_NAME).partition(_NAME)
        spelt = form.begin(tools[0].name).removeprefix(before).removesuffix(behind)
        return (Text(before, special=True), Text(spelt), Text(behind, special=True)), rule
    return (), _calls(tools, form, options, one=True)


def calls_among_text(tools: Sequence[Tool], form: Format, options: Mapping[str, Any]) -> Rule:
    """Return the constraint of free text in which every call is one of an offered tool.
    `tool_calls.arguments` constrains its arguments."""
    # An object without a tag may be text: it is constrained only if arguments must fit.
    calls = _begun(tools, form) if not form.calls.bare or any(tool.strict for tool in tools) else []
    begun = [(form.begin_alone(tool.name), _written(tool, form)) for tool in tools]
    also = [(found, content) for found, content in begun if found is not None]
    alone = (also[0][0][0], [(found[1], content) for found, content in also]) if also else None
    tag = tool_calls.among_text(calls, form.trigger, form.end, form.around, alone)
    # Clients that did not ask for it get an answer even where it cannot be enforced.
    optional = not any(tool.strict for tool in tools)
    return _tools_constraint("structural_tag", tag, {**options, "optional": optional}, tools)


def calls_or_format(rule: Rule, choice: ToolChoice, tools: Sequence[Tool], form: Format) -> Rule:
    """Return the constraint of calls, or of a text in the requested format."""
    schema = msgspec.json.decode(rule.constraint.source)
    if form.calls.bare:  # calls are JSON, too
        contents = [*map(_call_alone, tools), tool_calls.as_content(schema)]
        places = ["/properties/parameters"] * len(tools)
        return _with(rule, tools, tool_calls.either_json(contents), places)
    tag = tool_calls.or_json(
        _begun(tools, form),
        form.end,
        schema,
        choice.parallel is False,
        form.around,
        form.answer_prefix(""),
    )
    return _with(rule, tools, tag)


def _with(
    rule: Rule, tools: Sequence[Tool], tag: dict[str, Any], places: Sequence[str] = ()
) -> Rule:
    """Return `rule` with the constraint `tag`, for the same field and with the same options."""
    constraint = msgspec.structs.replace(
        rule.constraint, kind="structural_tag", source=json_source(tag)
    )
    return replace(
        rule, constraint=constraint, original=rule.constraint, tools=_named(tools, places)
    )


def _begun(tools: Sequence[Tool], form: Format) -> list[tuple[str, tool_calls.Content]]:
    """Return each call's beginning, and the arguments that follow."""
    return [(form.begin(tool.name), _written(tool, form)) for tool in tools]


def _written(tool: Tool, form: Format) -> tool_calls.Content:
    """Return the arguments' content in the format's notation."""
    held = _arguments(tool, tool.strict)
    with _naming(tool):
        return form.content(held)


def _arguments(tool: Tool, strict: bool | None) -> tool_calls.Content:
    with _naming(tool):
        return tool_calls.arguments(tool.parameters, strict)


@contextmanager
def _naming(tool: Tool) -> Iterator[None]:
    """Name the tool in an InvalidConstraint of the block."""
    try:
        yield
    except InvalidConstraint as error:
        raise InvalidConstraint(f"tool {tool.name!r}: {error}", "tools") from None


def _calls(
    tools: Sequence[Tool], form: Format, options: Mapping[str, Any], one: bool = False
) -> Rule:
    """Return the constraint of calls and no text, at least one; `one`: exactly one."""
    held = tools
    if all(tool.strict is False for tool in tools):
        # Clients that set it for every tool (LlamaIndex) want no schema to be refused.
        held = [replace(tool, strict=None) for tool in tools]
    tag = tool_calls.nothing_else(_begun(held, form), form.end, one, form.around)
    return _tools_constraint("structural_tag", tag, options, tools)


def _tools_constraint(
    kind: Any,
    source: dict[str, Any],
    options: Mapping[str, Any],
    tools: Sequence[Tool],
    places: Sequence[str] = (),
) -> Rule:
    constraint = Constraint(kind, json_source(source), **options)
    return Rule(constraint, "tools", tools=_named(tools, places))


def _named(tools: Sequence[Tool], places: Sequence[str]) -> tuple[OfTool, ...]:
    """Return the tools for errors and warnings, with their places in a schema."""
    each = zip(tools, places or [""] * len(tools), strict=True)
    return tuple(OfTool(tool.name, tool.parameters, tool.strict, place) for tool, place in each)


def _parameters(tool: Tool) -> dict[str, Any]:
    """Return the schema of a forced call's arguments, not lenient, since it may be checked."""
    return dict(_arguments(tool, tool.strict is not False)["json_schema"])


def _one_of(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the schema of a call of one of the tools."""
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool.name, _parameters(tool), definitions) for tool in tools]
    return _any_of(calls, definitions)


def _call_alone(tool: Tool) -> tool_calls.Content:
    """Return a call's content for a choice between calls and a format."""
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
    """Make a call's schema; move the parameters' `$defs` to `definitions`, the references'
    target."""
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
