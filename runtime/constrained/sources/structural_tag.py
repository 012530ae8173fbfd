"""Structural tags as llguidance's grammars: see `tag_formats`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.schema.guidance import written
from rootlace.runtime.constrained.sources import tag_formats as given
from rootlace.runtime.constrained.sources.free_text import FREE, LEXEMES, FreeText
from rootlace.runtime.constrained.sources.literals import SpecialTokens
from rootlace.runtime.constrained.sources.rules import Rules
from rootlace.runtime.constrained.sources.source import is_text, parsed
from rootlace.wire.errors import InvalidConstraint

SchemaAt = Callable[[dict[str, Any] | bool, str, bool], dict[str, Any]]
"""What of a schema, which stands at a place and may be lenient, goes into the grammar."""
_NOTHING = '""'


def lark_of_structural_tag(source: str, schema_at: SchemaAt, special: SpecialTokens) -> str:
    """Where a literal holds the text of a special token, it is this token in the grammar, and free
    text may hold all that do not end the sequence. Raises InvalidConstraint naming the place."""
    value = parsed("structural_tag", source)
    newer = isinstance(value, dict) and "format" in value
    kind: Any = given.Outer if newer else given.Structures
    try:
        outer = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        raise _wrong(place.strip(".`"), what) from None
    writer = _Lark(schema_at, special, set().union(*map(special.within, _texts(value))))
    if isinstance(outer, given.Structures):
        start = writer.triggered(outer.structures, "structures", outer.triggers)
    elif isinstance(outer.format, given.Triggered):
        if outer.format.excludes:
            raise _wrong("format.excludes", "is not supported")
        flags = (outer.format.at_least_one, outer.format.stop_after_first)
        start = writer.triggered(outer.format.tags, "format.tags", outer.format.triggers, *flags)
    else:
        start = [*filter(None, writer.of(outer.format, "format"))]
    return "\n".join([f"start: {' | '.join(start)}", *LEXEMES, *writer.rules.lines()]) + "\n"


class _Ways(NamedTuple):
    """What stands for a text in rules; empty where there is no such text."""

    open: str = ""
    """That more may follow."""
    last: str = ""
    """That the sequence ends with."""


class _Lark:
    def __init__(self, schema_at: SchemaAt, special: SpecialTokens, named: set[int]) -> None:
        """`named` are the special tokens in literals."""
        self._schema_at = schema_at
        self._special = special
        self._unnamed = special.free - named
        self.rules = Rules()

    def of(self, one: given.Format, place: str) -> _Ways:
        """What stands for it in a rule; rules of its own are in `rules`."""
        match one:
            case given.ConstString():
                return self._ending(one.value, f"{place}.value")
            case given.Json():
                return _Ways(self._json(one.json_schema, f"{place}.json_schema", one.lenient))
            case given.Tag():
                return self._tag(one, place)
            case given.Tags():
                return self._tags(one, place)
            case given.Or() | given.Sequence():
                inner = [self.of(e, f"{place}.elements[{i}]") for i, e in enumerate(one.elements)]
                if isinstance(one, given.Or):
                    return _either(inner)
                first, *rest = inner
                for each in rest:
                    first = self._then(first, each)
                return first

    def triggered(
        self,
        tags: Sequence[given.Tag | given.Structure],
        place: str,
        triggers: Sequence[str],
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> list[str]:
        """Free text with tags, which stand at `place`: the ways there are."""
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
        # As xgrammar has it, the one that there has to be comes first: behind free text it may
        # never.
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

    def _tag(self, tag: given.Tag | given.Structure, place: str, begun: str = "") -> _Ways:
        """`begun`: the literal that is there of its begin."""
        begin = self.rules.literal(self._literal(tag.begin, f"{place}.begin").removeprefix(begun))
        if isinstance(tag, given.Structure):
            content = _Ways(self._json(tag.schema, f"{place}.schema"))
        elif isinstance(tag.content, given.AnyText):
            return self._then(_Ways(begin or _NOTHING), self._any_text(tag.end, f"{place}.end"))
        else:
            content = self.of(tag.content, f"{place}.content")
        content = self._then(_Ways(begin or _NOTHING), content)
        return self._then(content, self._ending(tag.end, f"{place}.end"))

    def _any_text(self, end: str, place: str) -> _Ways:
        """Free text up to its first `end`; where that ends the sequence, it is anywhere. What is
        read of an answer may depend on the tokens of other literals: they do not stand in it."""
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

    def _tags(self, one: given.Tags, place: str) -> _Ways:
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
        self, tags: Sequence[given.Tag | given.Structure], place: str, triggers: Sequence[str]
    ) -> list[list[str]]:
        """For each tag its triggers, as literals, without those that hold another one: they are
        never the first to be complete. A trigger that ends within a special token has all of it."""
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
        """A literal that the sequence may end with."""
        literal = self._literal(text, place, last=True)
        if self._special.ends(literal):
            return _Ways("", self.rules.literal(literal[:-2]) or _NOTHING)
        return _Ways(self.rules.literal(literal) or _NOTHING)

    def _literal(self, text: str, place: str, last: bool = False) -> str:
        """`last`: the sequence may end with it."""
        if not is_text(text):
            raise _wrong(place, "a lone surrogate is no character")
        literal = self._special.literal(text)
        before = literal[:-2] if last and self._special.ends(literal) else literal
        if self._special.ends_within(before):
            raise _wrong(place, f"{text!r} goes on behind the end of the sequence")
        return literal

    def _then(self, one: _Ways, other: _Ways) -> _Ways:
        """Nothing follows what the sequence ends with."""
        if one.open and other.open and other.last:
            one = one._replace(open=self.rules.add("part", one.open))
        ways = [_joined(one.open, each) if one.open and each else "" for each in other]
        return _either([_Ways(*ways), _Ways("", one.last)])

    def _named(self, ways: _Ways) -> _Ways:
        return _Ways(*(each and self.rules.add("part", each) for each in ways))


def _joined(one: str, other: str) -> str:
    return " ".join(part for part in (one, other) if part != _NOTHING) or _NOTHING


def _either(ways: Iterable[_Ways]) -> _Ways:
    several = [[each for each in kind if each] for kind in zip(*ways, strict=True)]
    return _Ways(*(f"({' | '.join(kind)})" if len(kind) > 1 else "".join(kind) for kind in several))


def _texts(notation: Any) -> Iterator[str]:
    """All strings in it, but for those of schemas."""
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
