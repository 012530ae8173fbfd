"""Which members of a value a schema may evaluate, all its alternatives taken together (2020-12,
sections 11.2 and 11.3)."""

from __future__ import annotations

from rootlace.runtime.constrained.schema.check import CheckedSchema, Located, reached

_ALTERNATIVES = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "$dynamicRef")
_APPLIED = frozenset(["$ref", "allOf", *_ALTERNATIVES])


def _in_place(checked: CheckedSchema, root: Located) -> tuple[list[Located], bool]:
    """The schemas that may apply to the value that `root` applies to, `root` first, and whether
    all of them do (none is an alternative)."""

    def applied(located: Located) -> list[Located]:
        below = [one for key, one in checked.neighbours(located) if key in _APPLIED]
        if "$dynamicRef" in located.keywords:
            below += checked.dynamic_targets(located)
        return below

    found = reached([root], applied)
    return found, not any(key in one.keywords for one in found for key in _ALTERNATIVES)


def evaluated_keys(
    checked: CheckedSchema, root: Located
) -> tuple[set[str] | None, list[str], bool]:
    """The names and patterns of the keys that may be evaluated (names None: any key), and whether
    they are in every case."""
    names: set[str] = set()
    patterns: list[str] = []
    schemas, sure = _in_place(checked, root)
    for located in schemas:
        schema = located.keywords
        if "$recursiveRef" in schema or "additionalProperties" in schema:
            return None, [], sure
        if located != root and schema.get("unevaluatedProperties", False) is not False:
            return None, [], False
        names |= set(schema.get("properties", ()))
        patterns += schema.get("patternProperties", ())
    return names, patterns, sure


def evaluated_items(checked: CheckedSchema, root: Located) -> tuple[int | None, bool]:
    """How many items from the first may be evaluated (None: any), and whether they always are."""
    count = 0
    schemas, sure = _in_place(checked, root)
    for located in schemas:
        schema = located.keywords
        if "items" in schema:
            return None, sure
        if "contains" in schema or "$recursiveRef" in schema:
            return None, False
        if located != root and schema.get("unevaluatedItems", False) is not False:
            return None, False
        count = max(count, len(schema.get("prefixItems", ())))
    return count, sure
