"""From the options users write to what travels: `SamplingParams` and `Constraint`.

Options are known by OpenAI's names and by sglang's; one dictionary of canonical names is what the
rest of the package handles, so that a program's defaults and one `gen`'s options merge by key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from rootlace.errors import InvalidConstraint, InvalidRequest
from rootlace.protocol import Constraint, SamplingParams

PARAMS = frozenset(SamplingParams.__struct_fields__)
CONSTRAINTS = frozenset({"regex", "json_schema", "ebnf", "dtype"})
ALIASES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "return_logprob": "logprobs",
    "top_logprobs_num": "top_logprobs",
    "logprob_start_len": "prompt_logprobs_from",
}
# Accepted because sglang's programs pass them; here they describe what happens anyway (log-
# probabilities always carry their text) or have no meaning for fast tokenizers.
NO_EFFECT = frozenset({"return_text_in_logprobs", "spaces_between_special_tokens"})
OPTIONS = PARAMS | CONSTRAINTS | ALIASES.keys() | NO_EFFECT

# A number ends where the model writes white space: the pattern admits it and the stop strings cut
# it off again. Without it, a model that does not feel like stopping would write digits for ever.
_NUMBER_STOPS = (" ", "\n")
_DTYPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "int": (r"[-+]?[0-9]+[ \n]?", _NUMBER_STOPS),
    "float": (r"[-+]?[0-9]*\.?[0-9]+[ \n]?", _NUMBER_STOPS),
    "bool": (r"(True|False)", ()),
    "str": (r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"', ()),
}


def normalise(options: Mapping[str, Any], caller: str) -> dict[str, Any]:
    """`options` under their canonical names, without those that are None.

    Raises TypeError for a name that is unknown or given twice (once as an alias), and
    InvalidRequest for a value no sampler could use.
    """
    known: dict[str, Any] = {}
    for name, value in options.items():
        if name not in OPTIONS:
            close = get_close_matches(name, OPTIONS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{caller} got an unexpected keyword argument {name!r}{hint}")
        if value is None or name in NO_EFFECT:
            continue
        canonical = ALIASES.get(name, name)
        if canonical in known:
            raise TypeError(f"{caller} got {canonical!r} twice (also as {name!r})")
        known[canonical] = value
    _expand(known)
    _check(known, caller)
    return known


def _expand(known: dict[str, Any]) -> None:
    """Rewrite the shorthands of some values, in place."""
    stop = known.get("stop")
    if isinstance(stop, str):
        known["stop"] = (stop,)
    elif isinstance(stop, Iterable):
        known["stop"] = tuple(stop)
    if isinstance(known.get("stop_token_ids"), Iterable):
        known["stop_token_ids"] = tuple(known["stop_token_ids"])
    logprobs = known.get("logprobs")
    if isinstance(logprobs, int) and not isinstance(logprobs, bool):
        known["logprobs"] = True  # OpenAI's completions: the number of alternatives
        known.setdefault("top_logprobs", logprobs)
    if known.get("prompt_logprobs_from", 0) == -1:
        del known["prompt_logprobs_from"]  # sglang's "only the output"


def _check(known: Mapping[str, Any], caller: str) -> None:
    """Find wrong values at the line of the call, not when the server answers."""
    params = {name: value for name, value in known.items() if name in PARAMS}
    # The other bound may come from the program's defaults: it is compared when they are merged.
    params.setdefault("max_tokens", None)
    _convert(params, caller)
    given = [name for name in ("regex", "json_schema", "ebnf", "dtype") if name in known]
    if len(given) > 1:
        raise TypeError(f"{caller} got several constraints ({', '.join(given)}); give one")
    if given:
        constraint(known)


def _convert(params: Mapping[str, Any], caller: str) -> SamplingParams:
    try:
        return msgspec.convert(params, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{caller}: {error}") from None


def resolve(
    defaults: Mapping[str, Any], own: Mapping[str, Any], caller: str = "gen()"
) -> tuple[SamplingParams, Constraint | None]:
    """What one `Generate` carries: the program's defaults, overridden by the call's own options."""
    merged = {**defaults, **own}
    params = {name: value for name, value in merged.items() if name in PARAMS}
    if "dtype" in merged:
        stops = _DTYPES.get(_dtype_name(merged["dtype"]), ("", ()))[1]
        params["stop"] = (*params.get("stop", ()), *stops)
    return _convert(params, caller), constraint(merged)


def _dtype_name(dtype: Any) -> str:
    return dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")


def constraint(options: Mapping[str, Any]) -> Constraint | None:
    """The constraint among canonical `options`. InvalidConstraint where it makes no sense."""
    if "dtype" in options:
        dtype = options["dtype"]
        simple = dtype in (int, float, bool, str) or isinstance(dtype, str)
        if simple and _dtype_name(dtype) in _DTYPES:
            return Constraint("regex", _DTYPES[_dtype_name(dtype)][0])
        return Constraint("json_schema", _type_schema(dtype))
    if "regex" in options:
        return Constraint("regex", _text(options["regex"], "regex"))
    if "ebnf" in options:
        return Constraint("ebnf", _text(options["ebnf"], "ebnf"))
    if "json_schema" in options:
        schema = options["json_schema"]
        if isinstance(schema, str):
            try:
                json.loads(schema)
            except ValueError as error:
                raise InvalidConstraint(f"json_schema is not JSON: {error}") from None
            return Constraint("json_schema", schema)
        if isinstance(schema, (Mapping, bool)):
            return Constraint("json_schema", json.dumps(schema))
        return Constraint("json_schema", _type_schema(schema))
    return None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidConstraint(f"{name} must be a string, not {type(value).__name__}")
    return value


def _type_schema(dtype: Any) -> str:
    """JSON Schema of a Python type: pydantic models by their own method, the rest by msgspec."""
    own = getattr(dtype, "model_json_schema", None)
    if callable(own):
        return json.dumps(own())
    try:
        if isinstance(dtype, str):
            raise TypeError("a type is needed, or one of 'int', 'float', 'bool', 'str'")
        return msgspec.json.encode(msgspec.json.schema(dtype)).decode()
    except (TypeError, RuntimeError) as error:
        raise InvalidConstraint(f"no JSON schema can be made of dtype {dtype!r}: {error}") from None
