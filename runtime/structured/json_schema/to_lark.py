"""Masks with constants that llguidance would write in its own way, as rules of a Lark grammar.

llguidance's `%json` writes a number of `enum` in its own spelling (`1` for `1.0`, `0.0000001` for
`1e-7`) and has none for some texts (U+007F). A schema with such constants is written out, rule by
rule, as `to_regex.whole_regex` would write it, so that the constants stand as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rootlace.runtime.structured.json_schema import json_text
from rootlace.runtime.structured.json_schema.json_text import NotRegular, Ours
from rootlace.runtime.structured.json_schema.load import subschemas
from rootlace.runtime.structured.json_schema.pattern import NotTranslated
from rootlace.runtime.structured.json_schema.to_regex import keys_of_patterns
from rootlace.runtime.structured.regex.syntax import (
    ALL,
    NOTHING,
    Chars,
    Literal,
    Regex,
    TooLarge,
    concat,
    either,
    pattern_of,
    repeat,
)

MOST_RULES = 800
"""Rules of one schema. Each property is a rule within the rule of the one before, and llguidance
follows rules on the stack: about 1 KiB for each."""
_TYPES = ("null", "boolean", "number", "string", "array", "object")


def has_own_spelling(mask: dict[str, Any]) -> bool:
    """Whether a constant in the schema of a mask is one that `%json` does not write as it is."""
    return any(
        isinstance(schema, dict) and any(map(_is_respelt, schema.get("enum", ())))
        for schema in within(mask)
    )


def within(mask: dict[str, Any]) -> Iterator[Any]:
    """The schemas in the schema of a mask, the booleans among them."""
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
    """The name of a rule for the texts of a mask schema, with `gap` between tokens, and that rule
    with all that it needs. None where `%json` writes the schema, or nothing else does. Names begin
    with `prefix`."""
    if not has_own_spelling(mask):
        return None
    writer = _Writer(mask, gap, prefix)
    root = {key: value for key, value in mask.items() if key not in ("$defs", "x-guidance")}
    try:
        return writer.rule(writer.value(root)), writer.lines
    except (NotRegular, NotTranslated, TooLarge, RecursionError):
        return None


class _Writer:
    """Turns schemas in normal form into the right sides of rules."""

    def __init__(self, mask: Mapping[str, Any], gap: Regex, prefix: str) -> None:
        self.lines: list[str] = []
        self._prefix = prefix
        self._definitions = mask.get("$defs", {})
        self._options = {key: mask[key] for key in ("x-guidance",) if key in mask}
        self._names: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._spelling = Ours()
        self._keys = json_text.key_escapes(mask)
        self._gap = gap
        self._comma = self._token(json_text.separated(",", gap))
        self._colon = self._token(json_text.separated(":", gap))

    def rule(self, body: str) -> str:
        if len(self.lines) >= MOST_RULES:
            raise TooLarge(f"more than {MOST_RULES} rules")
        name = f"{self._prefix}r{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        if body not in self._terminals:
            self._terminals[body] = name = f"{self._prefix.upper()}T{len(self._terminals)}"
            self.lines.append(f"{name}: {body}")
        return self._terminals[body]

    def _token(self, regex: Regex) -> str:
        """Of a text that is read as one; "" where there is none."""
        return "" if regex == NOTHING else self._terminal(f"/{pattern_of(regex)}/")

    def value(self, schema: Any) -> str:
        """The texts of a value; "" where there is none."""
        if schema is False:
            return ""
        if schema is True or not schema:
            return self._definition("", {"type": list(_TYPES)})
        if "$ref" in schema:
            name = schema["$ref"].removeprefix("#/$defs/")
            return self._definition(name, self._definitions[name])
        if "anyOf" in schema:
            return self._one_of([self.value(option) for option in schema["anyOf"]])
        if isinstance(schema.get("type"), list):
            return self._one_of([self.value({**schema, "type": one}) for one in schema["type"]])
        if list(schema) == ["enum"]:
            literals = (self._spelling.literal(value, self._gap) for value in schema["enum"])
            return self._token(either(*literals))
        match schema.get("type"):
            case "null":
                return self._token(Literal("null"))
            case "boolean":
                return self._token(either(Literal("true"), Literal("false")))
            case "string" | "integer" | "number" as kind:
                as_regex = self._spelling.string if kind == "string" else self._spelling.number
                try:
                    return self._token(as_regex(schema))
                except (NotRegular, NotTranslated):  # has no constants
                    return f"%json {json.dumps({**schema, **self._options})}"
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
        raise NotRegular(f"the keywords {sorted(schema)}")

    def _one_of(self, options: list[str]) -> str:
        return " | ".join(option for option in options if option)

    def _definition(self, name: str, schema: Any) -> str:
        if name not in self._names:
            self._names[name] = f"{self._prefix}d{len(self._names)}"
            body = self.value(schema)
            if not body:
                raise NotRegular("a definition without a value")
            self.lines.append(f"{self._names[name]}: {body}")
        return self._names[name]

    def _array(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        given = list(map(self.value, schema.get("prefixItems", ())))[:most]
        if "" in given:
            given = given[: given.index("")]
            most = len(given)
        tail = "" if most == len(given) else self.value(schema.get("items", {}))
        if least > len(given) and not tail:
            raise NotRegular("an array that nothing satisfies")
        if tail:
            # `given`, and then `tail` at most so many times.
            tail = self.rule(tail)
            low, high = max(least - len(given), 0), "" if most is None else most - len(given)
            body = f"({self._comma} {tail}){{{low},{high}}}"
            if not given:
                low, high = max(least - 1, 0), "" if most is None else most - 1
                body = f"{tail} ({self._comma} {tail}){{{low},{high}}}"
        else:
            body = ""
        for index in reversed(range(len(given))):
            if body and index + 1 >= least:
                body = f"{self.rule(body)}?"
            item = self.rule(given[index])
            body = f"{self._comma if index else ''} {item} {body}"
        return self._enclosed("[", body, "]", bool(least))

    def _object(self, schema: dict[str, Any]) -> str:
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        required = set(schema.get("required", ()))
        pairs: list[tuple[str, bool]] = []
        names = [self._spelling.literal(name, self._gap) for name in schema.get("properties", {})]
        for name, (key, inner) in zip(names, schema.get("properties", {}).items(), strict=True):
            held = self.value(inner)
            if held:
                held = f"{self._token(name)} {self._colon} {self.rule(held)}"
                pairs.append((held, key in required))
            elif key in required:
                raise NotRegular("an object that nothing satisfies")
        others: list[str] = []
        patterns = keys_of_patterns(
            schema.get("patternProperties", ()), schema.get("properties", ())
        )
        for pattern, keys in patterns.items():
            names.append(json_text.string_of(keys, self._keys))
            if held := self.value(schema["patternProperties"][pattern]):
                others.append(f"{self._token(names[-1])} {self._colon} {self.rule(held)}")
        if held := self.value(schema.get("additionalProperties", {})):
            key = pattern_of(json_text.string_of(repeat(Chars(ALL), 0, None), self._keys))
            but = f" & ~/{pattern_of(either(*names))}/" if names else ""
            other = self._terminal(f"/{key}/{but}")
            others.append(f"{other} {self._colon} {self.rule(held)}")
        pair = self.rule(" | ".join(others)) if others else ""
        # What may follow so many pairs, or `counted` and more; None where nothing satisfies.
        counted = max(least, most or 0, 1)
        rests = {count: self._others(pair, count, least, most) for count in range(counted + 1)}
        for named, must in reversed(pairs):
            named = self.rule(named)
            rests = {
                count: self._rest(
                    f"{self._comma if count else ''} {named}",
                    rests[min(count + 1, counted)] if count != most else None,
                    None if must else rests[count],
                )
                for count in range(counted + 1)
            }
        must = bool(least or required)
        if rests[0] is None and must:
            raise NotRegular("an object that nothing satisfies")
        return self._enclosed("{", rests[0] or "", "}", must)

    def _others(self, pair: str, count: int, least: int, most: int | None) -> str | None:
        """Pairs that have no names, behind `count` others; not nothing where these are none."""
        low, high = max(least - count, int(not count)), None if most is None else most - count
        if high is not None and high < low:
            return None
        if not pair or high == 0:
            return None if low else ""
        body = f"{self._comma} {pair}"
        if count:
            return f"({body}){{{low},{'' if high is None else high}}}"
        return f"{pair} ({body}){{{low - 1},{'' if high is None else high - 1}}}"

    def _rest(self, named: str, behind: str | None, without: str | None) -> str | None:
        """A pair with what is behind it, or what is there without it."""
        options = [] if behind is None else [f"{named} {behind}"]
        if without is None and not options:
            return None
        options += [without] if without else []
        body = " | ".join(options)
        return self.rule(f"({body})?" if without == "" else body)

    def _enclosed(self, opening: str, body: str, closing: str, must: bool) -> str:
        empty = self._token(concat(Literal(opening), self._gap, Literal(closing)))
        if not body:
            return empty
        begin = self._token(concat(Literal(opening), self._gap))
        end = self._token(concat(self._gap, Literal(closing)))
        full = f"{begin} {body} {end}"
        return full if must else f"{empty} | {full}"
