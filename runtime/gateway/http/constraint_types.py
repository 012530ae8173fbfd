"""The fields that ask for a constraint, in the spellings of OpenAI, sglang and vLLM, and ours."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all bodies: a misspelt field is an error."""


class ConstraintBody(Body):
    """One constraint (sglang's names, and `choices`), and how it is enforced.

    `whitespace`, `strict` and `jump_forward` are those of `protocol.Constraint`; they hold for a
    constraint in any spelling, and do nothing without one.
    """

    regex: str | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    ebnf: str | None = None
    choices: list[str] | None = None
    structural_tag: dict[str, Any] | str | None = None

    whitespace: Literal["compact", "flexible"] | None = None
    strict: bool | None = None
    jump_forward: Literal["canonical", "off"] | bool | None = None


class JsonSchema(Body):
    """`response_format.json_schema`. `strict` is ignored: the schema is always enforced."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's, and `structural_tag`: sglang's with `structures` and `triggers`, or xgrammar's with
    a `format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Body):
    """vLLM's newer spelling of its `guided_*` fields."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    # refused if true: a schema means what it says
    disable_additional_properties: bool | None = None
    # accepted and ignored: there is no fallback that would give up exactness
    disable_fallback: bool | None = None
