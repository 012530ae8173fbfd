"""Structural tags as llguidance's grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from rootlace.runtime.structured.gbnf import LexemeRules, Run, SpecialTokens, lexeme, runs
from rootlace.runtime.structured.json_schema.load import invalid
from rootlace.runtime.structured.json_schema.normal_form import PreparedSchema
from rootlace.runtime.structured.json_schema.pattern import (
    FORMATS,
    NotTranslated,
    in_all,
    regex_of_format,
    regex_of_pattern,
)
from rootlace.runtime.structured.json_schema.to_llguidance import written
from rootlace.runtime.structured.regex.syntax import (
    ALL,
    Chars,
    Literal,
    Regex,
    TooLarge,
    concat,
    either,
    pattern_of,
    repeat,
)
from rootlace.runtime.structured.source import (
    MAX_DEPTH,
    MAX_SOURCE,
    is_text,
    parsed,
    value_is_suspicious,
)
from rootlace.types.constraint_kinds import IN_PLACE
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint

# Tag formats --------------------------------------------------------------------------------------
#
# Notations of structural tags.
#
# sglang's, `Structures`, is free text with constrained islands:
#
#     {"type": "structural_tag", "triggers": ["<function="],
#      "structures": [{"begin": "<function=f>", "schema": {…}, "end": "</function>"}]}
#
# xgrammar's and vLLM's newer one has a `format`, with the same as `triggered_tags`,
#
#     {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<function="],
#      "tags": [{"begin": "<function=f>", "content": {"type": "json_schema", "json_schema": {…}},
#                "end": "</function>"}], "at_least_one": false, "stop_after_first": false}}
#
# or what the whole text is, by `sequence`, `or`, `tag`, `tags_with_separator`, `json_schema` and
# `const_string`, and `any_text` or `string` within a `tag`:
#
#     {"type": "or", "elements": [{"type": "json_schema", "json_schema": {…}},
#      {"type": "tags_with_separator", "separator": "\n", "at_least_one": true, "tags": [
#       {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {…}}, "end": "</f>"}]}]}
#
# Free text allows everything until a trigger is complete. Then one of the tags that begin with the
# trigger follows, with exactly its content. Of overlapping triggers, the first complete one counts.
# With `at_least_one` the text begins with a tag.
#
# In literals the text of a special token means this token. Free text may hold special tokens that
# do not end the sequence; `any_text` holds only those that no literal names. A token that ends the
# sequence may only be the end of a tag or of a `const_string`, and nothing follows it.


MAX_ELEMENTS = 1024
_Some = msgspec.Meta(min_length=1, max_length=MAX_ELEMENTS)
_Name = Annotated[str, msgspec.Meta(min_length=1)]


class Structure(msgspec.Struct):
    begin: _Name
    schema: dict[str, Any] | bool
    end: str


class Structures(msgspec.Struct):
    structures: Annotated[list[Structure], _Some]
    triggers: Annotated[list[_Name], _Some]


class AnyText(msgspec.Struct, tag_field="type", tag="any_text"):
    """Free text up to the end of its tag."""


class TextOf(msgspec.Struct, tag_field="type", tag="string"):
    """Text of a JSON string, without quotes, up to the end of its tag. The schema's keywords for
    strings constrain the text. `lenient`: any text, if no mask can hold the keywords."""

    json_schema: dict[str, Any]
    lenient: bool = False


class ConstString(msgspec.Struct, tag_field="type", tag="const_string"):
    value: str


class Json(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON value of a schema. `lenient`: parts of the schema that no mask can hold are dropped, not
    refused."""

    json_schema: dict[str, Any] | bool
    lenient: bool = False


class Tag(msgspec.Struct, tag_field="type", tag="tag"):
    begin: str
    content: Format | AnyText | TextOf
    end: str


class Tags(msgspec.Struct, tag_field="type", tag="tags_with_separator"):
    tags: Annotated[list[Tag], _Some]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Or(msgspec.Struct, tag_field="type", tag="or"):
    elements: Annotated[list[Format], _Some]


class SequenceFormat(msgspec.Struct, tag_field="type", tag="sequence"):
    elements: Annotated[list[Format], _Some]


class Triggered(msgspec.Struct, tag_field="type", tag="triggered_tags"):
    """Free text with triggered tags; nothing can follow the free text."""

    tags: Annotated[list[Tag], _Some]
    triggers: Annotated[list[_Name], _Some]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Any = None


Format = ConstString | Json | Tag | Tags | Or | SequenceFormat


class Outer(msgspec.Struct):
    format: Format | Triggered


# Free text ----------------------------------------------------------------------------------------
#
# Free text as llguidance's rules: anything, until one of some literals is complete.
#
# Free text consists of texts with a special token between each two. Behind every special token, a
# `_Place` has the written part of each literal; no other state is necessary. A literal that ends in
# text is a lazy lexeme, with which llguidance ends the free text as soon as it can. A literal that
# ends in a special token is complete with this token.


FREE, _SOME = "FREE", "SOME"
LEXEMES = f"{FREE}: /(?s:.)*/", f"{_SOME}: /(?s:.)+/"
MAX_WAYS = 4096
_LAZY = "[lazy]"
_Place = frozenset[tuple[int, int]]
"""Set of (literal, count): the last `count` special tokens of the literal were written, with all
its text before and between them."""
_NOWHERE: _Place = frozenset()


class FreeText:
    """Free text up to the first complete one of `literals`; no literal contains another one.

    `complete[i]` names the rule of free text that ends with literal i. `going` names the rule of
    everything before a text without special tokens. Both are valid after `define`.
    """

    def __init__(self, rules: LexemeRules, literals: Sequence[str], free: Collection[int]) -> None:
        """Make free text. `free`: the special tokens that the text may hold, including the
        literals' tokens. Raises TooLarge."""
        self._rules = rules
        self._literals = [runs(literal) for literal in literals]
        self._begins: dict[Run, list[int]] = {}
        for index, literal in enumerate(self._literals):
            for run in literal[1:2]:
                self._begins.setdefault(run, []).append(index)
        ends = {"", *(str(literal[0]) for literal in self._literals if len(literal) > 1)}
        self._ends = sorted(ends)
        self._free = frozenset(free)
        self._names = {_NOWHERE: rules.name("at")}
        self._ways: dict[_Place, list[str]] = {_NOWHERE: []}
        complete: list[list[str]] = [[] for _ in literals]
        self._walk(complete)
        self.going = rules.add("any", " | ".join(self._names.values()))
        for index, literal in enumerate(self._literals):
            complete[index] += self._ending_in_text(index, literal)
        self.complete = [rules.add("met", " | ".join(ways)) for ways in complete]

    def define(self, begins: Sequence[str]) -> None:
        """Define the rules for free text behind each of `begins`."""
        for place, name in self._names.items():
            before = begins if place == _NOWHERE else ()
            self._rules.define(name, " | ".join([*before, *self._ways[place]]))

    def _walk(self, complete: list[list[str]]) -> None:
        """Define the rules from place to place."""
        waiting, count = [_NOWHERE], 0
        while waiting:
            place = waiting.pop()
            for text, then, ids in self._steps(place):
                count += 1
                if count > MAX_WAYS:
                    raise TooLarge("special tokens stand in too many triggers")
                way = f"{self._names[place]} {text} {self._rules.one_of(ids)}"
                met = [i for i, done in then if self._literals[i][2 * done :] == [""]]
                if met:
                    complete[met[0]].append(way)
                    continue
                if then not in self._names:
                    self._names[then], self._ways[then] = self._rules.name("at"), []
                    waiting.append(then)
                self._ways[then].append(way)

    def _ending_in_text(self, index: int, literal: list[Run]) -> list[str]:
        last, count = str(literal[-1]), len(literal) // 2
        if not last:
            return []
        if not count:
            return [f"{self.going} {self._rules.add('met', f'{FREE} {lexeme(last)}', _LAZY)}"]
        met = self._rules.add("met", lexeme(last), _LAZY)
        return [f"{name} {met}" for at, name in self._names.items() if (index, count) in at]

    def _steps(self, place: _Place) -> Iterator[tuple[str, _Place, set[int]]]:
        """Yield the steps to the next special token: a text, the place behind the token, and the
        tokens."""
        rests = [self._literals[i][2 * count :] for i, count in place]
        going = {(str(rest[0]), rest[1]) for rest in rests if len(rest) > 1}
        exact = sorted({text for text, _ in going})
        ways = [(text, lexeme(text), True) for text in exact]
        ways += [(text, self._ending(text, exact), False) for text in self._ends]
        special = {*self._begins, *(run for _, run in going)}
        for text, lexed, is_all in ways:
            leads: dict[_Place, set[int]] = {_NOWHERE: {*self._free.difference(special)}}
            for id_ in special:
                assert isinstance(id_, int)
                leads.setdefault(self._then(place, text, is_all, id_), set()).add(id_)
            for then, ids in leads.items():
                if ids:
                    yield lexed, then, ids

    def _then(self, place: _Place, text: str, is_all: bool, id_: int) -> _Place:
        """Return the place after a text and a special token. The text is, or (not `is_all`) ends
        with, `text`."""
        found = set()
        for index in self._begins.get(id_, ()):
            if text.endswith(str(self._literals[index][0])):
                found.add((index, 1))
        for index, count in place if is_all else ():
            if self._literals[index][2 * count : 2 * count + 2] == [text, id_]:
                found.add((index, count + 1))
        return frozenset(found)

    def _ending(self, text: str, exact: Sequence[str]) -> str:
        """Return a lexeme for texts that end with `text`, excluding the texts in `exact`. `text` is
        the longest beginning of a literal with which such a text ends."""
        parts = [f"/(?s:.)*{lexeme(text)[1:]}" if text else _SOME if "" in exact else FREE]
        longer = [end for end in self._ends if end != text and end.endswith(text)]
        parts += [f"~/(?s:.)*{lexeme(end)[1:]}" for end in longer]
        parts += [f"~{lexeme(each)}" for each in exact if each and each.endswith(text)]
        return parts[0] if len(parts) == 1 else self._rules.add("TEXT", " & ".join(parts))


# Lenient ------------------------------------------------------------------------------------------
#
# Lenient structural tags: the remaining part of schemas that masks cannot hold.


def least_of(schema: Any) -> dict[str, Any]:
    """Return the weakest form of a lenient schema, which a mask can always hold. The form keeps
    only `"type": "object"`."""
    is_object = isinstance(schema, dict) and schema.get("type") == "object"
    return {"type": "object"} if is_object else {}


def is_lenient(constraint: Constraint) -> bool:
    """Return whether a constraint may have a lenient schema. Certainty would need parsing, which
    takes time for a large source."""
    return constraint.kind == "structural_tag" and '"lenient"' in constraint.source


def weakest(constraint: Constraint) -> Constraint | None:
    """Return the constraint with each lenient schema in its weakest form; None without a lenient
    schema, or if the constraint cannot be parsed."""
    if not is_lenient(constraint):
        return None
    try:
        value = parsed("structural_tag", constraint.source)
        found = _weakened(value)
    except (InvalidConstraint, RecursionError):
        return None
    if found == value:
        return None
    return msgspec.structs.replace(constraint, source=msgspec.json.encode(found).decode())


def _weakened(value: Any) -> Any:
    if isinstance(value, list):
        return [_weakened(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") not in ("json_schema", "string"):
        return {key: _weakened(item) for key, item in value.items()}
    if value.get("lenient") is not True:
        return value
    if value["type"] == "string":
        return {"type": "any_text"}
    return {"type": "json_schema", "json_schema": least_of(value.get("json_schema"))}


# Source -------------------------------------------------------------------------------------------

MAX_TAG = 16 * MAX_SOURCE
_SCHEMAS = ("json_schema", "schema")
"""Keys of a structural tag whose values are schemas."""


def tag_is_suspicious(source: str) -> bool:
    """Return whether a schema of a tag is suspicious (see `source`), or the tag is too large."""
    if len(source) > MAX_TAG:
        return True
    try:
        schemas = _schemas_of_tag(json.loads(source))
    except (ValueError, RecursionError):
        return False  # the compiler refuses it at once
    return schemas is None or any(
        len(json.dumps(schema)) > MAX_SOURCE or value_is_suspicious(schema) for schema in schemas
    )


def schemas_of_tag(source: str) -> list[str]:
    """Return the schemas of a structural tag, each as JSON text; [] if the tag is malformed."""
    try:
        schemas = _schemas_of_tag(json.loads(source)) or []
    except (ValueError, RecursionError):
        return []  # the compiler refuses it
    return [json.dumps(schema) for schema in schemas if isinstance(schema, dict)]


def _schemas_of_tag(tag: Any) -> list[Any] | None:
    """Return the schemas of a tag; None if the tag is nested too deeply."""
    found: list[Any] = []
    stack: list[tuple[Any, int]] = [([tag], -1)]  # a malformed tag may be null or a number
    while stack:
        node, depth = stack.pop()
        if depth > MAX_DEPTH:
            return None
        if isinstance(node, dict):
            found += [node[key] for key in _SCHEMAS if key in node]
        inner = node.items() if isinstance(node, dict) else ((None, item) for item in node)
        stack += [
            (item, depth + 1)
            for key, item in inner
            if key not in _SCHEMAS and isinstance(item, dict | list)
        ]
    return found


# Structural tag -----------------------------------------------------------------------------------


SchemaAt = Callable[[dict[str, Any] | bool, str, bool], dict[str, Any]]
"""Function from a schema, its place and whether it is lenient to the schema for the grammar."""
_NOTHING = '""'


def lark_of_structural_tag(source: str, schema_at: SchemaAt, special: SpecialTokens) -> str:
    """Write a tag as a Lark grammar.

    A special token's text in a literal becomes that token. Free text may hold all special tokens
    that do not end the sequence. Raises InvalidConstraint naming the place.
    """
    value = parsed("structural_tag", source)
    newer = isinstance(value, dict) and "format" in value
    kind: Any = Outer if newer else Structures
    try:
        outer = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        raise _wrong(place.strip(".`"), what) from None
    writer = _Lark(schema_at, special, set().union(*map(special.within, _texts(value))))
    if isinstance(outer, Structures):
        start = writer.triggered(outer.structures, "structures", outer.triggers)
    elif isinstance(outer.format, Triggered):
        if outer.format.excludes:
            raise _wrong("format.excludes", "is not supported")
        flags = (outer.format.at_least_one, outer.format.stop_after_first)
        start = writer.triggered(outer.format.tags, "format.tags", outer.format.triggers, *flags)
    else:
        start = [*filter(None, writer.of(outer.format, "format"))]
    return "\n".join([f"start: {' | '.join(start)}", *LEXEMES, *writer.rules.lines()]) + "\n"


class _Ways(NamedTuple):
    """Expressions of one text in rules; an expression is empty if there is no such text."""

    open: str = ""
    """Expression that more text may follow."""
    last: str = ""
    """Expression that ends the sequence."""


class _Lark:
    def __init__(self, schema_at: SchemaAt, special: SpecialTokens, named: set[int]) -> None:
        """Make the writer. `named`: the special tokens in literals."""
        self._schema_at = schema_at
        self._special = special
        self._unnamed = special.free - named
        self.rules = LexemeRules()

    def of(self, one: Format, place: str) -> _Ways:
        """Return the expressions of a format; rules of the format are added to `rules`."""
        match one:
            case ConstString():
                return self._ending(one.value, f"{place}.value")
            case Json():
                return _Ways(self._json(one.json_schema, f"{place}.json_schema", one.lenient))
            case Tag():
                return self._tag(one, place)
            case Tags():
                return self._tags(one, place)
            case Or() | SequenceFormat():
                inner = [self.of(e, f"{place}.elements[{i}]") for i, e in enumerate(one.elements)]
                if isinstance(one, Or):
                    return _either(inner)
                first, *rest = inner
                for each in rest:
                    first = self._then(first, each)
                return first

    def triggered(
        self,
        tags: Sequence[Tag | Structure],
        place: str,
        triggers: Sequence[str],
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> list[str]:
        """Return the ways of free text with tags, which stand at `place`."""
        begins = self._begins(tags, place, triggers)
        first = dict.fromkeys(trigger for found in begins for trigger in found)
        free = self._free([*first], "triggers", self._special.free)
        behind_text, at_once = [], []
        for trigger, met in zip(first, free.complete, strict=True):
            bodies = [
                self._tag(tag, f"{place}[{index}]", trigger)
                for index, tag in enumerate(tags)
                if trigger in begins[index]
            ]
            body = self._named(_either(bodies))
            behind_text.append(self._then(_Ways(met), body))
            at_once.append(self._then(_Ways(self.rules.literal(trigger)), body))
        some = self._named(_either(behind_text))
        # As in xgrammar, the required tag comes first: behind free text it may never come.
        begin = _either(at_once) if at_least_one else _Ways(_NOTHING)
        again = [some.open] if not stop_after_first else []
        free.define([*filter(None, [begin.open, *again])] or [_NOTHING])
        if stop_after_first:
            ways = [*begin] if at_least_one else [f"{free.going} {FREE}", *some]
        else:
            more = f"{free.going} {FREE}" if begin.open else ""
            ways = [more, begin.last if at_least_one else "", some.last if begin.open else ""]
        return [*filter(None, ways)]

    def _json(self, schema: dict[str, Any] | bool, place: str, lenient: bool = False) -> str:
        return "%json " + written(self._schema_at(schema, place, lenient))

    def _tag(self, tag: Tag | Structure, place: str, begun: str = "") -> _Ways:
        """Return the expressions of a tag. `begun`: the part of its begin that is already
        written."""
        begin = self.rules.literal(self._literal(tag.begin, f"{place}.begin").removeprefix(begun))
        if isinstance(tag, Structure):
            content = _Ways(self._json(tag.schema, f"{place}.schema"))
        elif isinstance(tag.content, AnyText):
            return self._then(_Ways(begin or _NOTHING), self._any_text(tag.end, f"{place}.end"))
        elif isinstance(tag.content, TextOf):
            return self._then(_Ways(begin or _NOTHING), self._text_of(tag.content, tag.end, place))
        else:
            content = self.of(tag.content, f"{place}.content")
        content = self._then(_Ways(begin or _NOTHING), content)
        return self._then(content, self._ending(tag.end, f"{place}.end"))

    def _any_text(self, end: str, place: str) -> _Ways:
        """Return free text up to its first `end`; an `end` that ends the sequence may be anywhere.

        Readers of an answer may depend on the tokens of other literals, so the text has none of
        these.
        """
        literal = self._literal(end, place, last=True)
        if not literal:
            raise _wrong(place, "what ends any text is missing")
        if not self._special.ends(literal):
            free = self._free([literal], place, self._unnamed)
            free.define([_NOTHING])
            return _Ways(free.complete[0])
        free = self._free([], place, self._unnamed)
        free.define([_NOTHING])
        behind = self.rules.literal(literal[:-2])
        text = f"/(?s:.)*{behind[1:]}" if behind.startswith("/") else f"{FREE} {behind}"
        return _Ways("", f"{free.going} {text}")

    def _text_of(self, text: TextOf, end: str, place: str) -> _Ways:
        """Return the expressions of a text followed by `end`.

        The text does not contain `end` stripped of white space. Text and `end` are one lexeme, as
        the text may contain the beginning of `end`.
        """
        literal = self._literal(end, f"{place}.end")
        if not end.strip():
            raise _wrong(f"{place}.end", "what ends a string is missing")
        try:
            strings = _strings_of(text.json_schema, end.strip())
        except InvalidConstraint as error:
            if text.lenient:
                return self._any_text(end, f"{place}.end")
            reason = str(error).removeprefix("json_schema: ")
            raise _wrong(f"{place}.content.json_schema", reason) from None
        behind = Literal(str(runs(literal)[0]))
        parts = [f"/{pattern_of(concat(one, behind))}/" for one in strings]
        then = self.rules.literal(literal.removeprefix(behind.text))
        return _Ways(_joined(self.rules.add("TEXT", " & ".join(parts)), then or _NOTHING))

    def _tags(self, one: Tags, place: str) -> _Ways:
        tags = [self._tag(tag, f"{place}.tags[{index}]") for index, tag in enumerate(one.tags)]
        each, last = some, _ = self._named(_either(tags))
        if not one.stop_after_first and each:
            between = self.rules.literal(self._literal(one.separator, f"{place}.separator"))
            some = f"{each} ({between} {each})*"
            last = last and f"({each} {between})* {last}"
        some, last = some and f"({some})", last and f"({last})"
        if not one.at_least_one:
            some = f"{some}?" if some else _NOTHING
        return _Ways(some, last)

    def _begins(
        self, tags: Sequence[Tag | Structure], place: str, triggers: Sequence[str]
    ) -> list[list[str]]:
        """Return the triggers of each tag, as literals.

        Triggers that contain another trigger are dropped: the other one is complete first. A
        trigger that ends within a special token is extended to the token's end.
        """
        for index, trigger in enumerate(triggers):
            self._literal(trigger, f"triggers[{index}]")
        whole = [self._literal(tag.begin, f"{place}[{i}].begin") for i, tag in enumerate(tags)]
        texts, known = dict.fromkeys(triggers), dict[str, None]()
        for tag in tags:
            for text in texts:
                if tag.begin.startswith(text):
                    known[self._special.beginning(tag.begin, len(text))] = None
        first = [t for t in known if not any(o != t and o in t for o in known)]
        found = [[t for t in first if begin.startswith(t)] for begin in whole]
        for index, tag in enumerate(tags):
            if not any(map(tag.begin.startswith, texts)):
                what = f"{tag.begin!r} starts with none of the triggers"
            elif not found[index]:
                what = (
                    f"the trigger of {tag.begin!r} holds another trigger, which is complete first"
                )
            else:
                continue
            raise _wrong(f"{place}[{index}].begin", what)
        for text in texts:
            if not any(tag.begin.startswith(text) for tag in tags):
                raise _wrong("triggers", f"no tag begins with {text!r}")
        return found

    def _free(self, literals: Sequence[str], place: str, special: Collection[int]) -> FreeText:
        try:
            return FreeText(self.rules, literals, special)
        except TooLarge as error:
            raise _wrong(place, str(error)) from None

    def _ending(self, text: str, place: str) -> _Ways:
        """Return the expressions of a literal that may end the sequence."""
        literal = self._literal(text, place, last=True)
        if self._special.ends(literal):
            return _Ways("", self.rules.literal(literal[:-2]) or _NOTHING)
        return _Ways(self.rules.literal(literal) or _NOTHING)

    def _literal(self, text: str, place: str, last: bool = False) -> str:
        """Write a literal. `last`: the sequence may end with it."""
        if not is_text(text):
            raise _wrong(place, "a lone surrogate is no character")
        literal = self._special.literal(text)
        before = literal[:-2] if last and self._special.ends(literal) else literal
        if self._special.ends_within(before):
            raise _wrong(place, f"{text!r} goes on behind the end of the sequence")
        return literal

    def _then(self, one: _Ways, other: _Ways) -> _Ways:
        """Concatenate two texts; nothing follows an expression that ends the sequence."""
        if one.open and other.open and other.last:
            one = one._replace(open=self.rules.add("part", one.open))
        ways = [_joined(one.open, each) if one.open and each else "" for each in other]
        return _either([_Ways(*ways), _Ways("", one.last)])

    def _named(self, ways: _Ways) -> _Ways:
        return _Ways(*(each and self.rules.add("part", each) for each in ways))


MAX_COUNTED = 2000
"""Most characters of a string that are counted; lexemes that count some thousands are refused."""


def _strings_of(schema: dict[str, Any], close: str) -> list[Regex]:
    """Return languages whose intersection is the strings of a schema.

    Raises InvalidConstraint, which names the keyword, if the strings cannot be determined, or if
    every listed string contains `close`.
    """
    PreparedSchema({"type": "string", **schema})  # refuses malformed or empty schemas
    for keyword in sorted(schema.keys() & IN_PLACE):
        raise invalid(f"#/{keyword}", f"no mask can hold {keyword!r} in a text")
    for keyword in ("minLength", "maxLength"):
        if schema.get(keyword, 0) > MAX_COUNTED:
            raise invalid(f"#/{keyword}", f"more than {MAX_COUNTED} characters of a text")
    anything = repeat(Chars(ALL), 0, None)
    found = [
        in_all([], but=[concat(anything, Literal(close), anything)]),
        repeat(Chars(ALL), schema.get("minLength", 0), schema.get("maxLength")),
    ]
    for keyword in sorted(schema.keys() & {"const", "enum"}):
        listed = schema["enum"] if keyword == "enum" else [schema["const"]]
        texts = [one for one in listed if isinstance(one, str) and close not in one]
        if not texts:
            raise invalid(f"#/{keyword}", f"a text ends where it holds {close!r}")
        found.append(either(*map(Literal, texts)))
    if "pattern" in schema:
        try:
            found.append(regex_of_pattern(schema["pattern"]))
        except NotTranslated as error:
            raise invalid("#/pattern", f"no mask can hold it in a text: {error}") from None
    if schema.get("format") in FORMATS:
        found.append(regex_of_format(schema["format"]))
    return found


def _joined(one: str, other: str) -> str:
    return " ".join(part for part in (one, other) if part != _NOTHING) or _NOTHING


def _either(ways: Iterable[_Ways]) -> _Ways:
    several = [[each for each in kind if each] for kind in zip(*ways, strict=True)]
    return _Ways(*(f"({' | '.join(kind)})" if len(kind) > 1 else "".join(kind) for kind in several))


def _texts(notation: Any) -> Iterator[str]:
    """Yield all strings of a tag, except those in schemas."""
    if isinstance(notation, str):
        yield notation
    elif isinstance(notation, list):
        for each in notation:
            yield from _texts(each)
    elif isinstance(notation, dict):
        for key, each in notation.items():
            if key not in ("schema", "json_schema"):
                yield from _texts(each)


def _wrong(place: str, what: str) -> InvalidConstraint:
    return InvalidConstraint(f"structural_tag: {place}{': ' if place else ''}{what}")
