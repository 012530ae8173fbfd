"""Sampling fields of bodies, which follow from `rootlace.wire.sampling`, as `SamplingParams`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.wire.protocol import ModelInfo
from rootlace.wire.sampling import PARAMETERS, TUNED, Api, SamplingParams

T = TypeVar("T", bound=msgspec.Struct)

_FIRST_WORD = re.compile(r"[a-z_]+")


def with_sampling(body: type[T], api: Api) -> type[T]:
    """`body` with a field for each sampling parameter that `api` takes; null is its default."""
    fields = [
        (name, parameter.type | parameter.single | None, None)
        for parameter in PARAMETERS.values()
        for name in parameter.fields(api)
    ]
    whole = msgspec.defstruct(
        body.__name__, fields, bases=(body,), kw_only=True, forbid_unknown_fields=True
    )
    assert issubclass(whole, body)
    return whole


def sampling_fields(body: msgspec.Struct, api: Api) -> dict[str, Any]:
    """What a body made by `with_sampling` gives, by the names of `SamplingParams`."""
    found: dict[str, Any] = {}
    for parameter in PARAMETERS.values():
        for name in reversed(parameter.fields(api)):
            value = getattr(body, name)
            if value is None:
                continue
            # Of several names the first counts, unless it is given the default.
            if value != parameter.default or parameter.name not in found:
                single = parameter.single
                found[parameter.name] = (
                    (value,) if single is not None and isinstance(value, single) else value
                )
    return found


def sglang_names() -> dict[str, str]:
    """sglang's names of the parameters that it calls otherwise, by our names."""
    return {
        name: parameter.aliases[0]
        for name, parameter in PARAMETERS.items()
        if parameter.aliases and name not in parameter.fields("generate")
    }


def make_params(
    fields: Mapping[str, Any],
    model: ModelInfo,
    names: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """`SamplingParams` of the fields that are not None (`max_tokens` may be: no limit).

    What they do not say is as the `model` is to be sampled, and where that is not known as by the
    `defaults` of the interface. `names` gives, where it differs, what the client calls a field.
    Raises InvalidParameter naming the field as the client does.
    """
    names = names or {}
    own = {key: value for key, value in fields.items() if value is not None or key == "max_tokens"}
    given: dict[str, Any] = {"max_tokens": None, **(defaults or {}), **model.sampling, **own}
    if "max_tokens" not in own and given["max_tokens"] is not None:
        # Whoever asks for more than the default bound has not asked for the bound.
        given["max_tokens"] = max(given["max_tokens"], own.get("min_tokens", 0))
    vocab_size = model.vocab_size
    for key in ("stop_token_ids", "logit_bias"):
        for token in given.get(key, ()):
            if not 0 <= token < vocab_size:
                param = names.get(key, key)
                raise InvalidParameter(
                    param, f"{param}: {token} is not a token id (vocabulary of {vocab_size})"
                )
    try:
        return SamplingParams(**given, given=TUNED)
    except ValueError as error:
        raise _named(str(error), names) from None


def _named(message: str, names: Mapping[str, str]) -> InvalidParameter:
    """The error of `SamplingParams` in the client's names."""
    if "stop string" in message:
        stop = names.get("stop", "stop")
        return InvalidParameter(stop, f"{stop}: {message}")
    for ours, theirs in names.items():
        message = re.sub(rf"\b{ours}\b", theirs, message)
    first = _FIRST_WORD.match(message)
    return InvalidParameter(first[0] if first else "sampling_params", message)
