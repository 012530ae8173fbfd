"""Arguments of a tool call, each in a tag: their constraint and their parser. A string parameter's
value is plain text; any other value is JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from rootlace.types.constraint_kinds import IN_PLACE
from rootlace.wire import tool_calls
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.tool_calls import Argument

# Hold ---------------------------------------------------------------------------------------------


def held(form: Argument, content: tool_calls.Content) -> tool_calls.Content:
    """Return a constraint for arguments in the format `form`, equivalent to the JSON constraint
    `content`: in the order of the schema's properties, or any arguments without properties.

    Raises InvalidConstraint if an exact schema cannot be enforced.
    """
    schema, exact = content["json_schema"], not content.get("lenient", False)
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
        return tool_calls.const("") if others is False else _any_arguments(form)
    required = schema.get("required")
    elements = []
    for key, value in properties.items():
        if any(part in key for part in ("<", ">", "\n")):
            if exact:
                raise _unheld("properties", f"the name {key!r} cannot be written in a tag")
            continue
        one = _argument(form, key, value, schema, exact)
        needed = isinstance(required, list) and key in required
        elements.append(one if needed else tool_calls.either(one, tool_calls.const("")))
    return tool_calls.sequence(*elements, tool_calls.const(""))


def _argument(
    form: Argument, key: str, value: Any, root: Mapping[str, Any], exact: bool
) -> dict[str, Any]:
    text, end = _text_of(value, root), form.gap + form.close
    lenient = {} if exact else {"lenient": True}
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


def _any_arguments(form: Argument) -> dict[str, Any]:
    text = {"type": "any_text"}
    inner = tool_calls.sequence(_tag("", text, form.between), _tag("", text, form.close))
    tags = [_tag(form.opening, inner, form.after)]
    return {"type": "tags_with_separator", "tags": tags, "separator": ""}


def _unheld(place: str, why: str) -> InvalidConstraint:
    return InvalidConstraint(f"json_schema: #/{place}: {why}")


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


# Values -------------------------------------------------------------------------------------------
#
# Constraints of a parameter's schema on the text of its value.


_NOTES = frozenset(
    ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"]
)
"""Keywords without an effect on values."""
_OF_TEXT = IN_PLACE | {"pattern", "minLength", "maxLength", "format", "enum", "const"}
_OF_OBJECTS = frozenset(
    [
        *("dependentRequired", "dependentSchemas", "dependencies", "patternProperties", "enum"),
        *("propertyNames", "minProperties", "maxProperties", "unevaluatedProperties", "const"),
    ]
)
"""Keywords of arguments other than `properties`, `required` and `additionalProperties`."""
_DEFINITIONS = ("$defs", "definitions")
_MAX_DEPTH = 16


class _Text(NamedTuple):
    """Schema whose values are strings, or null."""

    strings: tuple[dict[str, Any], ...]
    """Alternative schemas of strings; an empty one allows any string."""
    nullable: bool
    """Whether the text "null" means null, not a string."""


def _text_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> _Text | None:
    """Return the text schema; None if other values are possible. `root` has the definitions."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    says = schema.keys() - _NOTES
    if says == {"$ref"}:
        return _text_of(_referred(schema["$ref"], root), root, depth + 1)
    if says in ({"anyOf"}, {"oneOf"}, {"allOf"}):
        (given,) = (schema[key] for key in says)
        if not isinstance(given, list) or ("allOf" in says and len(given) != 1):
            return None
        each = [_text_of(one, root, depth + 1) for one in given]
        texts = [one for one in each if one is not None]
        strings = tuple(chain.from_iterable(one.strings for one in texts))
        nulls = sum(one.nullable for one in texts)
        if len(texts) < len(each) or ("oneOf" in says and (len(strings) > 1 or nulls > 1)):
            return None  # `oneOf` excludes values that fit two members
        return _Text(strings, nulls > 0)
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
    """Return the definition that a reference names, or None."""
    kind, _, name = str(reference).removeprefix("#/").partition("/")
    table = root.get(kind)
    return table.get(name) if kind in _DEFINITIONS and isinstance(table, Mapping) else None


def _says_something(schema: Any) -> bool:
    """Return whether the schema constrains values at all."""
    return schema is False or (isinstance(schema, Mapping) and not schema.keys() <= _NOTES)


def _alone(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return a parameter's schema with the definitions that its references name."""
    if not isinstance(schema, Mapping):
        return schema
    return {**{key: root[key] for key in _DEFINITIONS if key in root}, **schema}


def _properties(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters' schemas, also of required ones without a property."""
    given, required = root.get("properties"), root.get("required")
    fields = dict(given) if isinstance(given, Mapping) else {}
    for key in required if isinstance(required, list) else ():
        fields.setdefault(str(key), root.get("additionalProperties", True))
    return fields


# Read ---------------------------------------------------------------------------------------------


_PYTHONS = {"True": "true", "False": "false", "None": "null"}
"""JSON constants of Python's, for templates that print Python values."""
_MOST_BRACKETS = 200
"""Maximum number of brackets of a parsed Python value, for the parser's bounded stack."""
_CDATA = re.compile(r"<!\[CDATA\[(.*)\]\]>", re.DOTALL)
_SPACE = re.compile(r"\s*")
_decoder = json.JSONDecoder()


class Reading(Enum):
    """Parsing mode of a value's text."""

    TEXT = auto()  # a string as it is written
    NULLABLE = auto()  # null, or such a string
    JSON = auto()  # JSON, or else a string; a tag within JSON's strings does not end it
    ANY = auto()  # the same, up to the first tag


def reading_of(root: Mapping[str, Any], key: str) -> Reading:
    """Return the parsing mode of the parameter `key`; `root` is the arguments' schema."""
    schema = _properties(root).get(key, root.get("additionalProperties"))
    text = _text_of(schema, root)
    if text is not None:
        return Reading.NULLABLE if text.nullable else Reading.TEXT
    return Reading.JSON if _says_something(schema) else Reading.ANY


def value_of(text: str, reading: Reading, form: Argument) -> str:
    """Return the value's JSON, from its whole text."""
    if form.cdata and (marked := _CDATA.fullmatch(text)) is not None:
        text, found = marked[1], None
    elif reading is Reading.TEXT:
        found = None
    elif reading is Reading.NULLABLE:
        found = "null" if text == "null" else None
    else:
        bare = text.strip()
        found = bare if is_json(bare) else _PYTHONS.get(bare)
        if found is None and reading is Reading.JSON:
            found = _of_python(bare)
    return f'"{escaped(text)}"' if found is None else found


def _of_python(text: str) -> str | None:
    """Return the JSON of a list or dictionary in Python's syntax, or None."""
    if text[:1] not in ("[", "{") or text.count("[") + text.count("{") > _MOST_BRACKETS:
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def key_pattern(form: Argument) -> re.Pattern[str]:
    """Return the pattern of the text before a value. A line break before the value belongs to the
    pattern only once more text follows."""
    tags = form.between.rstrip()
    between = r"\s{0,8}".join(map(re.escape, tags.split()))
    line = r"\n?+(?=.)" if form.between != tags else ""
    return re.compile(f"{re.escape(form.opening)}(?P<key>.*?){between}{line}", re.DOTALL)


def goes_on_pattern(form: Argument, *ends: str) -> re.Pattern[str]:
    """Return the pattern of a value's end, before another argument or one of the call's `ends`."""
    follows = "|".join(map(re.escape, (form.opening, *ends)))
    return re.compile(rf"{re.escape(form.close)}\s*(?:{follows})")


def read(
    text: str, at: int, form: Argument, end: str, root: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """Parse a call's arguments from `at`, the end of its name. Return the arguments and the start
    of the call's `end`. `root` is the arguments' schema.

    Raises ValueError if an argument or the call has no end.
    """
    pattern, goes_on, found = key_pattern(form), goes_on_pattern(form, end.strip()), {}
    while begun := pattern.match(text, _behind_space(text, at)):
        reading, begin = reading_of(root, begun["key"]), begun.end()
        stop = text.find(form.close, begin)
        if reading is Reading.JSON and stop >= 0:
            stop = _behind_space(text, _end_of_json(text, _behind_space(text, begin)))
            if not text.startswith(form.close, stop):
                other = goes_on.search(text, begin)
                stop = other.start() if other is not None else -1
        if stop < 0:
            raise ValueError(f"the argument {begun['key']!r} has no end")
        value = text[begin:stop].removesuffix(form.gap)
        found[begun["key"]] = msgspec.json.decode(value_of(value, reading, form))
        at = stop + len(form.close)
        at += len(form.after) * text.startswith(form.after, at)
    if not text.startswith(end.lstrip(), _behind_space(text, at)):
        raise ValueError("the call has no end")
    return found, at


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _end_of_json(text: str, at: int) -> int:
    """Return the end of the JSON value that begins at `at`, or `at` if there is none."""
    try:
        return _decoder.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        return at


def escaped(text: str) -> str:
    """Escape `text` as within a JSON string."""
    return msgspec.json.encode(text).decode()[1:-1]


def is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
