"""Formats whose calls have each argument in tags of its own.

    Qwen3-Coder                          GLM 4.5

    <tool_call>                          <tool_call>NAME
    <function=NAME>                      <arg_key>KEY</arg_key>
    <parameter=KEY>                      <arg_value>VALUE</arg_value>
    VALUE                                </tool_call>
    </parameter>
    </function>
    </tool_call>

A value of a string parameter is its text, any other value is JSON. Where line breaks stand is seen
from the chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from rootlace.runtime.server.tool_parsers.base import (
    HERMES,
    CallArguments,
    CallBegin,
    Calls,
    JsonEnd,
    Schemas,
    possible_begin,
)
from rootlace.runtime.server.tool_parsers.tagged import (
    HEADER_CHARACTERS,
    State,
    Tagged,
    TaggedParser,
)
from rootlace.types.constraint_kinds import IN_PLACE
from rootlace.wire import tool_calls
from rootlace.wire.errors import InvalidConstraint

# Format -------------------------------------------------------------------------------------------


class Argument(msgspec.Struct, frozen=True):
    r"""How an argument is written, here with Qwen3-Coder's texts:

    <parameter=  KEY  >\n      VALUE  \n   </parameter>  \n
    opening           between         gap  close         after
    """

    opening: str
    between: str
    gap: str
    close: str
    after: str


PROBE: dict[str, Any] = {"probe_the_text": "probe the value", "probe_the_number": 12}
"""Arguments of a call by which a template shows how it writes arguments."""
_PROBE = """
    (?P<begin> {tag} (?: (?! {tag} ) . )*? ) {name} (?P<between> [^<]* )
    (?P<opening> < [^<]*? ) probe_the_text (?P<to_value> .*? ) probe\\ the\\ value
    (?P<gap> \\s* ) (?P<close> </\\w+> ) (?P<after> \\s* )
    (?P=opening) probe_the_number (?P=to_value) 12 (?P=gap) (?P=close) (?P=after)
    (?P<end> (?: </\\w+> \\s* )*? </tool_call> )
"""
_NAME_CHARACTERS = 128


@dataclass(frozen=True)
class TaggedArguments(Tagged):
    """A format of tagged calls, whose arguments are written as `argument` says."""

    argument: Argument = field(kw_only=True)

    @classmethod
    def seen(
        cls, text: str, name: str, think: tuple[str, str] | None = None
    ) -> TaggedArguments | None:
        """The format of a text with a call of `name` that has the arguments `PROBE`; None if their
        form is another."""
        probe = _PROBE.format(tag=HERMES.begin, name=name)
        found = re.search(probe, text, re.DOTALL | re.VERBOSE)
        if found is None:
            return None
        opening, between, end = found["begin"], found["between"], found["end"]
        ends = tuple(re.findall(r"</\w+>", end))
        before = re.escape(opening.removeprefix(HERMES.begin).strip())
        follows = f"{re.escape(found['opening'])}|{re.escape(ends[0])}"
        header = (
            rf"\s{{0,8}}{before}(?P<name>[^\s<>]{{1,{_NAME_CHARACTERS}}})"
            rf"{re.escape(between.strip())}\s{{0,8}}(?={follows})"
        )
        calls = Calls(
            begin=HERMES.begin,
            opening=opening,
            between=between,
            end=end,
            ends=ends,
            header=re.compile(header),
        )
        parts = (found[part] for part in ("opening", "to_value", "gap", "close", "after"))
        return cls(calls, think, argument=Argument(*parts))

    @property
    def writes_json(self) -> bool:
        return False

    def parser(self, prompt_end: str, tools: Schemas, reasoning: bool) -> TaggedArgumentsParser:
        return TaggedArgumentsParser(self.argument, *self._given(prompt_end, tools, reasoning))

    def content(self, held: tool_calls.Content) -> tool_calls.Content:
        """The arguments in the order of the schema's properties; any, where it names none."""
        schema, exact = held["json_schema"], not held.get("lenient", False)
        properties = _properties(schema)
        if exact and (keyword := min(schema.keys() & (_OF_OBJECTS | IN_PLACE), default="")):
            raise _unheld(keyword, "arguments in tags of their own cannot be held to it")
        for keyword, kind in (("properties", dict), ("required", list)):
            if exact and not isinstance(schema.get(keyword, kind()), kind):
                raise _unheld(keyword, "it is malformed")
        if not properties:
            others = schema.get("additionalProperties", True)
            if exact and others is not False and _says_something(others):
                raise _unheld("additionalProperties", "arguments without names are any")
            return tool_calls.const("") if others is False else self._any_arguments()
        required = schema.get("required")
        elements = []
        for key, value in properties.items():
            if any(part in key for part in ("<", ">", "\n")):
                if exact:
                    raise _unheld("properties", f"the name {key!r} cannot be written in a tag")
                continue
            one = self._argument(key, value, schema, exact)
            needed = isinstance(required, list) and key in required
            elements.append(one if needed else tool_calls.either(one, tool_calls.const("")))
        return tool_calls.sequence(*elements, tool_calls.const(""))

    def _argument(
        self, key: str, value: Any, root: Mapping[str, Any], exact: bool
    ) -> dict[str, Any]:
        form, text = self.argument, _text_of(value, root)
        end, lenient = form.gap + form.close, {} if exact else {"lenient": True}
        content: dict[str, Any]
        if text is None and _says_something(value):
            content = {**tool_calls.as_content(_alone(value, root)), **lenient}
        elif text is None or {} in text.strings:
            content, end = {"type": "any_text"}, form.close
        else:
            ways = [tool_calls.const(f"null{end}")] if text.nullable else []
            for one in text.strings:
                string = {"type": "string", "json_schema": one, **lenient}
                ways.append(_tag("", string, end))
            content, end = tool_calls.either(*ways), ""
        begin = f"{form.opening}{key}{form.between}"
        return tool_calls.sequence(_tag(begin, content, end), tool_calls.const(form.after))

    def _any_arguments(self) -> dict[str, Any]:
        form, text = self.argument, {"type": "any_text"}
        inner = tool_calls.sequence(_tag("", text, form.between), _tag("", text, form.close))
        tags = [_tag(form.opening, inner, form.after)]
        return {"type": "tags_with_separator", "tags": tags, "separator": ""}


def _unheld(place: str, why: str) -> InvalidConstraint:
    return InvalidConstraint(f"json_schema: #/{place}: {why}")


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


# Values -------------------------------------------------------------------------------------------
#
# What the schema of a parameter says of the text of its value.


_NOTES = frozenset(
    ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"]
)
"""Keywords that say nothing of a value."""
_OF_TEXT = IN_PLACE | {"pattern", "minLength", "maxLength", "format", "enum", "const"}
_OF_OBJECTS = frozenset(
    [
        *("dependentRequired", "dependentSchemas", "dependencies", "patternProperties", "enum"),
        *("propertyNames", "minProperties", "maxProperties", "unevaluatedProperties", "const"),
    ]
)
"""Keywords of arguments beside `properties`, `required` and `additionalProperties`."""
_DEFINITIONS = ("$defs", "definitions")
_MAX_DEPTH = 16


class _Text(NamedTuple):
    """What a schema says whose values are strings, or null."""

    strings: tuple[dict[str, Any], ...]
    """What is said of strings, one of which they fit; an empty one says nothing."""
    nullable: bool
    """Whether the text "null" is no string, but null."""


def _text_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> _Text | None:
    """None where values may be others than strings and null. `root` has the definitions."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    says = schema.keys() - _NOTES
    if says == {"$ref"}:
        return _text_of(_referred(schema["$ref"], root), root, depth + 1)
    if says in ({"anyOf"}, {"allOf"}):
        (given,) = (schema[key] for key in says)
        if not isinstance(given, list) or ("allOf" in says and len(given) != 1):
            return None
        each = [_text_of(one, root, depth + 1) for one in given]
        found = [one for one in each if one is not None]
        if len(found) < len(each):
            return None
        each_string = chain.from_iterable(one.strings for one in found)
        return _Text(tuple(each_string), any(one.nullable for one in found))
    types = schema.get("type", [])
    types = {str(one) for one in (types if isinstance(types, list) else [types])}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        kinds = {"null" if one is None else "string" for one in values}
        if not all(one is None or isinstance(one, str) for one in values):
            return None
        types = kinds & types if types else kinds
    if not types or not types <= {"string", "null"}:
        return None
    string = {key: schema[key] for key in sorted(says & _OF_TEXT)}
    return _Text((string,) if "string" in types else (), "null" in types)


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """The definition that a reference names; None where there is none."""
    kind, _, name = str(reference).removeprefix("#/").partition("/")
    found = root.get(kind)
    return found.get(name) if kind in _DEFINITIONS and isinstance(found, Mapping) else None


def _says_something(schema: Any) -> bool:
    """Whether a value may not be any."""
    return schema is False or (isinstance(schema, Mapping) and not schema.keys() <= _NOTES)


def _alone(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema of a parameter with the definitions that its references name."""
    if not isinstance(schema, Mapping):
        return schema
    return {**{key: root[key] for key in _DEFINITIONS if key in root}, **schema}


def _properties(root: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of the parameters, also of those that are only required."""
    given, required = root.get("properties"), root.get("required")
    found = dict(given) if isinstance(given, Mapping) else {}
    for key in required if isinstance(required, list) else ():
        found.setdefault(str(key), root.get("additionalProperties", True))
    return found


# Parser -------------------------------------------------------------------------------------------


_OTHERS = {"True": "true", "False": "false", "None": "null"}
"""JSON of what templates write as Python does."""
_NO_END = 1 << 30
"""More brackets than a text has: JSON within tags ends at a tag."""


class _Reading(Enum):
    """How the text of a value is read."""

    TEXT = auto()  # a string as it is written
    NULLABLE = auto()  # null, or such a string
    JSON = auto()  # JSON, or else a string; a tag within JSON's strings does not end it
    ANY = auto()  # the same, up to the first tag


class TaggedArgumentsParser(TaggedParser):
    """Parses an answer; see `base.Parser`. Texts are given as they are written, other values when
    they are whole. Arguments that the answer ends within stay open."""

    def __init__(
        self,
        argument: Argument,
        calls: Calls | None,
        tools: Schemas,
        think: tuple[str, str] | None,
        thinking: bool,
    ) -> None:
        super().__init__(calls, tools, think, thinking)
        self._argument = argument
        self._schemas = tools
        self._key = _key_pattern(argument)
        follows = [argument.opening, *(calls.ends[:1] if calls is not None else ())]
        behind = "|".join(map(re.escape, follows))
        self._goes_on = re.compile(rf"{re.escape(argument.close)}\s*(?:{behind})")
        self._root: Mapping[str, Any] = {}  # the schema of the call's arguments
        self._count = 0  # of the call's arguments so far
        self._reading: _Reading | None = None  # of the value that is being written
        self._ended = False  # no more text comes

    def _begin_call(self, head: str) -> bool:
        if not super()._begin_call(head):
            return False
        if not self._object:
            begun = self._out[-1]
            assert isinstance(begun, CallBegin)
            self._root = self._schemas.get(begun.name) or {}
            self._count, self._reading = 0, None
            self._give("{")
        return True

    def _arguments(self) -> bool:
        if self._object:  # JSON, as of Hermes's calls
            return super()._arguments()
        if self._reading is None:
            return self._next_argument()
        return self._text_value() if self._reading is _Reading.TEXT else self._whole_value()

    def _next_argument(self) -> bool:
        self._buffer = self._buffer.lstrip()
        head, opening = self._buffer[:HEADER_CHARACTERS], self._argument.opening
        found = self._key.match(head)
        if found is not None:
            self._buffer = self._buffer[found.end() :]
            self._begin_value(found["key"])
            return True
        if opening.startswith(head):
            return False
        if head.startswith(opening) and len(head) < HEADER_CHARACTERS:
            return False
        self._give("}")
        self._state = State.TAIL
        return True

    def _begin_value(self, key: str) -> None:
        self._give(f'{", " if self._count else ""}"{_escaped(key)}": ')
        self._count += 1
        self._reading = _reading_of(self._root, key)
        if self._reading is _Reading.JSON and self._ended:
            self._reading = _Reading.ANY
        self._json, self._held = JsonEnd(_NO_END, (self._argument.close,)), []
        if self._reading is _Reading.TEXT:
            self._give('"')

    def _text_value(self) -> bool:
        text, ended = self._up_to_close()
        self._give(_escaped(text))
        if ended:
            self._give('"')
            self._end_value()
        return ended

    def _whole_value(self) -> bool:
        if self._reading is _Reading.JSON:
            end = self._json.feed(self._buffer)
            text, self._buffer = self._buffer[:end], self._buffer[end:]
            ended = self._json.ended
        else:
            text, ended = self._up_to_close()
        self._held.append(text)
        if ended:
            self._take_value()
        return ended

    def _up_to_close(self) -> tuple[str, bool]:
        """The text of a value that has come, without the gap before its closing tag, and whether
        that follows."""
        gap, close = self._argument.gap, self._argument.close
        at = self._buffer.find(close)
        keep = 0 if at >= 0 else possible_begin(self._buffer, (gap + close, close))
        end = at if at >= 0 else len(self._buffer) - keep
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return (text.removesuffix(gap) if at >= 0 else text), at >= 0

    def _take_value(self) -> None:
        """Gives a value of which the whole text has come."""
        text, self._held = "".join(self._held), []
        if self._reading is _Reading.JSON:
            if not _is_json(text):
                # A quote opened no string: then a tag ends the value where the form goes on.
                found = self._goes_on.search(text)
                end = len(text) if found is None else found.start()
                text, self._buffer = text[:end], text[end:] + self._buffer
            text = text.removesuffix(self._argument.gap)
        if self._reading is _Reading.NULLABLE:
            written = "null" if text == "null" else None
        else:
            bare = text.strip()
            written = _OTHERS.get(bare, bare if _is_json(bare) else None)
        self._give(f'"{_escaped(text)}"' if written is None else written)
        self._end_value()

    def _end_value(self) -> None:
        self._buffer = self._buffer.removeprefix(self._argument.close)
        self._reading = None

    def _close(self) -> bool:
        self._ended = True
        if self._state is not State.ARGUMENTS or self._object:
            return super()._close()
        if self._reading is _Reading.JSON and self._goes_on.search("".join(self._held)):
            self._take_value()
            return True
        rest, self._buffer = self._buffer, ""
        if self._reading is None:
            opening = self._argument.opening
            if rest.startswith(opening):
                self._give(f'{", " if self._count else ""}"{_escaped(rest.removeprefix(opening))}')
        elif self._reading is _Reading.TEXT:
            self._give(_escaped(rest))
        else:
            self._give("".join([*self._held, rest]))
        return False

    def _give(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(text))


def _key_pattern(argument: Argument) -> re.Pattern[str]:
    """What stands before a value. Of a line break before it that is none of the value, more has to
    have come."""
    tags = argument.between.rstrip()
    between = r"\s{0,8}".join(map(re.escape, tags.split()))
    line = r"\n?+(?=.)" if argument.between != tags else ""
    return re.compile(f"{re.escape(argument.opening)}(?P<key>.*?){between}{line}", re.DOTALL)


def _reading_of(root: Mapping[str, Any], key: str) -> _Reading:
    schema = _properties(root).get(key, root.get("additionalProperties"))
    text = _text_of(schema, root)
    if text is not None:
        return _Reading.NULLABLE if text.nullable else _Reading.TEXT
    return _Reading.JSON if _says_something(schema) else _Reading.ANY


def _escaped(text: str) -> str:
    """As within a JSON string."""
    return msgspec.json.encode(text).decode()[1:-1]


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
