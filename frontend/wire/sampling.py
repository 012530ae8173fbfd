"""Sampling parameters: `SamplingParams` travels, and describes each parameter once.

A field's name, type and default are the parameter's. Its `Parameter` adds where it acts, which
values are allowed, and its other names. All code reads sampling parameters here: the keywords of
`gen` and `run` (`rootlace.language.sampling`) and the fields of HTTP bodies
(`server/http/request_fields.py`). So do the sampler's arrays (`runtime/model/sampler.py`) and, by
name, the arguments of kernels (`kernels/interface.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_args, get_type_hints

import msgspec

# Handling -----------------------------------------------------------------------------------------
#
# Handling of a request, whatever it computes: its turn, its time, and its place in the cache.
#
# `Handling` is the one description: programs, HTTP bodies and the engine's requests carry it.


PRIORITIES = 100
"""Bound on the absolute value of a priority."""
PIN_SECONDS = 300.0
"""Default lifetime of a pin, in seconds."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Priority = Annotated[int, msgspec.Meta(ge=-PRIORITIES, le=PRIORITIES)]


class Cache(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Handling of a prompt's KV.

    `pin` holds the prompt in the cache for `ttl` seconds (`PIN_SECONDS` by default), whatever else
    needs the memory; pinning again renews the time. Without room the request fails, unless `pin` is
    "try". Without a pin, `ttl` is the lifetime of unused KV that the request added. With `share`
    false, the request and others find nothing of each other's KV. Its KV is forgotten at its end.
    """

    pin: bool | Literal["try"] = False
    ttl: Seconds | None = None
    share: bool = True

    def __post_init__(self) -> None:
        if not self.share and (self.pin or self.ttl is not None):
            raise ValueError("what is not shared ends with the request: it has no pin and no ttl")


class Handling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Service of a request. `priority`: higher is served first; one more is worth the server's
    `priority_seconds` of waiting. `timeout`: seconds until the request fails."""

    priority: Priority = 0
    timeout: Seconds | None = None
    cache: Cache = Cache()


PLAIN = Handling()


# Sampling -----------------------------------------------------------------------------------------


Acts = Literal["request", "text", "logits", "scores"]
"""Part of sampling that a parameter changes: the length of a request, the text made of its tokens,
the distribution of tokens, or the reported log-probabilities."""

Api = Literal["openai", "generate", "ollama", "anthropic"]
"""Bodies of OpenAI's endpoints; `sampling_params` of sglang's `/generate`; `options` of Ollama's
endpoints; bodies of Anthropic's."""


class Range(NamedTuple):
    """Values from `low` to `high`, and `off`."""

    low: float
    high: float | None = None
    off: float | None = None

    def check(self, name: str, value: float) -> None:
        """Raise ValueError for a value outside, NaN included."""
        low, high, off = self
        if (value >= low and (high is None or value <= high)) or value == off:
            return
        if high is not None:
            expected = f"be in [{low}, {high}]"
        elif off is not None:
            expected = f"be {off} (off) or at least {low}"
        else:
            expected = f"be at least {low}" if low else "not be negative"
        raise BadParameter(name, f"must {expected}, not {value}")


class BadParameter(ValueError):
    """Sampling parameter with a forbidden value.

    `problem` follows the parameter's name in the message; it may name a second parameter in braces.
    """

    def __init__(self, param: str, problem: str) -> None:
        self.param, self.problem = param, problem
        super().__init__(self.told({}))

    def told(self, names: Mapping[str, str]) -> str:
        """Return the message with a client's names of parameters, where `names` has others."""
        other = names.get("max_tokens", "max_tokens")
        problem = self.problem.replace("{max_tokens}", other)
        return f"{names.get(self.param, self.param)} {problem}"


class Parameter(msgspec.Struct, frozen=True):
    """Description of one sampling parameter; a text behind it is its `help` in docs/language.md.

    `range` holds for the number, or for each value of a mapping. `aliases` are other names in
    programs. `openai`, `generate`, `ollama` and `anthropic` are names in the bodies of these APIs;
    empty where an endpoint reads the parameter in another form, or not at all. The default is the
    parameter's own name, with Ollama only if it is `tuned`. `gguf`: its name behind
    `general.sampling.` in GGUF files, if different. `single`: type of one item, where programs and
    bodies may give one item instead of a list. `history`: its effect on logits depends on all
    tokens before.
    """

    acts: Acts
    range: Range | None = None
    history: bool = False
    aliases: tuple[str, ...] = ()
    openai: tuple[str, ...] | None = None
    generate: tuple[str, ...] | None = None
    ollama: tuple[str, ...] | None = None
    anthropic: tuple[str, ...] = ()
    gguf: str = ""
    single: type | None = None

    # Taken from the field that is described.
    help: str = ""
    name: str = ""
    type: Any = None
    default: Any = None

    def fields(self, api: Api) -> tuple[str, ...]:
        """Return its names in bodies of `api`; of several given names, the first wins."""
        names: tuple[str, ...] | None = getattr(self, api)
        if names is not None:
            return names
        return (self.name,) if api != "ollama" or self.tuned else ()

    @property
    def tuned(self) -> bool:
        """Return whether models and servers have defaults for it: a number that acts on logits."""
        return self.acts == "logits" and self.type in (int, float)

    def read(self, value: Any, strict: bool = True) -> Any:
        """Read a number of the parameter; also from text if not `strict`. Raises ValueError."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            found = msgspec.convert(value, self.type, strict=strict)
        except msgspec.ValidationError:
            kind = "a number" if self.type is float else "an integer"
            raise BadParameter(self.name, f"must be {kind}, not {value!r}") from None
        if self.range is not None and found is not None:
            self.range.check(self.name, found)
        return found


_INT31 = 2**31 - 1
_INT63 = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling of one `Generate`, with OpenAI's names where OpenAI has one.

    `temperature=0` is greedy, and so is `top_p=0`. `top_k` is off at -1 and at 0. `seed=None` lets
    the server draw a seed; sampling then still depends on (seed, position) alone.
    `prompt_logprobs_from` asks for the log-probabilities of the prompt's tokens from that index on.
    `max_tokens=None` means the rest of the context. Parameters that act on logits have no effect by
    default.

    `given`: tuned parameters that a request sets to the default value here. For parameters that a
    request does not set, the server has its own defaults (`with_defaults`).
    """

    max_tokens: Annotated[
        int | None,
        Parameter(
            "request",
            Range(0, _INT31),
            aliases=("max_new_tokens",),
            openai=(),
            generate=(),
            ollama=("num_predict",),
        ),
        "maximum number of output tokens; None: as many as fit",
    ] = 128
    min_tokens: Annotated[
        int,
        Parameter(
            "request", Range(0, _INT31), aliases=("min_new_tokens",), generate=("min_new_tokens",)
        ),
        "minimum number of output tokens",
    ] = 0
    n: Annotated[
        int,
        Parameter("request", Range(1, 128)),
        "number of samples: the variable is a list; the program continues from the first",
    ] = 1
    temperature: Annotated[
        float,
        Parameter("logits", Range(0.0, 1e6), anthropic=("temperature",), gguf="temp"),
        "randomness of sampling; 0 takes the likeliest token",
    ] = 1.0
    top_p: Annotated[
        float,
        Parameter("logits", Range(0.0, 1.0), anthropic=("top_p",)),
        "keeps the likeliest tokens up to this sum of probabilities; 0 is greedy",
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter("logits", Range(0, off=-1), anthropic=("top_k",)),
        "keeps this many of the likeliest tokens; off at 0 and -1",
    ] = -1
    min_p: Annotated[
        float,
        Parameter("logits", Range(0.0, 1.0)),
        "keeps tokens of at least this share of the likeliest token's probability",
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Parameter("logits", Range(-2.0, 2.0), history=True),
        "subtracted from a token's logit for each time that the output has the token",
    ] = 0.0
    presence_penalty: Annotated[
        float,
        Parameter("logits", Range(-2.0, 2.0), history=True),
        "subtracted from the logit of each token that the output has",
    ] = 0.0
    # Beyond these a logit could leave the range of float32.
    repetition_penalty: Annotated[
        float,
        Parameter(
            "logits",
            Range(0.01, 100.0),
            history=True,
            ollama=("repeat_penalty",),
            gguf="penalty_repeat",
        ),
        "above 1 discourages tokens of prompt and output: divides their positive logits",
    ] = 1.0
    stop: Annotated[
        tuple[str, ...],
        Parameter("text", single=str, ollama=("stop",), anthropic=("stop_sequences",)),
        "texts that end the output; the text excludes them",
    ] = ()
    stop_regex: Annotated[
        tuple[str, ...], Parameter("text", single=str), "likewise, for patterns"
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], Parameter("request"), "likewise, for tokens"] = ()
    seed: Annotated[
        int | None,
        Parameter(
            "request",
            Range(-_INT63 - 1, _INT63),
            aliases=("sampling_seed",),
            generate=("sampling_seed", "seed"),
            ollama=("seed",),
        ),
        "the same seed draws the same token at the same position",
    ] = None
    ignore_eos: Annotated[
        bool, Parameter("request"), "continues behind the model's end of text"
    ] = False
    logit_bias: Annotated[
        dict[int, float],
        Parameter("logits", Range(-1e4, 1e4)),
        "{token id: number to add to its logit}",
    ] = msgspec.field(default_factory=dict)
    logprobs: Annotated[
        bool,
        Parameter("scores", aliases=("return_logprob",), openai=(), generate=()),
        "log-probabilities of the output tokens, in `get_meta_info`",
    ] = False
    top_logprobs: Annotated[
        int,
        Parameter("scores", Range(0, 128), aliases=("top_logprobs_num",), openai=(), generate=()),
        "also of this many alternatives per token",
    ] = 0
    prompt_logprobs_from: Annotated[
        int | None,
        Parameter("scores", Range(0), aliases=("logprob_start_len",), openai=(), generate=()),
        "also of the prompt's tokens from this index on",
    ] = None
    skip_special_tokens: Annotated[
        bool, Parameter("text"), "False: the text includes special tokens"
    ] = True
    no_stop_trim: Annotated[
        bool,
        Parameter("text", openai=("no_stop_trim", "include_stop_str_in_output")),
        "True: the text includes the stop that ended it",
    ] = False
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for value, (default, name, allowed) in zip(_ranged(self), _RANGED, strict=True):
            # Most are left at their default, which is in its range.
            if value is default or value is None:
                continue
            low, high, _ = allowed
            if type(value) is not dict and value >= low and (high is None or value <= high):
                continue
            if isinstance(value, dict):
                for key, each in value.items():
                    allowed.check(f"{name}[{key}]", each)
            else:
                allowed.check(name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadParameter(
                "min_tokens", f"({self.min_tokens}) exceeds {{max_tokens}} ({self.max_tokens})"
            )
        if len(self.stop) > 64:
            raise BadParameter("stop", f"may have at most 64 strings, not {len(self.stop)}")
        if len(self.stop_regex) > 32:
            raise BadParameter(
                "stop_regex", f"may have at most 32 patterns, not {len(self.stop_regex)}"
            )
        if "" in self.stop:
            raise BadParameter("stop", "must not have an empty string")


class SamplingKeywords(TypedDict, total=False):
    """Keyword-only parameters of `gen`, for type checkers; values may be None."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    stop_regex: str | Sequence[str] | None
    seed: int | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    no_stop_trim: bool | None
    logprobs: bool | int | None
    top_logprobs: int | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None


def _described(params: type[SamplingParams]) -> dict[str, Parameter]:
    hints = get_type_hints(params, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(params):
        if not hasattr(hints[field.name], "__metadata__"):
            continue
        kind, about, says = get_args(hints[field.name])
        default = field.default
        if default is msgspec.NODEFAULT:
            assert field.default_factory is not msgspec.NODEFAULT
            default = field.default_factory()
        found[field.name] = msgspec.structs.replace(
            about, help=says, name=field.name, type=kind, default=default
        )
    return found


PARAMETERS = _described(SamplingParams)
"""Description of each sampling parameter, by name."""


def names_in(api: Api) -> dict[str, str]:
    """Return the names in bodies of `api`, by our names, of the parameters that `api` has."""
    fields = {name: about.fields(api) for name, about in PARAMETERS.items()}
    return {name: names[0] for name, names in fields.items() if names}


TUNED = tuple(name for name, about in PARAMETERS.items() if about.tuned)
"""Parameters that models and servers have defaults for."""

_RANGED = [(p.default, p.name, p.range) for p in PARAMETERS.values() if p.range is not None]
_ranged = attrgetter(*(name for _, name, _ in _RANGED))


def with_seed_of(params: SamplingParams, index: int) -> SamplingParams:
    """Return `params` for sample `index`: with `index` added to the seed, if there is a seed."""
    if not index or params.seed is None:
        return params
    return msgspec.structs.replace(params, seed=nth_seed(params.seed, index))


def nth_seed(seed: int, index: int) -> int:
    """Return seed + index, wrapped to 64 bits."""
    return (seed + index + 2**63) % 2**64 - 2**63


def with_defaults(params: SamplingParams, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return `params` with a server's `defaults` of tuned parameters that the request lacks."""
    unnamed = {
        name: value
        for name, value in defaults.items()
        if PARAMETERS[name].tuned
        and name not in params.given
        and getattr(params, name) == PARAMETERS[name].default
    }
    return msgspec.structs.replace(params, **unnamed) if unnamed else params
