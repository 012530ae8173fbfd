"""jsonschema's validators with patterns that are searched for in linear time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from jsonschema import ValidationError
from jsonschema.validators import extend, validator_for
from referencing.jsonschema import lookup_recursive_ref

from rootlace.runtime.constrained.schema.search import searcher


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(value, "string") and not searcher(pattern)(value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], value: Any, schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(value, "object"):
        return
    for pattern, subschema in patterns.items():
        for key, member in value.items():
            if searcher(pattern)(key):
                yield from validator.descend(member, subschema, path=key, schema_path=pattern)


def _additional_properties(
    validator: Any, additional: Any, value: Any, schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(value, "object"):
        return
    for key in _additional_keys(value, schema):
        if additional is False:
            yield ValidationError(f"Additional properties are not allowed ({key!r} was unexpected)")
        else:
            yield from validator.descend(value[key], additional, path=key)


def _additional_keys(value: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """The keys of `value` that neither `properties` nor `patternProperties` are about."""
    patterns = schema.get("patternProperties", {})
    return [
        key
        for key in value
        if key not in schema.get("properties", {})
        and not any(searcher(pattern)(key) for pattern in patterns)
    ]


def _unevaluated_properties(
    validator: Any, unevaluated: Any, value: Any, schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(value, "object"):
        return
    evaluated = _evaluated_keys(validator, value, schema)
    for key, member in value.items():
        if key in evaluated:
            continue
        for _ in validator.descend(member, unevaluated, path=key, schema_path=key):
            yield ValidationError(f"Unevaluated property {key!r} is not valid")
            break


def _evaluated_keys(validator: Any, value: dict[str, Any], schema: Any) -> set[str]:
    """The keys of `value` that keywords of `schema`, or of schemas applied in place, took care of
    (2020-12, section 11.3)."""
    if isinstance(schema, bool):
        return set()
    if "additionalProperties" in schema:
        return set(value)
    keys = value.keys() - _additional_keys(value, schema)
    if "unevaluatedProperties" in schema:
        below = schema["unevaluatedProperties"]
        keys |= {key for key, member in value.items() if _valid(validator, member, below)}
    for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
        if keyword in schema and keyword in validator.VALIDATORS:
            # Private, but there is no other way to where the validator stands.
            resolver = validator._resolver
            resolved = (
                lookup_recursive_ref(resolver)
                if keyword == "$recursiveRef"
                else resolver.lookup(schema[keyword])
            )
            there = validator.evolve(schema=resolved.contents, _resolver=resolved.resolver)
            keys |= _evaluated_keys(there, value, resolved.contents)
    applied = list(schema.get("allOf", ()))
    for keyword in ("anyOf", "oneOf"):
        applied += [below for below in schema.get(keyword, ()) if _valid(validator, value, below)]
    applied += [below for key, below in schema.get("dependentSchemas", {}).items() if key in value]
    if "if" in schema:
        met = _valid(validator, value, schema["if"])
        branches = ("if", "then") if met else ("else",)
        applied += [schema[branch] for branch in branches if branch in schema]
    for below in applied:
        # `evolve` moves to the schema's own base URI.
        keys |= _evaluated_keys(validator.evolve(schema=below), value, below)
    return keys


def _valid(validator: Any, value: Any, schema: Any) -> bool:
    return next(validator.descend(value, schema), None) is None


_BOUNDED = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "unevaluatedProperties": _unevaluated_properties,
}


@lru_cache(maxsize=16)
def bounded(validator_class: Any) -> Any:
    """`validator_class` of jsonschema, none of whose checks is exponential in the value."""
    if validator_class.VALIDATORS.get("pattern") is _pattern:
        return validator_class
    found = extend(
        validator_class,
        {name: check for name, check in _BOUNDED.items() if name in validator_class.VALIDATORS},
    )
    found.evolve = _evolve
    return found


def _evolve(self: Any, **changes: Any) -> Any:
    """As jsonschema's own, but where `$schema` names another draft its class is bounded, too."""
    schema = changes.get("schema", self.schema)
    return bounded(validator_for(schema, default=type(self)))(
        schema,
        registry=self._registry,
        format_checker=self.format_checker,
        _resolver=changes.get("_resolver", self._resolver),
    )
