"""Writers of JSON texts: a schema in normal form as a regex tree, or as rules of Lark grammars.

Writers read the keywords of the normal form (`normal_form`), in which mask schemas are written too.

`whole_regex` writes all of a schema, in our spelling. An irregular or too large part (open objects,
recursion, long strings) makes the whole irregular; llguidance takes the schema then. Every text of
the tree is valid. Some valid texts are missing: properties come in the order of the schema, strings
and numbers in the spellings of `json_text.Ours`.

`declared_part` writes the declared part of a schema that llguidance runs, in llguidance's spelling.
*Marks* replace parts that are undeclared or irregular. `docs/constrained_internals.md` ("Open
schemas") gives the places of marks, and why texts that lead to one state continue alike.

`lark_of` writes a mask schema whose constants llguidance would respell, rule by rule, as
`whole_regex` would. llguidance's `%json` writes a number of `enum` in its own spelling (`1` for
`1.0`, `0.0000001` for `1e-7`) and has none for some texts (U+007F).
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rootlace.runtime.structured.grammars import lark_text
from rootlace.runtime.structured.json_schema import json_text
from rootlace.runtime.structured.json_schema.cases import TYPES
from rootlace.runtime.structured.json_schema.json_text import (
    MAX_SIZE,
    Escapes,
    Guidance,
    NotRegular,
    Ours,
)
from rootlace.runtime.structured.json_schema.load import subschemas
from rootlace.runtime.structured.json_schema.pattern import NotTranslated, in_all, regex_of_pattern
from rootlace.runtime.structured.regex.lazy_dfa import DEAD, LazyDfa
from rootlace.runtime.structured.regex.syntax import (
    ALL,
    BLANK,
    NOTHING,
    Chars,
    Literal,
    Reference,
    Regex,
    TooLarge,
    concat,
    either,
    optional,
    pattern_of,
    repeat,
    size,
)

MARK = "\0"
"""First character of a mark, which JSON never has. Behind it stand the first bytes of the marked
text (`+`), or the excluded first bytes (`-`), in hexadecimal, and the mark's number."""
MAX_VALUES = 2000
"""Bound of the schemas written; a schema counts once for each reference."""
_MAX_DEPTH = 32
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "patternProperties"}
MOST_RULES = 800
"""Most rules of one schema. Each property is a rule within the rule of the property before, and
llguidance follows rules on the stack: about 1 KiB for each."""


def whole_regex(root: Any, definitions: Mapping[str, Any], gap: Regex) -> Regex | None:
    """Return the JSON texts of a schema in our spelling, with `gap` between tokens; None if they
    are no automaton of modest size.

    A tree that matches nothing (`syntax.NOTHING`) means that no instance is valid.
    """
    return _written(_RegexWriter(definitions, Ours(), gap), root)


def declared_part(schema: Mapping[str, Any], gap: Regex, exact: bool = False) -> Regex | None:
    """Return the declared part of a mask schema; None if it is useless. `exact`: as `lark_of`
    writes it, not as llguidance's `%json` does."""
    if not set(schema.get("x-guidance", {})) <= {"json_allowed_escapes"}:
        return None
    spelling = Ours() if exact else Guidance(schema)
    keys = json_text.key_escapes(schema)
    root = _root_of(schema)
    for scalars in (True, False):
        marks = itertools.count()
        writer = _RegexWriter(schema.get("$defs", {}), spelling, gap, marks, scalars, keys)
        tree = _written(writer, root)
        if tree is not None:
            return None if tree == NOTHING else tree
    return None


def has_own_spelling(mask: dict[str, Any]) -> bool:
    """Return whether a mask schema has a constant that `%json` would write differently."""
    return any(
        isinstance(schema, dict) and any(map(_is_respelt, schema.get("enum", ())))
        for schema in within(mask)
    )


def within(mask: dict[str, Any]) -> Iterator[Any]:
    """Yield the schemas in a mask's schema, with the booleans."""
    queue: list[Any] = [mask]
    while queue:
        schema = queue.pop()
        yield schema
        queue += [below for _, below in subschemas(schema)] if isinstance(schema, dict) else ()


def _is_respelt(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_is_respelt(part) for item in value.items() for part in item)
    if isinstance(value, list):
        return any(map(_is_respelt, value))
    if isinstance(value, str):
        return any(character < " " or character == "\x7f" for character in value)
    return isinstance(value, float)


def lark_of(mask: dict[str, Any], gap: Regex, prefix: str = "") -> tuple[str, list[str]] | None:
    """Return the name and the lines of a rule for a mask schema's texts, with `gap` between tokens.
    None if `%json` writes the schema, or if nothing else can. Names begin with `prefix`."""
    if not has_own_spelling(mask):
        return None
    writer = _RuleWriter(mask, gap, prefix)
    try:
        tree = writer.part(_root_of(mask))
        return None if tree == NOTHING else (writer.rule(lark_text(tree)), writer.lines)
    except (NotRegular, NotTranslated, TooLarge, RecursionError):
        return None


def _written(writer: _RegexWriter, root: Any) -> Regex | None:
    try:
        return writer.value(root, 0, frozenset())
    except (NotRegular, RecursionError, OverflowError):
        return None


def _root_of(mask: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mask.items() if key not in ("$defs", "x-guidance")}


# Values -------------------------------------------------------------------------------------------


_Refs = frozenset[str]
"""Names of definitions that enclose a value."""


class _Writer(ABC):
    """Writer of schemas as trees. Subclasses define values inside others, objects, and the
    treatment of a text that is one token."""

    def __init__(
        self,
        definitions: Mapping[str, Any],
        spelling: Ours | Guidance,
        gap: Regex,
        keys: Escapes = json_text.OURS,
    ) -> None:
        self._definitions = definitions
        self._spelling = spelling
        self._gap = gap
        self._keys = keys
        self._comma = self._token(json_text.separated(",", gap))
        self._colon = self._token(json_text.separated(":", gap))

    @abstractmethod
    def part(self, schema: Any, depth: int = 0, refs: _Refs = frozenset()) -> Regex:
        """Return the texts of a value `depth` deep, inside of the definitions `refs`."""

    @abstractmethod
    def _object(self, schema: dict[str, Any], depth: int, refs: _Refs) -> Regex: ...

    @abstractmethod
    def _token(self, regex: Regex) -> Regex:
        """Return the text as one token."""

    def _named(self, tree: Regex) -> Regex:
        """Return a tree for use in several places, or within many other trees."""
        return tree

    def _option(self, schema: dict[str, Any], depth: int, refs: _Refs) -> Regex:
        """Return the texts of listed values, or of a value of one type. Raises NotRegular."""
        if list(schema) == ["enum"]:
            return either(*(self._spelling.literal(value, self._gap) for value in schema["enum"]))
        keywords = schema.keys() - {"type"}
        match schema.get("type"):
            case "null" if not keywords:
                return Literal("null")
            case "boolean" if not keywords:
                return either(Literal("true"), Literal("false"))
            case "string":
                return self._spelling.string(schema)
            case "integer" | "number":
                return self._spelling.number(schema)
            case "array" if keywords <= {"items", "prefixItems", "minItems", "maxItems"}:
                return self._array(schema, depth + 1, refs)
            case "object":
                return self._object(schema, depth + 1, refs)
        raise NotRegular(f"the keywords {sorted(schema)}")

    def _array(self, schema: dict[str, Any], depth: int, refs: _Refs) -> Regex:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        items: list[Regex] = []
        for item in schema.get("prefixItems", ()):
            tree = self.part(item, depth, refs)
            if tree == NOTHING:
                most = len(items) if most is None else min(most, len(items))
                break
            items.append(tree)
        tail: Regex = NOTHING
        if most is None or most > len(items):
            tail = self.part(schema.get("items", {}), depth, refs)
            if tail == NOTHING:
                most = len(items)
        if most is not None and least > most:
            return NOTHING
        return self._sequence(items[:most], tail, least, most)

    def _sequence(self, items: list[Regex], tail: Regex, least: int, most: int | None) -> Regex:
        """Return `items` and then any number of `tail`, `least` to `most` in all, in brackets."""
        if most == 0:
            return self._enclosed("[", BLANK, "]", must=False)
        comma, tail = self._comma, self._named(tail)
        if items:
            top = None if most is None else most - len(items)
            body = repeat(concat(comma, tail), max(0, least - len(items)), top)
            for index in range(len(items) - 1, -1, -1):
                # The first `least` items are required, later items are optional.
                if body != BLANK and index + 1 >= least:
                    body = optional(self._named(body))
                body = concat(items[index] if index == 0 else concat(comma, items[index]), body)
        else:
            top = None if most is None else most - 1
            body = concat(tail, repeat(concat(comma, tail), max(0, least - 1), top))
        return self._enclosed("[", body, "]", must=least > 0)

    def _enclosed(self, opening: str, body: Regex, closing: str, must: bool) -> Regex:
        """Return `body` in brackets; without `must`, or for a blank body, also empty brackets."""
        empty = self._token(concat(Literal(opening), self._gap, Literal(closing)))
        if body == BLANK:
            return empty
        begin = self._token(concat(Literal(opening), self._gap))
        full = concat(begin, body, self._token(concat(self._gap, Literal(closing))))
        return full if must else either(empty, full)


# Regex trees --------------------------------------------------------------------------------------


class _RegexWriter(_Writer):
    """Writer of regular values.

    With `marks`, an irregular part of a value becomes a mark; without, it makes the whole value
    irregular. With `scalars`, only objects and arrays are marked in a value that may be anything.
    """

    def __init__(
        self,
        definitions: Mapping[str, Any],
        spelling: Ours | Guidance,
        gap: Regex,
        marks: Iterator[int] | None = None,
        scalars: bool = False,
        keys: Escapes = json_text.OURS,
    ) -> None:
        super().__init__(definitions, spelling, gap, keys)
        self._marks = marks
        self._scalars = scalars
        self._values = 0

    def _token(self, regex: Regex) -> Regex:
        return regex

    def _array(self, schema: dict[str, Any], depth: int, refs: _Refs) -> Regex:
        if max(schema.get("minItems", 0), schema.get("maxItems", 0)) > MAX_SIZE:
            raise NotRegular("too large")
        return super()._array(schema, depth, refs)

    def value(self, schema: Any, depth: int, refs: _Refs) -> Regex:
        """Return the texts of a value `depth` deep, inside of the definitions `refs`. Raises
        NotRegular if they are irregular as a whole, or too many."""
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
            if not self._scalars:
                raise NotRegular("anything")
            scalars = [{"type": name} for name in ("null", "boolean", "number", "string")]
            return either(self._either(scalars, depth, refs), self._mark(b"["), self._mark(b"{"))
        if "anyOf" in schema and len(schema) > 1:
            raise NotRegular("keywords beside anyOf")
        options = schema.get("anyOf", [schema])
        tree = self._either([one for option in options for one in _typed(option)], depth, refs)
        if size(tree, MAX_SIZE, json_text.WHITESPACE) > MAX_SIZE:
            raise NotRegular("too large")
        return tree

    def part(self, schema: Any, depth: int = 0, refs: _Refs = frozenset()) -> Regex:
        """Return a value inside another one: as `value`, or a mark."""
        try:
            return self.value(schema, depth, refs)
        except NotRegular:
            if self._marks is None:
                raise
            return self._mark(self._first(schema, ()))

    def _first(self, schema: Any, refs: tuple[str, ...]) -> bytes:
        """Return the bytes with which a value may begin."""
        if not isinstance(schema, dict) or not schema:
            return _ANY_VALUE
        if "$ref" in schema:
            name = schema["$ref"].removeprefix("#/$defs/")
            return b"" if name in refs else self._first(self._definitions[name], (*refs, name))
        options = schema.get("anyOf", [schema])
        if options != [schema]:
            return b"".join(self._first(option, refs) for option in options)
        return b"".join(map(_begins, _typed(schema)))

    def _mark(self, first: bytes, sign: str = "+") -> Regex:
        """Return a mark for a text that begins with one of the bytes `first`; with `-`, with none
        of them."""
        assert self._marks is not None
        return Literal(f"{MARK}{sign}{bytes(sorted(set(first))).hex()},{next(self._marks)};")

    def _either(self, options: list[dict[str, Any]], depth: int, refs: _Refs) -> Regex:
        """Return the union of schemas of one type, or of values. An option that is not regular
        becomes a mark if its first byte distinguishes the option from all others."""
        trees: list[Regex] = []
        marked: list[bytes] = []
        for option in options:
            try:
                trees.append(self._option(option, depth, refs))
            except NotRegular:
                if self._marks is None:
                    raise
                marked.append(_begins(option))
        if not marked:
            return either(*trees)
        first = [byte for option in options for byte in set(_begins(option))]
        if not trees or any(first.count(byte) > 1 for byte in b"".join(marked)):
            raise NotRegular("a choice that its first byte does not make")
        return either(*trees, self._mark(b"".join(marked)))

    def _object(self, schema: dict[str, Any], depth: int, refs: _Refs) -> Regex:
        if not schema.keys() <= _OF_OBJECTS:
            raise NotRegular(f"the keywords {sorted(schema)}")
        properties: dict[str, Any] = schema.get("properties", {})
        required = set(schema.get("required", ()))
        is_open = schema.get("additionalProperties", True) is not False
        is_open = is_open or "patternProperties" in schema
        if not required <= properties.keys() or (is_open and self._marks is None):
            raise NotRegular("an open object")
        keys = {name: self._spelling.literal(name, self._gap) for name in properties}
        pairs: list[tuple[Regex, bool]] = []
        for name, inner in properties.items():
            held = self.part(inner, depth, refs)
            if held != NOTHING:
                pairs.append((concat(keys[name], self._colon, held), name in required))
            elif name in required:
                return NOTHING
        if is_open:
            names = [json_text.text_of(name).encode()[1:] for name in properties]
            pairs.append((self._undeclared(names, b'"', self._other_keys(schema)), False))
        body = joined(pairs, self._comma) if pairs else BLANK
        return self._enclosed("{", body, "}", must=any(must for _, must in pairs))

    def _other_keys(self, schema: dict[str, Any]) -> Callable[[bytes], bool]:
        """Return a function from first bytes to whether some undeclared key begins with them.
        Raises NotRegular."""
        patterns: dict[str, Any] = schema.get("patternProperties", {})
        if not patterns:
            return lambda begun: True
        names = schema.get("properties", ())
        try:
            parts = keys_of_patterns(patterns, names)
            allowed = [tree for pattern, tree in parts.items() if patterns[pattern] is not False]
            if schema.get("additionalProperties", True) is not False:
                refused = [tree for pattern, tree in parts.items() if patterns[pattern] is False]
                but = [*refused, *map(Literal, names)]
                allowed = [in_all([repeat(Chars(ALL), 0, None)], but=but)]
            dfa = LazyDfa(json_text.string_of(either(*allowed), self._keys), MAX_SIZE)
            # Computed now, while a refusal can still be handled.
            known = {b"": dfa.start}
            for name in names:
                text = json_text.text_of(name).encode()
                known |= {text[:end]: dfa.run(dfa.start, text[:end]) for end in range(len(text))}
        except (NotTranslated, TooLarge) as error:
            raise NotRegular(str(error)) from None
        return lambda begun: known.get(begun, DEAD) != DEAD

    def _undeclared(
        self, names: list[bytes], begun: bytes, possible: Callable[[bytes], bool]
    ) -> Regex:
        """Return undeclared properties, from the first one on.

        The key is written byte by byte up to where it can no longer become one of `names`, with a
        mark at each place. `names` all continue `begun`, up to their last quote. `possible` tells
        whether an undeclared key may begin so.
        """
        following: dict[int, list[bytes]] = {}
        for name in names:
            if name != b'"':
                following.setdefault(name[0], []).append(name[1:])
        declared = {name[0] for name in names}
        inner = [
            self._undeclared(rest, begun + bytes((byte,)), possible)
            for byte, rest in following.items()
            if possible(begun + bytes((byte,)))
        ]
        other = self._mark(bytes(declared), "-")
        last = begun[-1:].decode(errors="surrogateescape")  # perhaps a byte of a character
        return concat(Literal(last), either(other, *inner))


def keys_of_patterns(patterns: Iterable[str], names: Iterable[str]) -> dict[str, Regex]:
    """Return the keys of each pattern except `names`. Raises NotTranslated or TooLarge."""
    but = list(map(Literal, names))
    return {pattern: in_all([regex_of_pattern(pattern)], but=but) for pattern in patterns}


_FIRST = {
    "null": b"n",
    "boolean": b"tf",
    "integer": b"-0123456789",
    "number": b"-0123456789",
    "string": b'"',
    "array": b"[",
    "object": b"{",
}
_ANY_VALUE = bytes(sorted(set(b"".join(_FIRST.values()))))


def _begins(schema: dict[str, Any]) -> bytes:
    """Return the bytes with which a value of one type, or one of given values, may begin."""
    if "enum" not in schema:
        return _FIRST.get(schema.get("type", ""), _ANY_VALUE)
    return b"".join({_FIRST[json_text.type_of(value)] for value in schema["enum"]})


def joined(pairs: Sequence[tuple[Regex, bool]], comma: Regex) -> Regex:
    """Return one or more of `pairs` in this order, separated by commas, with all required pairs.
    Each pair is written once if some pair is required, log n times if none is."""
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
    """Return `pairs` after a first text, each with its comma."""
    texts = ((concat(comma, pair), must) for pair, must in pairs)
    return concat(*(text if must else optional(text) for text, must in texts))


def _typed(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a schema into one schema for each type that it names."""
    names = schema.get("type")
    return [{**schema, "type": name} for name in names] if isinstance(names, list) else [schema]


# Rules --------------------------------------------------------------------------------------------


class _RuleWriter(_Writer):
    """Writer of rules with their lexemes, which are references by name in `lines`."""

    def __init__(self, mask: Mapping[str, Any], gap: Regex, prefix: str) -> None:
        self.lines: list[str] = []
        self._prefix = prefix
        self._options = {key: mask[key] for key in ("x-guidance",) if key in mask}
        self._names: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        keys = json_text.key_escapes(mask)
        super().__init__(mask.get("$defs", {}), Ours(), gap, keys)

    def rule(self, body: str) -> str:
        if len(self.lines) >= MOST_RULES:
            raise TooLarge(f"more than {MOST_RULES} rules")
        name = f"{self._prefix}r{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _named(self, tree: Regex) -> Regex:
        """Return a reference to a rule for the tree."""
        return tree if tree in (NOTHING, BLANK) else Reference(self.rule(lark_text(tree)))

    def _terminal(self, body: str) -> Regex:
        if body not in self._terminals:
            self._terminals[body] = name = f"{self._prefix.upper()}T{len(self._terminals)}"
            self.lines.append(f"{name}: {body}")
        return Reference(self._terminals[body])

    def _token(self, regex: Regex) -> Regex:
        return NOTHING if regex == NOTHING else self._terminal(f"/{pattern_of(regex)}/")

    def part(self, schema: Any, depth: int = 0, refs: _Refs = frozenset()) -> Regex:
        """Return a rule of its own for a definition. Raises NotRegular if the definition has no
        value."""
        if schema is False:
            return NOTHING
        if schema is True or not schema:
            return self._definition("", {"type": list(TYPES)})
        if "$ref" in schema:
            name = schema["$ref"].removeprefix("#/$defs/")
            return self._definition(name, self._definitions[name])
        if "anyOf" in schema:
            return either(*map(self.part, schema["anyOf"]))
        return either(*(self._option(one, depth, refs) for one in _typed(schema)))

    def _option(self, schema: dict[str, Any], depth: int, refs: _Refs) -> Regex:
        """Return the option as `_Writer` does; `%json` writes a string or number that is not
        regular."""
        kind = schema.get("type")
        if kind in ("array", "object"):
            return super()._option(schema, depth, refs)
        try:
            return self._token(super()._option(schema, depth, refs))
        except (NotRegular, NotTranslated):
            if kind not in ("string", "integer", "number"):
                raise
            return Reference(self.rule(f"%json {json.dumps({**schema, **self._options})}"))

    def _definition(self, name: str, schema: Any) -> Regex:
        if name not in self._names:
            self._names[name] = f"{self._prefix}d{len(self._names)}"
            body = self.part(schema)
            if body == NOTHING:
                raise NotRegular("a definition without a value")
            self.lines.append(f"{self._names[name]}: {lark_text(body)}")
        return Reference(self._names[name])

    def _object(self, schema: dict[str, Any], depth: int, refs: _Refs) -> Regex:
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        required = set(schema.get("required", ()))
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        pairs: list[tuple[Regex, bool]] = []
        names = [self._spelling.literal(name, self._gap) for name in properties]
        for name, (key, inner) in zip(names, properties.items(), strict=True):
            held = self.part(inner, depth, refs)
            if held != NOTHING:
                pairs.append((concat(self._token(name), self._colon, held), key in required))
            elif key in required:
                return NOTHING
        others: list[Regex] = []
        for pattern, keys in keys_of_patterns(patterns, properties).items():
            names.append(json_text.string_of(keys, self._keys))
            held = self.part(patterns[pattern], depth, refs)
            if held != NOTHING:
                others.append(concat(self._token(names[-1]), self._colon, held))
        held = self.part(schema.get("additionalProperties", {}), depth, refs)
        if held != NOTHING:
            any_key = json_text.string_of(repeat(Chars(ALL), 0, None), self._keys)
            but = f" & ~/{pattern_of(either(*names))}/" if names else ""
            key = self._terminal(f"/{pattern_of(any_key)}/{but}")
            others.append(concat(key, self._colon, held))
        pair = self._named(either(*others))
        # Texts that may follow each number of pairs, or `counted` and more; NOTHING if none does.
        counted = max(least, most or 0, 1)
        rests = {count: self._others(pair, count, least, most) for count in range(counted + 1)}
        for named, must in reversed(pairs):
            named = self._named(named)
            rests = {
                count: self._rest(
                    concat(self._comma, named) if count else named,
                    rests[min(count + 1, counted)] if count != most else NOTHING,
                    NOTHING if must else rests[count],
                )
                for count in range(counted + 1)
            }
        must = bool(least or required)
        if rests[0] == NOTHING:
            return NOTHING if must else self._enclosed("{", BLANK, "}", must)
        return self._enclosed("{", rests[0], "}", must)

    def _others(self, pair: Regex, count: int, least: int, most: int | None) -> Regex:
        """Return `least` to `most` pairs, with `count` before them; not the empty text if `count`
        is 0."""
        low, high = max(least - count, int(not count)), None if most is None else most - count
        body = concat(self._comma, pair)
        if count:
            return repeat(body, low, high)
        return concat(pair, repeat(body, low - 1, None if high is None else high - 1))

    def _rest(self, named: Regex, behind: Regex, without: Regex) -> Regex:
        """Return a pair with its continuation, or the continuation without the pair."""
        taken = concat(named, behind)
        return self._named(optional(taken) if without == BLANK else either(taken, without))
