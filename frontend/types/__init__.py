"""Python types as constraints: the JSON schema of a type, and its value read back from text.

msgspec knows the standard library's types, dataclasses, TypedDicts, NamedTuples, enums and its own
Structs; pydantic's models describe and read themselves. The schemas here are *closed* (an object
has no properties but the type's), and for keys, dates and binary data they allow exactly what the
reader accepts. So a generated text has an end and can be read back.

`msgspec_types` and `pydantic_types` describe the types that these libraries know. `partial_json`
reads a value that is still being written, `schema_keywords` finds misspelt keywords in schemas.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from rootlace.types import msgspec_types, pydantic_types
from rootlace.types.msgspec_types import name_of
from rootlace.wire.errors import InvalidConstraint

__all__ = ["Schema", "name_of", "parse_as", "schema_of", "schema_text"]

Schema = dict[str, Any]


def schema_of(kind: Any) -> Schema:
    """The JSON schema (draft 2020-12) whose valid texts `parse_as` turns into values of `kind`.

    Takes pydantic (v2) models, dataclasses, TypedDicts, NamedTuples, msgspec Structs, Literals,
    Enums (JSON has their values), plain types and combinations of them; `Annotated` with
    `msgspec.Meta`, pydantic's `Field` or `annotated_types`. Properties keep the order of the
    type's fields; one with a default may be left out. Raises InvalidConstraint naming the type.
    """
    if isinstance(kind, str):
        raise InvalidConstraint(f"type must be a type, not the string {kind!r}")
    try:
        if pydantic_types.is_pydantic(kind):
            return pydantic_types.schema_of(kind)
        return msgspec_types.schema_of(kind)
    except InvalidConstraint as error:
        raise InvalidConstraint(f"no JSON schema can be made of {name_of(kind)}: {error}") from None
    except Exception as error:  # the type's own hooks may raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise InvalidConstraint(
            f"no JSON schema can be made of {name_of(kind)}: {reason}"
        ) from error


def parse_as(kind: Any, text: str) -> Any:
    """The value of type `kind` that JSON `text` stands for. Raises ValueError with the reason."""
    try:
        if pydantic_types.is_pydantic(kind):
            return pydantic_types.parse_as(kind, text)
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(str(error)) from error


def schema_text(kind: Any) -> str:
    """`schema_of` as compact JSON text; made once per type."""
    try:
        return _cached_text(kind)
    except TypeError:  # some annotations cannot be hashed
        return _text(kind)


def _text(kind: Any) -> str:
    return msgspec.json.encode(schema_of(kind)).decode()


@functools.lru_cache(maxsize=512)
def _cached_text(kind: Any) -> str:
    return _text(kind)
