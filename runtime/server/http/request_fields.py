"""Fields that bodies share, and their conversion.

Sections: handling, model, prompts, sampling, OpenAI's body, messages, conversation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from rootlace.runtime.server.http.body import (
    SOME,
    Body,
    History,
    extended,
    ignored,
    refused,
    with_fields,
)
from rootlace.runtime.server.http.chat_request import Tool as ChatTool
from rootlace.runtime.server.http.connections import SENSIBLE_ID, note_warning
from rootlace.runtime.server.http.constraints import OpenAIConstraintBody
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.served_model import ServedModel
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


_WAITED: ContextVar[float] = ContextVar("waited", default=0.0)


class HandlingBody(Body, kw_only=True):
    """Common fields of bodies that compute something. Higher priorities are served first."""

    priority: Priority | None = None
    timeout: Seconds | None = None
    cache: Cache | None = None


@contextmanager
def waited(seconds: float) -> Iterator[None]:
    """Count `seconds` of waiting towards the timeouts of bodies read in the block."""
    token = _WAITED.set(seconds)
    try:
        yield
    finally:
        _WAITED.reset(token)


def handling_of(body: HandlingBody | SamplingBody) -> Handling:
    """Return the body's handling; missing fields have their defaults."""
    if body.priority is None and body.timeout is None and body.cache is None:
        return PLAIN
    handling = Handling(body.priority or 0, body.timeout, body.cache or Cache())
    return remaining(handling, _WAITED.get())


def remaining(handling: Handling, seconds: float) -> Handling:
    """Return the handling with the timeout reduced by `seconds`."""
    if handling.timeout is None:
        return handling
    return msgspec.structs.replace(handling, timeout=max(handling.timeout - seconds, 1e-9))


# Model --------------------------------------------------------------------------------------------


def adapter_of(
    served: ServedModel, model: str, adapter: str | None = None, field: str = "adapter"
) -> str:
    """Return the adapter of a request: the value of its `field`, else the name behind the model's
    in `model` (see `check_name`). "" means none, in `field` too. Raises InvalidParameter for an
    unknown adapter, or where the two differ."""
    named = model.removeprefix(served.model_info.name).removeprefix(":")
    if adapter is None or adapter == named:
        return named
    if adapter and adapter not in served.model_info.adapters:
        known = ", ".join(served.model_info.adapters) or "none"
        raise InvalidParameter(field, f"the adapter {adapter!r} is not loaded (loaded: {known})")
    if named:
        raise InvalidParameter(field, f"{field} {adapter!r} is not that of the model, {named!r}")
    return adapter


def placed(served: ServedModel, body: Any, model: str) -> dict[str, Any]:
    """Return namespace, adapter and handling of a body's prompts, and whether a cache report is
    asked for, by the names of `GenerateRequest` and `ChatRequest`. Raises as `adapter_of` does."""
    return {
        "namespace": getattr(body, "cache_salt", None) or "",
        "adapter": adapter_of(served, model, getattr(body, "adapter", None)),
        "handling": handling_of(body),
        "cache_report": bool(getattr(body, "return_cache_report", None)),
    }


def placed_unpinned(served: ServedModel, body: Any, model: str) -> dict[str, Any]:
    """Return `placed` without the report. Raises InvalidParameter for a pin, too."""
    place = placed(served, body, model)
    del place["cache_report"]
    if place["handling"].cache.pin:
        raise InvalidParameter("cache.pin", "cache.pin: nothing is pinned here; pin a prompt")
    return place


# Prompts ------------------------------------------------------------------------------------------
#
# Prompts of bodies: a text, token ids, or a list of either.


MAX_PROMPTS = 4096
"""Most prompts, and most samples of all prompts: each is a request of the engine."""


class Prompt(msgspec.Struct, frozen=True):
    """Prompt; exactly one of the two fields is set."""

    text: str | None = None
    ids: tuple[int, ...] | None = None

    def parts(self, begin: bool = True) -> tuple[Part, ...]:
        """Return the parts to append to a branch.

        Clients that send a raw prompt wrote its template too, so special tokens in it are
        recognised. The empty piece of ordinary text makes the branch begin as the tokenizer's
        post-processor would have it (BOS). A branch that begins with special text does not. Without
        `begin` the empty piece is left out.
        """
        if self.ids is not None:
            return (Tokens(self.ids),)
        text = Text(self.text or "", special=True)
        return (Text(""), text) if begin else (text,)


def parse_prompts(
    value: str | Sequence[str | int | Sequence[int]], param: str, vocab_size: int
) -> list[Prompt]:
    """Return the prompts of a field: a text, token ids, or a list of texts or of token ids.

    Raises InvalidParameter for an empty list, a mixed one, or an id outside the vocabulary.
    """
    if isinstance(value, str):
        return [Prompt(text=value)]
    if not value:
        raise InvalidParameter(param, f"{param} must not be empty")
    if set(map(type, value)) == {int}:
        return [_of_ids(value, param, vocab_size)]  # type: ignore[arg-type]
    if len(value) > MAX_PROMPTS:
        raise InvalidParameter(param, f"{param}: at most {MAX_PROMPTS} prompts, not {len(value)}")
    prompts = []
    for index, item in enumerate(value):
        if isinstance(item, int) or isinstance(item, str) != isinstance(value[0], str):
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
    """Raise InvalidParameter for an empty text."""
    for index, text in enumerate(texts):
        if not text:
            raise InvalidParameter(f"{param}[{index}]", f"{param}[{index}] is empty")


def check_samples(count: int, param: str) -> None:
    """Raise InvalidParameter for too many samples of all prompts of a body."""
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

TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]


def with_sampling(api: Api) -> Callable[[type[T]], type[T]]:
    """Give a body a field for each sampling parameter of `api`; null is its default."""
    fields = [
        (name, parameter.type | parameter.single | None, None)
        for parameter in PARAMETERS.values()
        for name in parameter.fields(api)
    ]
    return extended(fields)


@cache
def _names(api: Api) -> list[tuple[Parameter, tuple[str, ...]]]:
    """Return each parameter with its names in bodies of `api`, the winning name last."""
    return [(one, one.fields(api)[::-1]) for one in PARAMETERS.values() if one.fields(api)]


def sampling_fields(body: msgspec.Struct, api: Api) -> dict[str, Any]:
    """Return the values of a body made by `with_sampling`, by the names of `SamplingParams`."""
    fields: dict[str, Any] = {}
    for parameter, names in _names(api):
        for name in names:
            value = getattr(body, name)
            if value is None:
                continue
            # Of several names the first counts, unless its value is the default.
            if value != parameter.default or parameter.name not in fields:
                single = parameter.single
                fields[parameter.name] = (
                    (value,) if single is not None and isinstance(value, single) else value
                )
    return fields


def sglang_names() -> dict[str, str]:
    """Map our names of parameters to sglang's, where different."""
    return {
        name: parameter.aliases[0]
        for name, parameter in PARAMETERS.items()
        if parameter.aliases and name not in parameter.fields("generate")
    }


def asked_top(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """Return the number of alternatives per token of a chat; None without log-probabilities."""
    if not logprobs:
        if top_logprobs:
            raise InvalidParameter("top_logprobs", "top_logprobs needs logprobs=true")
        return None
    return top_logprobs or 0


def make_params(
    fields: Mapping[str, Any],
    model: ModelInfo,
    names: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Return `SamplingParams` of the fields that are not None (`max_tokens` may be: no limit).

    Other parameters have the `model`'s defaults, else the `defaults` of the interface. `names`
    gives the client's name of a field, where different. Raises InvalidParameter with the client's
    name of the field.
    """
    names = names or {}
    params: dict[str, Any] = {"max_tokens": None, **(defaults or {}), **model.sampling}
    for key, value in fields.items():
        if value is not None or key == "max_tokens":
            params[key] = value
    if "max_tokens" not in fields and params["max_tokens"] is not None:
        # A client that asks for more than the default bound does not want the bound.
        params["max_tokens"] = max(params["max_tokens"], fields.get("min_tokens") or 0)
    vocab_size = model.vocab_size
    for key in ("stop_token_ids", "logit_bias"):
        param = names.get(key, key)
        for token in params.get(key, ()):
            if 0 <= token < vocab_size:
                continue
            says = f"{param}: {token} is not a token id (vocabulary of {vocab_size})"
            if key == "logit_bias" or token < 0:
                raise InvalidParameter(param, says)
            note_warning(f"{says}, so nothing stops at it")
    if stops := params.get("stop_token_ids"):
        params["stop_token_ids"] = tuple(token for token in stops if token < vocab_size)
    try:
        return SamplingParams(**params, given=TUNED)
    except BadParameter as error:
        raise InvalidParameter(names.get(error.param, error.param), error.told(names)) from None


# OpenAI's body ------------------------------------------------------------------------------------
#
# Common fields of the bodies of OpenAI's endpoints.
#
# Every field may be null, which means its default. Fields that clients send without effect on a
# text model's answer are typed and then ignored. Any other unknown field is refused, because a
# misspelt parameter without effect is worse than an error.


ACCOUNT = ignored("it is about the account of OpenAI's clients")
CACHE = ignored("every prompt is cached")
TOO_LONG = "a prompt that is too long is an error; shorten it before you send it"
_NO_BEAMS = "there is no beam search"


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, ignored("nothing is obfuscated")] = None
    continuous_usage_stats: bool | None = None


@with_fields(
    (ignored("the server chose its backend"), str, "guided_decoding_backend"),
    (ACCOUNT, str, "user"),
    (ACCOUNT, dict[str, str], "metadata"),
    (ignored("nothing is stored"), bool, "store"),
    (ACCOUNT, str, "service_tier safety_identifier"),
    (CACHE, str, "prompt_cache_key prompt_cache_retention"),
    (CACHE, dict[str, Any], "prompt_cache_options cache_control"),
    (ignored("the model stays loaded"), int | float | str, "keep_alive"),
    (refused(_NO_BEAMS, 1.0), float, "length_penalty"),
    (refused(_NO_BEAMS), bool, "use_beam_search early_stopping"),
    (refused("/v1/completions gives them with echo and logprobs"), int, "prompt_logprobs"),
    (ignored("it concerns slow tokenizers"), bool, "spaces_between_special_tokens"),
    (refused("/generate gives them as output_ids"), bool, "return_token_ids"),
    (refused("give the tokens to logit_bias"), list[str], "bad_words"),
    (refused(TOO_LONG), int, "truncate_prompt_tokens"),
)
class SamplingBody(OpenAIConstraintBody):
    """Common fields of completions and chats, without those that `with_sampling` adds."""

    model: str | None = None
    max_tokens: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    adapter: str | None = None
    cache_salt: str | None = None
    return_cache_report: bool | None = None
    request_id: str | None = None
    # Fields of a `HandlingBody`: a struct cannot have two bases with fields.
    priority: Priority | None = None
    timeout: Seconds | None = None
    cache: Cache | None = None


def openai_fields(body: SamplingBody) -> dict[str, Any]:
    """Return the `sampling_fields` of OpenAI's endpoints. Raises InvalidParameter if more samples
    are to be drawn than returned."""
    fields = sampling_fields(body, "openai")
    n = fields.get("n", 1)
    if body.best_of is not None and body.best_of != n:
        raise InvalidParameter("best_of", f"best_of is only supported equal to n ({n})")
    return fields


def chosen_id(chosen: str | None) -> str | None:
    """Return a body's `request_id`. Raises InvalidParameter for an id that could not stand in a
    header: every event of a stream has it."""
    if chosen is not None and not SENSIBLE_ID.fullmatch(chosen):
        raise InvalidParameter(
            "request_id",
            "request_id must have 1 to 128 characters: letters, digits and any of _.:/+=@-",
        )
    return chosen


def wants_usage(body: SamplingBody) -> bool:
    """Return whether a stream ends with a chunk of the usage, and with it the cache report."""
    if body.stream_options is None:
        return bool(body.stream and body.return_cache_report)
    if not body.stream:
        raise InvalidParameter("stream_options", "stream_options needs stream=true")
    return bool(body.stream_options.include_usage or body.return_cache_report)


def wants_usage_so_far(body: SamplingBody) -> bool:
    """Return whether each chunk of a stream has the usage so far (with `include_usage`)."""
    options = body.stream_options
    return bool(options and options.include_usage and options.continuous_usage_stats)


# Messages -----------------------------------------------------------------------------------------


CLIENTS_RUN = "tools are run by the client"
CACHED = ignored("every prompt is cached")


class ContentPart(History):
    """Part of a message's content. Only text can be read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(History):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(History, kw_only=True):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(History):
    """Message of a conversation. `reasoning` is another name of `reasoning_content`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    # Other values of these fields would be content.
    function_call: None = None
    audio: None = None


Messages = Annotated[list[Message], SOME]


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    ONLY: ClassVar[str] = CLIENTS_RUN

    type: Literal["function"]
    function: Function
    cache_control: Annotated[Any, CACHED] = None


# Conversation -------------------------------------------------------------------------------------


_TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final"})


def template_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `chat_template_kwargs`. Raises InvalidParameter for an argument with its own field."""
    for name in sorted(_TEMPLATE_ARGUMENTS & arguments.keys()):
        raise InvalidParameter(
            f"chat_template_kwargs.{name}", f"{name} belongs outside of chat_template_kwargs"
        )
    return dict(arguments)


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Turn messages into dictionaries with plain text content and decoded tool arguments.

    Raises InvalidParameter for content that is not text.
    """
    found = []
    for index, message in enumerate(messages):
        param, content = f"messages[{index}]", message.content
        if content is None and message.role != "assistant":
            raise InvalidParameter(f"{param}.content", f"{param}.content is missing")
        if isinstance(content, list):
            content = text_of(content, f"{param}.content")
        # "developer" is OpenAI's newer name of the system role; templates know only the old one.
        role = "system" if message.role == "developer" else message.role
        one: dict[str, Any] = {
            "role": role,
            "content": message.refusal or "" if content is None else content,
        }
        if message.tool_calls:
            if message.role != "assistant":
                raise InvalidParameter(
                    f"{param}.tool_calls", "only an assistant message has tool calls"
                )
            one["tool_calls"] = [
                call_of(call.id, call.function.name, call.function.arguments)
                for call in message.tool_calls
            ]
        # Some servers answer with a text here, others with an object.
        other = message.reasoning if isinstance(message.reasoning, str) else None
        for name, value in (
            ("name", message.name),
            ("tool_call_id", message.tool_call_id),
            ("reasoning_content", message.reasoning_content or other),
        ):
            if value is not None:
                one[name] = value
        found.append(one)
    return found


def tools_of(tools: Iterable[Any] | None) -> tuple[ChatTool, ...]:
    """Return the tools of a body, each with a `Function`."""
    functions: list[Function] = [tool.function for tool in tools or ()]
    return tuple([ChatTool(f.name, f.description, f.parameters, f.strict) for f in functions])


def text_of(content: str | list[ContentPart], param: str) -> str:
    """Return a content's text. Raises InvalidParameter for a part, below `param`, without text."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        where, name = f"{param}[{index}]", "refusal" if part.type == "refusal" else "text"
        if not part.type.endswith(("text", "refusal")):  # also `input_text` and the like
            raise InvalidParameter(where, f"{where}: only text is served, not {part.type!r}")
        text = part.refusal if name == "refusal" else part.text
        if text is None:
            raise InvalidParameter(f"{where}.{name}", f"{where}.{name} is missing")
        texts.append(text)
    return "".join(texts)


def call_of(
    call_id: str | None, name: str, arguments: str | dict[str, Any] | None
) -> dict[str, Any]:
    """Return a call as chat templates expect it."""
    if isinstance(arguments, str):
        # Templates write arguments as JSON themselves; text that is no JSON stays as it is.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments or "{}")
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": call_id, "type": "function", "function": function}
