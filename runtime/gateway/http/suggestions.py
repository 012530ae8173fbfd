"""What a misspelt field or path may have meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator

from msgspec import inspect

from rootlace.runtime.gateway.http.fields import is_refused

_LENGTHS = ("max_tokens", "max_output_tokens", "max_new_tokens", "num_predict")
_FORMATS = ("response_format", "text.format", "output_config.format", "format", "json_schema")
# Names of other interfaces, which need not look like ours; the first that is there is meant. None:
# what looks like it means something else.
_SYNONYMS = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "cache_control": ("cache",),
    "enable_thinking": ("think", "thinking", "reasoning"),
    "format": _FORMATS,
    "function": ("name", "tools"),
    "functions": ("tools",),
    "input": ("prompt", "messages", "input_ids"),
    "instructions": ("system", "messages"),
    "max_completion_tokens": _LENGTHS,
    "max_new_tokens": _LENGTHS,
    "max_output_tokens": ("max_completion_tokens", *_LENGTHS),
    "max_tokens": _LENGTHS,
    "message": ("messages",),
    "messages": ("input", "prompt", "text"),
    "num_predict": _LENGTHS,
    "options": ("sampling_params",),
    "output_format": _FORMATS,
    "prompt": ("messages", "text", "input"),
    "repetition_penalty": ("repeat_penalty",),
    "request_id": ("rid",),
    "response_format": _FORMATS,
    "rid": ("request_id",),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "system": ("instructions", "messages"),
    "text": ("prompt", "messages", "input"),
    "think": ("enable_thinking", "thinking", "reasoning"),
    "thinking": ("think", "reasoning"),
    "user": ("metadata.user_id",),
}
LONGEST = 64
"""No name is longer; comparing long texts takes seconds."""
_STEP = re.compile(r"\.?(\w+)|\[(?:\d+|\.\.\.)\]")


def field_suggestion(
    kind: type, path: str, field: str, elsewhere: Collection[str] = frozenset()
) -> str:
    """The question whether another name was meant, for an unknown `field` of the object at `path`
    of a body of type `kind`; empty where nothing is near. No field is meant that is refused.
    `elsewhere`: names of other bodies' fields, which are no misspelt ones."""
    here = [f for struct in _structs_at(kind, path) for f in struct.fields if not is_refused(f)]
    known = [f.encode_name for f in here]
    within = [
        f"{f.encode_name}.{inner.encode_name}"
        for f in here
        for type_ in alternatives([f.type])
        for inner in _fields_of(type_)
        if not is_refused(inner)
    ]
    meant = [
        full
        for name in (field, *_SYNONYMS.get(field, ()))
        for full in (*known, *within)
        if full == name or full.endswith(f".{name}")
    ]
    if not meant and field not in _SYNONYMS and field not in elsewhere:
        meant = nearest(field, known)
    if meant:
        return f". Did you mean {meant[0]!r}?"
    return ". It is a field of other endpoints" if field in elsewhere else ""


def nearest(given: str, known: Iterable[str], at_most: int = 1) -> list[str]:
    """Those of `known` that look most like `given`, best first."""
    if len(given) > LONGEST:
        return []
    return difflib.get_close_matches(given, list(dict.fromkeys(known)), at_most, cutoff=0.6)


def _fields_of(type_: inspect.Type) -> tuple[inspect.Field, ...]:
    return type_.fields if isinstance(type_, inspect.StructType) else ()


def _structs_at(kind: type, path: str) -> Iterator[inspect.StructType]:
    """The objects that may stand at a path such as `messages[0].content[1]`."""
    types = [inspect.type_info(kind)]
    for step in _STEP.finditer(path):
        name = step[1]
        found: list[inspect.Type] = []
        for type_ in alternatives(types):
            if name and isinstance(type_, inspect.StructType):
                found += [f.type for f in type_.fields if f.encode_name == name]
            elif not name and isinstance(type_, inspect.DictType):
                found.append(type_.value_type)
            elif not name and isinstance(type_, inspect.ListType):
                found.append(type_.item_type)
        types = found
    return (t for t in alternatives(types) if isinstance(t, inspect.StructType))


def alternatives(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """The types, of which unions stand for their members, without what is noted on them."""
    for type_ in types:
        if isinstance(type_, inspect.Metadata):
            yield from alternatives([type_.type])
        elif isinstance(type_, inspect.UnionType):
            yield from alternatives(type_.types)
        else:
            yield type_


def choices_at(kind: type, path: str) -> str:
    """Which values there are for the field at `path` of a body of type `kind`, and the reason that
    a class gives in `ONLY` for there being no other `type`; empty where any may stand."""
    above, _, name = path.rpartition(".")
    name = name.partition("[")[0]
    known: list[str] = []
    why = ""
    for struct in _structs_at(kind, above):
        here = [struct.tag] if struct.tag_field == name else []
        for type_ in alternatives([f.type for f in struct.fields if f.encode_name == name]):
            items = [type_.item_type] if isinstance(type_, inspect.ListType) else [type_]
            for item in alternatives(items):
                here += item.values if isinstance(item, inspect.LiteralType) else ()
        known += [repr(value) for value in here]
        if name == "type":
            why = why or getattr(struct.cls, "ONLY", "")
    if not known:
        return ""
    said = f"there is {known[0]}" if len(known) == 1 else f"there are {', '.join(known)}"
    return f" ({said}{': ' if why else ''}{why})"
