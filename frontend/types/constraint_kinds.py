"""Kinds of constraints: the argument that users give for each kind, and the wire's source text.

To add a kind, name it in `rootlace.wire.protocol.ConstraintKind` and describe it here. Add a line
to `rootlace.runtime.structured.compiler.KINDS`, and document it in docs/constraints.md. The
keywords of `gen` and of `GrammarCompiler.compile`, the HTTP fields and all messages follow.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, TypedDict

import msgspec

from rootlace.types import schema_of, schema_text
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import ConstraintKind

# Keywords of JSON schemas, to find misspelt keywords and keywords of other drafts.
#
# Unknown properties of a schema have no effect: a misspelt keyword constrains nothing, in silence,
# and so does one that the schema's draft does not have. Keywords of older drafts also have an
# effect in a schema that names no draft.


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MAPS = _words("properties patternProperties $defs definitions dependentSchemas dependencies")
_LISTS = _words("allOf anyOf oneOf prefixItems")
_SINGLE = _words("""
    additionalItems additionalProperties contains contentSchema else if items not propertyNames then
    unevaluatedItems unevaluatedProperties
""")
_VALUES = _words("""
    $ref const dependentRequired enum exclusiveMaximum exclusiveMinimum format maxContains maxItems
    maxLength maxProperties maximum minContains minItems minLength minProperties minimum multipleOf
    nullable pattern required type uniqueItems
""")
# Annotations for readers: a misspelt one loses no constraint.
_NOTES = _words("""
    $anchor $comment $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $schema
    $vocabulary contentEncoding contentMediaType default deprecated description discriminator
    example examples externalDocs id readOnly title writeOnly xml
""")
IN_PLACE = _words("$ref $dynamicRef allOf anyOf oneOf not if")
"""Keywords that apply other schemas to the same value."""
_CONSTRAINING = _MAPS | _LISTS | _SINGLE | _VALUES
_KEYWORDS = _CONSTRAINING | _NOTES
_NAMED_DRAFT = re.compile(r"json-schema\.org/draft(?:-0([467])|/(2019)-09)/schema")
"""Pattern of a `$schema` that names a draft before 2020-12."""
_SINCE = {
    **dict.fromkeys(_words("const contains propertyNames"), 6),
    **dict.fromkeys(_words("else if then"), 7),
    **dict.fromkeys(_words("dependentRequired dependentSchemas maxContains minContains"), 2019),
    **dict.fromkeys(_words("unevaluatedItems unevaluatedProperties"), 2019),
    "prefixItems": 2020,
}
"""First draft with a keyword, for keywords missing in draft 4."""
_DRAFT_3 = {"disallow": "not", "divisibleBy": "multipleOf", "extends": "allOf"}
_SIMILAR = 0.8
_LONGEST = 64
"""Maximum length of a name that may be a misspelt keyword."""
_LONG = 1 << 17
"""Maximum length of a searched schema in characters, to keep a server's loop responsive."""
_COMPARED = 256
"""Maximum number of unknown names compared with the keywords; each comparison takes 50 us."""


class Remark(NamedTuple):
    """Remark on the keyword at `path`. `misspelt`: no such keyword exists, so it constrains
    nothing. Otherwise the remark names the specification by which the keyword is read."""

    path: str
    says: str
    misspelt: bool

    def __str__(self) -> str:
        return f"json_schema: {self.path} {self.says}"


@functools.lru_cache(maxsize=128)
def remarks(schema: str) -> tuple[Remark, ...]:
    """Return remarks on a schema (JSON text); none on a very long one. Remarks concern misspelt
    keywords, keywords of older drafts if no draft is named, and ineffective keywords of other
    specifications. Others concern closed objects without properties, and choices that exclude null.
    """
    if len(schema) > _LONG:
        return ()
    try:
        value = msgspec.json.decode(schema)
        readers = (_misspelt, older_keywords, _other_drafts, _closed, _without_null)
        return tuple(remark for remarks_of in readers for remark in remarks_of(value))
    except (msgspec.DecodeError, RecursionError):
        return ()


def patterns(schema: str) -> Iterator[tuple[str, str]]:
    """Yield (path, pattern) for values and keys of a schema (JSON text). Nothing for a very long
    one."""
    if len(schema) > _LONG:
        return
    for path, node in _nodes(msgspec.json.decode(schema), "$"):
        if isinstance(node.get("pattern"), str):
            yield f"{path}.pattern", node["pattern"]
        if isinstance(node.get("patternProperties"), dict):
            for pattern in node["patternProperties"]:
                yield f"{path}.patternProperties", pattern


def older_keywords(schema: Any) -> Iterator[Remark]:
    """Yield remarks on keywords of drafts before 2020-12, if no `$schema` names the draft."""
    for path, node in _nodes(schema, "$", undated=True):
        for name, value in node.items():
            says = ""
            if name == "items" and isinstance(value, list):
                says = "is a list: it is read as drafts before 2020-12 have it (now prefixItems)"
            elif name in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
                says = "is a boolean: it is read as draft 4 has it (now a number)"
            elif name == "dependencies" and isinstance(value, dict):
                says = "is read as draft 7 has it (now dependentRequired and dependentSchemas)"
            elif name == "$recursiveRef" and isinstance(value, str):
                says = "is read as draft 2019-09 has it (now $dynamicRef)"
            elif name == "id" and isinstance(value, str) and value.startswith("#"):
                says = "is read as draft 4 has it (now $anchor)"
            elif name == "type" and names_any(value):
                says = "is any: it is read as draft 3 has it (now no type)"
            if says:
                yield Remark(f"{path}.{name}", says, misspelt=False)


def _other_drafts(schema: Any) -> Iterator[Remark]:
    """Yield remarks on keywords of another specification that the schema's own does not have."""
    named = schema.get("$schema") if isinstance(schema, dict) else None
    match = _NAMED_DRAFT.search(named) if isinstance(named, str) else None
    draft = int(match[1] or match[2]) if match else 2020
    for path, node in _nodes(schema, "$"):
        for name in sorted(node.keys() & _SINCE.keys()):
            if _SINCE[name] > draft:
                says = "says nothing in the draft that $schema names: a later draft has it"
                yield Remark(f"{path}.{name}", says, misspelt=False)
        types = node.get("type")
        without_null = isinstance(types, (str, list)) and "null" not in types
        if node.get("nullable") is True and without_null:
            says = "says nothing in JSON Schema (OpenAPI 3.0 has it): list null in the type"
            yield Remark(f"{path}.nullable", says, misspelt=False)


def _closed(schema: Any) -> Iterator[Remark]:
    """Yield remarks on schemas whose only object is {}: closed ones without properties below the
    root, and those with keys of a number type.

    Clients that make a schema strict also close its dictionaries (crewAI 1.15.30, agno 3.1.10).
    pydantic 2.14.4 writes a dictionary with keys of an IntEnum as such a schema.
    """
    for path, node in _nodes(schema, "$"):
        keys = node.get("properties"), node.get("patternProperties")
        closed = node.get("type") == "object" and node.get("additionalProperties") is False
        if path != "$" and closed and not any(keys) and node.get("maxProperties") != 0:
            says = "is false beside no properties: {} is the only object (once a dictionary?)"
            yield Remark(f"{path}.additionalProperties", says, misspelt=False)
        names, definitions = node.get("propertyNames"), schema.get("$defs")
        if isinstance(names, dict) and "$ref" in names and isinstance(definitions, dict):
            names = definitions.get(str(names["$ref"]).removeprefix("#/$defs/"))
        types = names.get("type", "string") if isinstance(names, dict) else "string"
        if isinstance(types, (str, list)) and "string" not in types and not names_any(types):
            says = f"is of type {types}, and keys are texts: {{}} is the only object"
            yield Remark(f"{path}.propertyNames", says, misspelt=False)


def _without_null(schema: Any) -> Iterator[Remark]:
    """Yield remarks on choices without null whose `type` lists null. TanStack AI 0.58.0 writes
    optional choices as such a schema; the model must then choose."""
    for path, node in _nodes(schema, "$"):
        types = node.get("type")
        values = [node["const"]] if "const" in node else node.get("enum")
        if not isinstance(types, list) or not isinstance(values, list):
            continue
        if "null" in types and None not in values:
            says = "lists null, which is none of the values: null does not fit"
            yield Remark(f"{path}.type", says, misspelt=False)


def names_any(types: Any) -> bool:
    """Return whether a `type` is or lists draft 3's name of any type."""
    return types == "any" or (isinstance(types, list) and "any" in types)


def _misspelt(schema: Any) -> Iterator[Remark]:
    left = _COMPARED
    for path, node in _nodes(schema, "$"):
        for name in node.keys() - _KEYWORDS:
            if name.startswith("x-") or len(name) > _LONGEST:
                continue
            left -= 1
            if left < 0:
                return
            close = get_close_matches(name, _KEYWORDS, n=1, cutoff=_SIMILAR)
            meant = _DRAFT_3.get(name, close[0] if close else "")
            if meant in _CONSTRAINING:
                says = f"is no keyword; did you mean {meant!r}?"
                yield Remark(f"{path}.{name}", says, misspelt=True)


def _nodes(schema: Any, path: str, undated: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, schema) for each schema that is an object. `undated` skips subtrees that name a
    draft. Iterative, since a schema may be deeper than Python's stack."""
    left = [(path, schema)]
    while left:
        path, node = left.pop()
        if isinstance(node, list):  # an older draft's `items`
            left += reversed([(f"{path}[{at}]", each) for at, each in enumerate(node)])
        if not isinstance(node, dict) or (undated and "$schema" in node):
            continue
        yield path, node
        below: list[tuple[str, Any]] = []
        for name, value in node.items():
            here = f"{path}.{name}"
            if name in _MAPS and isinstance(value, dict):
                below += [(f"{here}.{key}", each) for key, each in value.items()]
            elif name in _LISTS or name in _SINGLE:
                below.append((here, value))
        left += reversed(below)


class KindKeywords(TypedDict, total=False):
    """Keywords of a constraint, without `choices`, for type checkers."""

    regex: str | None
    json_schema: str | bool | Mapping[str, Any] | Any
    ebnf: str | None
    structural_tag: str | Mapping[str, Any] | None


class ConstraintKeywords(KindKeywords, total=False):
    """Keywords of a constraint; in `gen`, `choices` makes a `select`."""

    choices: Iterable[str] | None


class KindSource(NamedTuple):
    """Conversion of one kind of constraint."""

    write: Callable[[Any], str]
    """Convert a Python value to `Constraint.source`. Raises InvalidConstraint."""
    field: Any
    """Type of the HTTP field."""


def _pattern(value: Any) -> str:
    return _text(value, "regex")


def _grammar(value: Any) -> str:
    return _text(value, "ebnf")


def _schema(value: Any) -> str:
    """Return the JSON text of a schema, or of a Python type's schema."""
    if isinstance(value, (str, Mapping, bool)):
        return _json(value, "json_schema")
    return schema_text(value)


def _choices(value: Any) -> str:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidConstraint("choices must be a list of strings")
    texts = list(value)
    if not texts:
        raise InvalidConstraint("choices must not be empty")
    for index, choice in enumerate(texts):
        _text(choice, f"choices[{index}]")
    return json.dumps(texts, ensure_ascii=False)


def _structural_tag(value: Any) -> str:
    """Return the JSON text of a structural tag; a structure's `schema` may be a Python type."""
    if isinstance(value, Mapping) and isinstance(value.get("structures"), (list, tuple)):
        value = {**value, "structures": [_structure(given) for given in value["structures"]]}
    elif not isinstance(value, (str, Mapping)):
        raise InvalidConstraint(
            "structural_tag must be a dictionary with 'structures' and 'triggers' (or that as JSON "
            f"text), not {type(value).__name__}"
        )
    return _json(value, "structural_tag")


def _structure(structure: Any) -> Any:
    schema = structure.get("schema") if isinstance(structure, Mapping) else None
    if schema is None or isinstance(schema, (Mapping, bool, list)):
        return structure
    return {**structure, "schema": schema_of(schema)}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidConstraint(f"{name} must be a string, not {type(value).__name__}")
    return value


def _json(value: Any, name: str) -> str:
    """Return `value` as JSON text; a string must be JSON text already. Raises InvalidConstraint."""
    try:
        if isinstance(value, str):
            try:
                msgspec.json.decode(value, type=msgspec.Raw)  # looked through, not built
            except ValueError:
                json.loads(value)  # says where it is wrong, and takes lone surrogates
            return value
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidConstraint(f"{name} is not JSON: {error}") from None


KINDS: dict[ConstraintKind, KindSource] = {
    "regex": KindSource(_pattern, str),
    "json_schema": KindSource(_schema, dict[str, Any] | str | bool),
    "ebnf": KindSource(_grammar, str),
    "choices": KindSource(_choices, list[str]),
    "structural_tag": KindSource(_structural_tag, dict[str, Any] | str),
}
