"""The writer of regular forms: a schema in normal form as a regex tree over its JSON texts.

It reads the keywords of the normal form (`normal`), in which mask schemas (`mask`) are written too,
in one of two ways.

`whole_regex` writes all of a schema, in our spelling. What is not regular or too large (open
objects, recursion, long strings) makes the whole not regular; llguidance takes it then. Not every
valid text is in the tree: properties come in the order of the schema, strings and numbers in the
spellings of `json_text.Ours`. Every text of it is valid.

`declared_part` writes what is declared in a schema that llguidance runs, in llguidance's spelling,
with *marks* for what is not declared or not regular. `docs/constrained_internals.md` ("Open
schemas") says where marks stand, and why texts that lead to one state then go on alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rootlace.runtime.structured.json_schema import json_text
from rootlace.runtime.structured.json_schema.json_text import MAX_SIZE, Guidance, NotRegular, Ours
from rootlace.runtime.structured.regex.syntax import (
    BLANK,
    NOTHING,
    Literal,
    Regex,
    concat,
    either,
    optional,
    repeat,
    size,
)

MARK = "\0"
"""Marks begin with it. JSON has it nowhere."""
MAX_VALUES = 2000
"""Schemas that are written, each as often as it is referred to."""
_MAX_DEPTH = 32
_OF_OBJECTS = {"properties", "required", "additionalProperties", "patternProperties"}


def whole_regex(root: Any, definitions: Mapping[str, Any], gap: Regex) -> Regex | None:
    """The JSON texts that we write for a schema, with `gap` between their tokens; None where they
    are no automaton of modest size.

    A tree that matches nothing (`syntax.NOTHING`) is returned only where no instance is valid.
    """
    return _written(_Writer(definitions, Ours(), gap), root)


def declared_part(schema: Mapping[str, Any], gap: Regex) -> Regex | None:
    """The declared part of a mask schema, or None where there is none to speak of."""
    options = schema.get("x-guidance", {})
    if not set(options) <= {"json_allowed_escapes"}:
        return None
    spelling = Guidance(options.get("json_allowed_escapes", 'nrbtf\\"u'))
    root = {key: value for key, value in schema.items() if key not in ("$defs", "x-guidance")}
    marks = (Literal(f"{MARK}{number};") for number in itertools.count())
    writer = _Writer(schema.get("$defs", {}), spelling, gap, marks)
    tree = _written(writer, root)
    return None if tree == NOTHING else tree


def _written(writer: _Writer, root: Any) -> Regex | None:
    try:
        return writer.value(root, 0, frozenset())
    except (NotRegular, RecursionError, OverflowError):
        return None


class _Writer:
    """Turns schemas into trees, one value at a time.

    With `marks`, a part of a value that is not regular becomes a mark; without, the whole value is
    not regular.
    """

    def __init__(
        self,
        definitions: Mapping[str, Any],
        spelling: Ours | Guidance,
        gap: Regex,
        marks: Iterator[Regex] | None = None,
    ) -> None:
        self._definitions = definitions
        self._spelling = spelling
        self._gap = gap
        self._comma = json_text.separated(",", gap)
        self._colon = json_text.separated(":", gap)
        self._marks = marks
        self._values = 0

    def value(self, schema: Any, depth: int, refs: frozenset[str]) -> Regex:
        """The texts of a value that stands `depth` deep, inside of the definitions `refs`.

        Raises NotRegular where they are not regular as a whole, or too many.
        """
        self._values += 1
        if self._values > MAX_VALUES or depth > _MAX_DEPTH:
            raise NotRegular("too large")
        while isinstance(schema, dict) and "$ref" in schema:
            name = schema["$ref"].removeprefix("#/$defs/")
            if name in refs:
                raise NotRegular("recursion")
            refs |= {name}
            schema = self._definitions[name]
        if schema is False:
            return NOTHING
        if schema is True or not schema:
            raise NotRegular("anything")
        if "anyOf" in schema and len(schema) > 1:
            raise NotRegular("keywords beside anyOf")
        options = schema.get("anyOf", [schema])
        tree = self._either([one for option in options for one in _typed(option)], depth, refs)
        if size(tree, MAX_SIZE, json_text.WHITESPACE) > MAX_SIZE:
            raise NotRegular("too large")
        return tree

    def _part(self, schema: Any, depth: int, refs: frozenset[str]) -> Regex:
        """A value inside another one."""
        try:
            return self.value(schema, depth, refs)
        except NotRegular:
            if self._marks is None:
                raise
            return next(self._marks)

    def _either(self, options: list[dict[str, Any]], depth: int, refs: frozenset[str]) -> Regex:
        """One of some schemas of one type, or of values. One that is not regular is marked if its
        first byte tells it from all others: then nothing of it is in their texts."""
        trees: list[Regex] = []
        marked: list[str] = []
        for option in options:
            try:
                trees.append(self._option(option, depth, refs))
            except NotRegular:
                if self._marks is None:
                    raise
                marked.append(_kind(option))
        if not marked or self._marks is None:
            return either(*trees)
        kinds = [_kind(option) for option in options]
        if not trees or any(kinds.count(kind) > 1 for kind in marked) or "" in kinds:
            raise NotRegular("a choice that its first byte does not make")
        return either(*trees, next(self._marks))

    def _option(self, schema: dict[str, Any], depth: int, refs: frozenset[str]) -> Regex:
        if list(schema) == ["enum"]:
            return either(*(self._spelling.literal(value, self._gap) for value in schema["enum"]))
        said = schema.keys() - {"type"}
        match schema.get("type"):
            case "null" if not said:
                return Literal("null")
            case "boolean" if not said:
                return either(Literal("true"), Literal("false"))
            case "string":
                return self._spelling.string(schema)
            case "integer" | "number":
                return self._spelling.number(schema)
            case "array" if said <= {"items", "prefixItems", "minItems", "maxItems"}:
                return self._array(schema, depth + 1, refs)
            case "object" if said <= _OF_OBJECTS:
                return self._object(schema, depth + 1, refs)
        raise NotRegular(f"the keywords {sorted(schema)}")

    # ------------------------------------------------------------ arrays and objects

    def _array(self, schema: dict[str, Any], depth: int, refs: frozenset[str]) -> Regex:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if max(least, most or 0) > MAX_SIZE:
            raise NotRegular("too large")
        items: list[Regex] = []
        for item in schema.get("prefixItems", ()):
            tree = self._part(item, depth, refs)
            if tree == NOTHING:
                most = len(items) if most is None else min(most, len(items))
                break
            items.append(tree)
        tail: Regex = NOTHING
        if most is None or most > len(items):
            tail = self._part(schema.get("items", {}), depth, refs)
            if tail == NOTHING:
                most = len(items)
        if most is not None and least > most:
            return NOTHING
        return self._sequence(items[:most], tail, least, most)

    def _sequence(self, items: list[Regex], tail: Regex, least: int, most: int | None) -> Regex:
        """`items` and then any number of `tail`, `least` to `most` in all, in brackets."""
        empty = concat(Literal("["), self._gap, Literal("]"))
        if most == 0:
            return empty
        comma = self._comma
        if items:
            top = None if most is None else most - len(items)
            body = repeat(concat(comma, tail), max(0, least - len(items)), top)
            for index in range(len(items) - 1, -1, -1):
                # Of `least` items and fewer, all are there; what is behind them may be missing.
                if body != BLANK and index + 1 >= least:
                    body = optional(body)
                body = concat(items[index] if index == 0 else concat(comma, items[index]), body)
        else:
            top = None if most is None else most - 1
            body = concat(tail, repeat(concat(comma, tail), max(0, least - 1), top))
        full = json_text.enclosed("[", body, "]", self._gap)
        return full if least else either(empty, full)

    def _object(self, schema: dict[str, Any], depth: int, refs: frozenset[str]) -> Regex:
        properties: dict[str, Any] = schema.get("properties", {})
        required = set(schema.get("required", ()))
        is_open = schema.get("additionalProperties", True) is not False
        is_open = is_open or "patternProperties" in schema
        if not required <= properties.keys() or (is_open and self._marks is None):
            raise NotRegular("an open object")
        keys = {name: self._spelling.literal(name, self._gap) for name in properties}
        pairs: list[tuple[Regex, bool]] = []
        for name, inner in properties.items():
            held = self._part(inner, depth, refs)
            if held != NOTHING:
                pairs.append((concat(keys[name], self._colon, held), name in required))
            elif name in required:
                return NOTHING
        if is_open:
            names = [json_text.text_of(name)[1:-1] for name in properties]
            pairs.append((self._undeclared(names, '"'), False))
        empty = concat(Literal("{"), self._gap, Literal("}"))
        if not pairs:
            return empty
        full = json_text.enclosed("{", joined(pairs, self._comma), "}", self._gap)
        return full if any(must for _, must in pairs) else either(empty, full)

    def _undeclared(self, names: list[str], begun: str) -> Regex:
        """Properties that are not declared, from the first one on: their key up to where it can
        become none of `names` any more, letter by letter, every place of it marked.

        `names` all go on behind `begun`.
        """
        assert self._marks is not None
        following: dict[str, list[str]] = {}
        for name in names:
            if name:
                following.setdefault(name[0], []).append(name[1:])
        inner = [self._undeclared(rest, letter) for letter, rest in following.items()]
        return concat(Literal(begun), either(next(self._marks), *inner))


def joined(pairs: Sequence[tuple[Regex, bool]], comma: Regex) -> Regex:
    """One or more of `pairs` in this order, separated by commas, with all required pairs among
    them.

    Each pair is written once if some pair is required, log n times if none is.
    """
    at = next((i for i, (_, must) in enumerate(pairs) if must), None)
    if at is not None:
        before = [optional(concat(pair, comma)) for pair, _ in pairs[:at]]
        return concat(*before, pairs[at][0], _following(pairs[at + 1 :], comma))
    if len(pairs) == 1:
        return pairs[0][0]
    middle = (len(pairs) + 1) // 2
    first = concat(joined(pairs[:middle], comma), _following(pairs[middle:], comma))
    return either(first, joined(pairs[middle:], comma))


def _following(pairs: Sequence[tuple[Regex, bool]], comma: Regex) -> Regex:
    """`pairs` after something, each with its comma."""
    texts = ((concat(comma, pair), must) for pair, must in pairs)
    return concat(*(text if must else optional(text) for text, must in texts))


def _typed(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """A schema as one per type that it names."""
    names = schema.get("type")
    return [{**schema, "type": name} for name in names] if isinstance(names, list) else [schema]


def _kind(schema: dict[str, Any]) -> str:
    """The kind of value that the first byte tells; empty if the byte does not tell."""
    name = schema.get("type", "")
    return "number" if name == "integer" else str(name)
