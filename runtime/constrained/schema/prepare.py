"""From a JSON schema to what the backends take: a schema for the mask, and a check of the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rootlace.runtime.constrained.schema.check import CheckedSchema, invalid
from rootlace.runtime.constrained.schema.relax import relax, written
from rootlace.runtime.constrained.schema.residual import Residual
from rootlace.runtime.constrained.schema.search import searcher
from rootlace.runtime.constrained.schema.verify import Rules, Verifier
from rootlace.runtime.constrained.sources.source import parsed_schema
from rootlace.wire.errors import InvalidConstraint


@dataclass(frozen=True)
class PreparedSchema:
    """A schema, well-formed and not found to be unsatisfiable.

    `mask_schema` allows every text that `original` allows (in the order of its properties), and
    those more that `residuals` names; it is self-contained (`$ref`s are local) and known to be
    taken by llguidance. `verifier_factory` makes a check of one text as it comes; None where the
    mask holds everything.
    """

    original: dict[str, Any] | bool
    mask_schema: dict[str, Any]
    residuals: tuple[Residual, ...]
    verifier_factory: Callable[[], Verifier] | None


def prepare(
    source: str,
    *,
    strict: bool = False,
    documents: Mapping[str, Any] | None = None,
) -> PreparedSchema:
    """Raises InvalidConstraint, naming the JSON pointer, where the schema is malformed, refers to
    what is not there, is found to be unsatisfiable or (`strict`) has a residual keyword."""
    return prepare_value(parsed_schema(source), strict=strict, documents=documents)


def prepare_value(
    schema: dict[str, Any] | bool,
    *,
    strict: bool = False,
    documents: Mapping[str, Any] | None = None,
) -> PreparedSchema:
    """As `prepare`, of a schema that is parsed."""
    checked = CheckedSchema(schema, documents or {})
    _check_patterns(checked, of_keys=True)
    rules = Rules(checked)
    relaxed = relax(checked, rules.satisfies)
    if strict and relaxed.residuals:
        first = relaxed.residuals[0]
        place = written(first.pointer, schema)
        keyword = first.keyword if place == first.pointer else place.rpartition("/")[2]
        raise invalid(place, f"no mask can hold {keyword!r} here (strict)")
    if not relaxed.residuals:
        return PreparedSchema(schema, relaxed.schema, (), None)
    _check_patterns(checked, of_keys=False)
    rules.watch(relaxed.residuals)
    return PreparedSchema(schema, relaxed.schema, relaxed.residuals, lambda: Verifier(rules))


def _check_patterns(checked: CheckedSchema, of_keys: bool) -> None:
    """Refuse what a check could not search for."""
    for pointer, pattern, is_of_keys in checked.patterns():
        if is_of_keys is of_keys:
            try:
                searcher(pattern)
            except InvalidConstraint as error:
                raise invalid(pointer, f"{pattern!r}: {error}") from None
