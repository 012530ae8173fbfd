"""Regexes and schemas as users ask for them, with texts that satisfy them or do not.

The folder `data/` has them, one per line, all written for this project: arguments of tools, records
from text, configuration, orders, answers of services, trees. Valid instances have their properties
in the schema's order, so that they can be generated as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

DATA = Path(__file__).with_name("data")

T = TypeVar("T")


class NamedSchema(msgspec.Struct, frozen=True):
    """`valid` and `invalid` are instances of `schema` (draft 2020-12, formats asserted)."""

    name: str
    schema: dict[str, Any]
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]


class NamedRegex(msgspec.Struct, frozen=True):
    """`pattern` in the syntax of Python's `re`; `examples` match it whole."""

    name: str
    pattern: str
    examples: tuple[str, ...]


def _lines(file: str, kind: type[T]) -> Iterator[T]:
    for line in (DATA / file).read_bytes().splitlines():
        yield msgspec.json.decode(line, type=kind)


SCHEMAS = tuple(_lines("schemas.jsonl", NamedSchema))
REGEXES = tuple(_lines("regexes.jsonl", NamedRegex))
