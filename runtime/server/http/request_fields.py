"""Sampling fields of bodies, which follow from `rootlace.wire.sampling`, as `SamplingParams`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

import msgspec

from rootlace.runtime.server.http.body import Body
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.http.reply_headers import note_warning
from rootlace.wire.protocol import ModelInfo, Part, Text, Tokens
from rootlace.wire.sampling import (
    PARAMETERS,
    PLAIN,
    TUNED,
    Api,
    BadParameter,
    Cache,
    Handling,
    Parameter,
    Priority,
    SamplingParams,
    Seconds,
)

# Handling -----------------------------------------------------------------------------------------
#
# The fields that say how a request is served; they follow from `rootlace.wire.handling`.


_WAITED: ContextVar[float] = ContextVar("waited", default=0.0)


class HandlingBody(Body, kw_only=True):
    """What every body that computes something may say. Higher priorities are served first."""

    priority: Priority | None = None
    timeout: Seconds | None = None
    cache: Cache | None = None


class Handled(Protocol):
    """A body with these fields."""

    priority: Priority | None
    timeout: Seconds | None
    cache: Cache | None


@contextmanager
def waited(seconds: float) -> Iterator[None]:
    """What is read in this block has waited so long already, which its timeout includes."""
    token = _WAITED.set(seconds)
    try:
        yield
    finally:
        _WAITED.reset(token)


def handling_of(body: Handled) -> Handling:
    """What the body asks for; what it leaves out is the default."""
    if body.priority is None and body.timeout is None and body.cache is None:
        return PLAIN
    handling = Handling(body.priority or 0, body.timeout, body.cache or Cache())
    return remaining(handling, _WAITED.get())


def handling_without_pin(body: Handled) -> Handling:
    """The same where there is not one prompt that could be pinned. Raises InvalidParameter."""
    handling = handling_of(body)
    if handling.cache.pin:
        raise InvalidParameter("cache.pin", "cache.pin: nothing is pinned here; pin a prompt")
    return handling


def remaining(handling: Handling, seconds: float) -> Handling:
    """With the timeout what is left of it when so many `seconds` have passed."""
    if handling.timeout is None:
        return handling
    return msgspec.structs.replace(handling, timeout=max(handling.timeout - seconds, 1e-9))


# Prompts ------------------------------------------------------------------------------------------
#
# Prompts as bodies carry them: a text, token ids, or a list of either.


MAX_PROMPTS = 4096
"""Also of their samples, together: each is a request of the engine."""


@dataclass(frozen=True)
class Prompt:
    """One prompt; exactly one of the two is set."""

    text: str | None = None
    ids: tuple[int, ...] | None = None

    def parts(self, begin: bool = True) -> tuple[Part, ...]:
        """What to append to a branch.

        Whoever sends a raw prompt wrote its template too, so special tokens in it are recognised.
        The empty piece of ordinary text makes the branch begin as the tokenizer's post-processor
        would (BOS), which a branch that begins with special text does not; without `begin` it is
        left out.
        """
        if self.ids is not None:
            return (Tokens(self.ids),)
        text = Text(self.text or "", special=True)
        return (Text(""), text) if begin else (text,)


def parse_prompts(
    given: str | Sequence[str | int | Sequence[int]], param: str, vocab_size: int
) -> list[Prompt]:
    """The prompts of a field that holds a text, token ids, or a list of texts or of token ids.

    Raises InvalidParameter for an empty list, a mixed one, or an id outside the vocabulary.
    """
    if isinstance(given, str):
        return [Prompt(text=given)]
    if not given:
        raise InvalidParameter(param, f"{param} must not be empty")
    if set(map(type, given)) == {int}:
        return [_of_ids(given, param, vocab_size)]  # type: ignore[arg-type]
    if len(given) > MAX_PROMPTS:
        raise InvalidParameter(param, f"{param}: at most {MAX_PROMPTS} prompts, not {len(given)}")
    prompts = []
    for index, item in enumerate(given):
        if isinstance(item, int) or isinstance(item, str) != isinstance(given[0], str):
            raise InvalidParameter(
                param,
                f"{param} must be a text, a list of texts, a list of token ids or a list of lists "
                f"of token ids; {param}[{index}] does not fit",
            )
        if isinstance(item, str):
            prompts.append(Prompt(text=item))
        else:
            prompts.append(_of_ids(item, f"{param}[{index}]", vocab_size))
    return prompts


def check_texts(texts: Sequence[str], param: str) -> None:
    """Raises InvalidParameter for an empty one."""
    for index, text in enumerate(texts):
        if not text:
            raise InvalidParameter(f"{param}[{index}]", f"{param}[{index}] is empty")


def check_samples(count: int, param: str) -> None:
    """Raises InvalidParameter for more samples, of all prompts of a body, than may be asked for."""
    if count > MAX_PROMPTS:
        raise InvalidParameter(
            param, f"{param}: at most {MAX_PROMPTS} samples of all prompts together, not {count}"
        )


def _of_ids(ids: Sequence[int], param: str, vocab_size: int) -> Prompt:
    if not ids:
        raise InvalidParameter(param, f"{param} must not be empty")
    if min(ids) < 0 or max(ids) >= vocab_size:
        token = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidParameter(
            param, f"{param}: {token} is not a token id (vocabulary of {vocab_size})"
        )
    return Prompt(ids=tuple(ids))


# Sampling -----------------------------------------------------------------------------------------


T = TypeVar("T", bound=msgspec.Struct)


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


@cache
def _names(api: Api) -> list[tuple[Parameter, tuple[str, ...]]]:
    """What bodies of `api` call each parameter, the name that wins last."""
    return [(one, one.fields(api)[::-1]) for one in PARAMETERS.values() if one.fields(api)]


def sampling_fields(body: msgspec.Struct, api: Api) -> dict[str, Any]:
    """What a body made by `with_sampling` gives, by the names of `SamplingParams`."""
    found: dict[str, Any] = {}
    for parameter, names in _names(api):
        for name in names:
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
        param = names.get(key, key)
        for token in given.get(key, ()):
            if 0 <= token < vocab_size:
                continue
            says = f"{param}: {token} is not a token id (vocabulary of {vocab_size})"
            if key == "logit_bias" or token < 0:
                raise InvalidParameter(param, says)
            note_warning(f"{says}, so nothing stops at it")
    if stops := given.get("stop_token_ids"):
        given["stop_token_ids"] = tuple(token for token in stops if token < vocab_size)
    try:
        return SamplingParams(**given, given=TUNED)
    except BadParameter as error:
        raise InvalidParameter(names.get(error.param, error.param), error.told(names)) from None
