"""From the bodies' sampling fields to `SamplingParams` and `Constraint`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from rootlace.protocol import Constraint, SamplingParams
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.openai_types import ResponseFormat, SamplingBody

_FIRST_WORD = re.compile(r"[a-z_]+")


def make_params(
    fields: Mapping[str, Any], vocab_size: int, names: Mapping[str, str] | None = None
) -> SamplingParams:
    """`SamplingParams` of the fields that are not None (`max_tokens` may be: no limit).

    `names` gives, where it differs, what the client calls a field. Raises InvalidParameter naming
    the field as the client does.
    """
    names = names or {}
    given = {
        key: value for key, value in fields.items() if value is not None or key == "max_tokens"
    }
    for key in ("stop_token_ids", "logit_bias"):
        for token in given.get(key, ()):
            if not 0 <= token < vocab_size:
                param = names.get(key, key)
                raise InvalidParameter(
                    param, f"{param}: {token} is not a token id (vocabulary of {vocab_size})"
                )
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise _named(str(error), names) from None


def _named(message: str, names: Mapping[str, str]) -> InvalidParameter:
    """The error of `SamplingParams`, told in the client's names."""
    for ours, theirs in names.items():
        message = re.sub(rf"\b{ours}\b", theirs, message)
    if "stop string" in message:
        return InvalidParameter("stop", f"stop: {message}")
    first = _FIRST_WORD.match(message)
    return InvalidParameter(first[0] if first else "sampling_params", message)


def as_tuple(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def openai_fields(body: SamplingBody) -> dict[str, Any]:
    """The fields of `SamplingParams` that both of OpenAI's endpoints spell alike."""
    return {
        "n": body.n,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k == 0 else body.top_k,  # vLLM's 0 is "off" as well
        "min_p": body.min_p,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "repetition_penalty": body.repetition_penalty,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "stop": as_tuple(body.stop),
        "stop_token_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "seed": body.seed,
        "logit_bias": body.logit_bias,
        "skip_special_tokens": body.skip_special_tokens,
        "no_stop_trim": body.include_stop_str_in_output or body.no_stop_trim,
    }


def openai_constraint(body: SamplingBody) -> Constraint | None:
    """The one constraint a body asks for. Raises InvalidParameter when it asks for several."""
    outputs = body.structured_outputs
    found = {
        "response_format": _of_response_format(body.response_format),
        "regex": _of("regex", body.regex),
        "json_schema": _of("json_schema", body.json_schema),
        "ebnf": _of("ebnf", body.ebnf),
        "guided_regex": _of("regex", body.guided_regex),
        "guided_json": _of("json_schema", body.guided_json),
        "guided_choice": _of("choices", body.guided_choice),
        "guided_grammar": _of("ebnf", body.guided_grammar),
    }
    if outputs is not None:
        found |= {
            "structured_outputs.json": _of("json_schema", outputs.json),
            "structured_outputs.regex": _of("regex", outputs.regex),
            "structured_outputs.choice": _of("choices", outputs.choice),
            "structured_outputs.grammar": _of("ebnf", outputs.grammar),
            "structured_outputs.json_object": _any_object() if outputs.json_object else None,
        }
    return only_one(found)


def only_one(found: Mapping[str, Constraint | None]) -> Constraint | None:
    """The constraint among `found`, which is keyed by field. Raises InvalidParameter if several."""
    given = {name: constraint for name, constraint in found.items() if constraint is not None}
    if len(given) > 1:
        names = list(given)
        raise InvalidParameter(names[1], f"only one constraint is possible, not {', '.join(names)}")
    return next(iter(given.values()), None)


def _of(kind: Any, source: str | dict[str, Any] | list[str] | None) -> Constraint | None:
    if source is None:
        return None
    text = source if isinstance(source, str) else msgspec.json.encode(source).decode()
    return Constraint(kind, text)


def sglang_constraint(
    regex: str | None, json_schema: str | dict[str, Any] | None, ebnf: str | None
) -> Constraint | None:
    """The one constraint of sglang's `sampling_params`."""
    return only_one(
        {
            "regex": _of("regex", regex),
            "json_schema": _of("json_schema", json_schema),
            "ebnf": _of("ebnf", ebnf),
        }
    )


def _any_object() -> Constraint:
    return Constraint("json_schema", '{"type":"object"}')


def _of_response_format(given: ResponseFormat | None) -> Constraint | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return _any_object()
    if given.json_schema is None or given.json_schema.schema is None:
        raise InvalidParameter(
            "response_format.json_schema", "response_format.json_schema.schema is missing"
        )
    return _of("json_schema", given.json_schema.schema)
