"""From the bodies' sampling fields to `SamplingParams`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.openai_types import SamplingBody
from rootlace.wire.protocol import SamplingParams

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
