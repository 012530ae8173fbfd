"""Which specs a decoder can compute: a decoder lists what it knows, the rest is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

Knows = Callable[[Any], bool]
"""Whether a decoder can compute a value of a field."""
Support = Mapping[str, Knows]
"""By a field's path in the spec ("attention.scale"): the values a decoder knows. For a part of the
spec: the types of it. A field that is not here is known at its default only."""


def anything(value: object) -> bool:
    """Whatever value the field has."""
    return True


def any_value(*paths: str) -> Support:
    """These fields, with `anything` in them."""
    return dict.fromkeys(paths, anything)


def one_of(*values: object) -> Knows:
    """These values and no others."""
    return lambda value: value in values


def kind(*types: type) -> Knows:
    """A part of the spec, as one of these types states it."""
    return lambda value: type(value) in types


def why_not(spec: Any, support: Support, prefix: str = "") -> str | None:
    """The first field whose value is not supported, in words; None if there is none."""
    for field in fields(spec):
        path, value = prefix + field.name, getattr(spec, field.name)
        knows = support.get(path)
        if knows is None and (field.default is MISSING or value != field.default):
            return f"{path} {_shown(value)} is not known"
        if knows is not None and not knows(value):
            return f"{path} {_shown(value)} is not supported"
        if is_dataclass(value):
            found = why_not(value, support, f"{path}.")
            if found is not None:
                return found
    return None


def _shown(value: object) -> str:
    return type(value).__name__ if is_dataclass(value) else repr(value)
