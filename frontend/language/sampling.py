"""Conversion of users' options into wire messages: `SamplingParams` and `Constraint`.

Options have OpenAI's and sglang's names. The rest of the package uses canonical names. So a
program's defaults and one `gen`'s options merge by key.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import (
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

import msgspec

from rootlace import types
from rootlace.language.failures import warn
from rootlace.types.constraint_kinds import KINDS, KindKeywords, remarks
from rootlace.wire.errors import InvalidConstraint, InvalidRequest
from rootlace.wire.protocol import CONSTRAINT_OPTIONS, Constraint
from rootlace.wire.sampling import (
    PARAMETERS,
    PLAIN,
    TUNED,
    Cache,
    Handling,
    SamplingKeywords,
    SamplingParams,
)
from rootlace.wire.tool_calls import PLAIN_TOOLS, ToolFormat

# Handling -----------------------------------------------------------------------------------------
#
# How a program's requests are served: `priority`, `timeout` and `cache` among its options.


NAMES = frozenset(Handling.__struct_fields__)


class HandlingKeywords(TypedDict, total=False):
    """Options of handling, for type checkers; the values may be None."""

    priority: int | None
    timeout: float | None
    cache: Cache | Mapping[str, Any] | None


def read_handling(options: Mapping[str, Any], caller: str) -> Handling:
    """Read `Handling` from canonical `options`. Raises InvalidRequest for a wrong value."""
    if NAMES.isdisjoint(options):  # as nearly always
        return PLAIN
    fields = {name: options[name] for name in NAMES & options.keys()}
    if not isinstance(fields.get("cache", {}), Cache | Mapping):
        raise InvalidRequest(f"{caller}: cache takes an rl.Cache, not {fields['cache']!r}")
    try:
        return msgspec.convert(fields, Handling)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{caller}: {error}") from None


# Signature ----------------------------------------------------------------------------------------
#
# Signatures that list what a function takes as `**options`: for `help`, shells and notebooks.


F = TypeVar("F", bound=Callable[..., Any])


def keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """Return a keyword-only parameter."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def with_keywords(options: Iterable[inspect.Parameter]) -> Callable[[F], F]:
    """Return a decorator that lists `options` as keywords in the signature, before `**options`.

    The function's own parameters stay unchanged. `**options` stays in the signature, since it also
    takes sglang's names; calls are not affected.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        others = [each for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD]
        taken = {each.name for each in own}
        listed = [
            each.replace(kind=each.KEYWORD_ONLY)
            for each in options
            if each.name not in taken and each.kind is not each.VAR_KEYWORD
        ]
        shown = signature.replace(parameters=[*own, *listed, *others])
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return decorate


# Sampling -----------------------------------------------------------------------------------------


PARAMS = PARAMETERS.keys()
# Options that constrain the text, at most one per `gen`; `CONSTRAINT_OPTIONS` control how the
# constraint is enforced, and need one.
SOURCES = ("dtype", "type", *KINDS, "tools")
ALIASES = {alias: name for name, about in PARAMETERS.items() for alias in about.aliases}
# Accepted for sglang's programs, without effect: log-probabilities always carry their text, and
# fast tokenizers have no such setting.
NO_EFFECT = frozenset({"return_text_in_logprobs", "spaces_between_special_tokens"})
REPORT = "return_cache_report"
PREDICTION = "prediction"
TOOL_CHOICE = "tool_choice"
OPTIONS = frozenset(
    {
        *(*PARAMS, *SOURCES, *CONSTRAINT_OPTIONS, *ALIASES, *NO_EFFECT, *NAMES),
        *(REPORT, PREDICTION, TOOL_CHOICE),
    }
)
# A program with **kwargs gets these as its own arguments: the names are everyday words, and are
# rarely meant as defaults for all of its generations.
EVERYDAY = frozenset({"type", "choices", "tools", PREDICTION, *NAMES})

_LISTS = frozenset(name for name, about in PARAMETERS.items() if get_origin(about.type) is tuple)

# Constraints of texts no longer than this are built once.
_REMEMBERED_LENGTH = 1 << 14

# A number ends where the model writes white space: the pattern admits it and the stop strings cut
# it off again. Without it, a model that does not feel like stopping would write digits for ever.
NUMBER_STOPS = (" ", "\n")
# The same for numbers as JSON writes them, which nothing else would end. An int has as many digits
# as in a schema, a float as many as repr() writes: a small model asked for a score wrote 1.000...
# to the end.
_BARE: dict[Any, str] = {
    int: r"-?(0|[1-9][0-9]{0,19})[ \n]?",
    float: r"-?(0|[1-9][0-9]{0,16})(\.[0-9]{1,21})?([eE][-+]?[0-9]{1,2})?[ \n]?",
}
_DTYPES = {
    "int": r"[-+]?[0-9]+[ \n]?",
    "float": r"[-+]?[0-9]*\.?[0-9]+[ \n]?",
    "bool": r"(True|False)",
    "str": r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"',
}
JSON_TYPES = {
    _BARE[int]: "integer",
    _BARE[float]: "number",
    _DTYPES["int"]: "integer",
    _DTYPES["float"]: "number",
    _DTYPES["str"]: "string",
}
"""JSON types by pattern, for servers that take a JSON schema but no pattern."""


def plain(value: Any) -> Any:
    """Return `value`, with text and numbers of other types (NumPy's, say) as Python's own types.
    Messages and saved states hold only Python's own."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def normalise(
    options: Mapping[str, Any], caller: str, names: Collection[str] = ()
) -> dict[str, Any]:
    """Return `options` under their canonical names, without None values. Error messages suggest
    close names, among them `names`.

    Raises TypeError for a name that is unknown or given twice (once as an alias). Raises
    InvalidRequest for a value that no sampler can use.
    """
    known: dict[str, Any] = {}
    if not options:
        return known
    check_names(options, OPTIONS, caller, names)
    for name, value in options.items():
        if value is None or name in NO_EFFECT:
            continue
        canonical = ALIASES.get(name, name)
        if canonical in known:
            raise TypeError(f"{caller} got {canonical!r} twice (also as {name!r})")
        known[canonical] = value
    _expand(known)
    _check(known, caller)
    return known


def check_names(
    names: Iterable[str], known: Collection[str], caller: str, meant: Collection[str] = ()
) -> None:
    """Raise TypeError for a name not in `known`; the message suggests a close name of `known` or
    `meant`."""
    for name in names:
        if name not in known:
            close = get_close_matches(name, {*known, *meant}, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{caller} got an unexpected keyword argument {name!r}{hint}")


def _expand(known: dict[str, Any]) -> None:
    """Replace shorthands by their long forms: one stop string by a list of one, for example."""
    for name, value in known.items():
        known[name] = plain(value)
    for name in _LISTS & known.keys():
        single = PARAMETERS[name].single
        if single is not None and isinstance(known[name], single):
            known[name] = (known[name],)
        elif isinstance(known[name], Iterable):
            known[name] = tuple(map(plain, known[name]))
    if isinstance(known.get("jump_forward"), bool):
        known["jump_forward"] = "canonical" if known["jump_forward"] else "off"
    schema = known.get("json_schema")
    if "type" not in known and not (schema is None or isinstance(schema, (str, Mapping, bool))):
        known["type"] = known.pop("json_schema")
    logprobs = known.get("logprobs")
    if isinstance(logprobs, int) and not isinstance(logprobs, bool):
        known["logprobs"] = True  # OpenAI's completions: the number of alternatives
        known.setdefault("top_logprobs", logprobs)
    if known.get("prompt_logprobs_from", 0) == -1:
        del known["prompt_logprobs_from"]  # sglang's "only the output"


def _check(known: Mapping[str, Any], caller: str) -> None:
    """Check values at the line of the call, not when the server answers. Raises InvalidRequest,
    InvalidConstraint or TypeError."""
    params = {name: value for name, value in known.items() if name in PARAMS}
    # The other bound may come from the program's defaults: it is compared when they are merged.
    params.setdefault("max_tokens", None)
    _convert(params, caller)
    if not isinstance(known.get(REPORT, False), bool):
        raise InvalidRequest(f"{caller}: {REPORT} must be True or False, not {known[REPORT]!r}")
    if not isinstance(known.get(PREDICTION, ""), str):
        raise InvalidRequest(f"{caller}: {PREDICTION} must be text, not {known[PREDICTION]!r}")
    read_handling(known, caller)
    if TOOL_CHOICE in known and "tools" not in known:
        raise TypeError(f"{caller} got tool_choice without tools")
    given = [name for name in SOURCES if name in known]
    if len(given) > 1:
        raise TypeError(f"{caller} got several constraints ({', '.join(given)}); give one")
    if given:
        made = constraint(known)
        if "json_schema" in known and made is not None:
            _check_keywords(made, caller)
    else:
        _constraint_options(known)


def _check_keywords(made: Constraint, caller: str) -> None:
    """Warn of a schema's misspelt keywords, which would constrain nothing, and of keywords of older
    drafts. Raises InvalidConstraint for a misspelt keyword if the schema is `strict`."""
    for remark in remarks(made.source):
        wrong = f"{caller}: {remark}"
        if made.strict and remark.misspelt:
            raise InvalidConstraint(wrong)
        warn(wrong)


def _convert(params: Mapping[str, Any], caller: str) -> SamplingParams:
    named = tuple(name for name in TUNED if params.get(name) == PARAMETERS[name].default)
    try:
        return msgspec.convert({**params, "given": named}, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{caller}: {error}") from None


@runtime_checkable
class Offered(Protocol):
    """Tools that a model may call (`rootlace.language.tools.Tools`)."""

    def constrain(self, form: ToolFormat, choice: str) -> Mapping[str, Any] | None:
        """Return the structural tag of text with calls; None means any text."""


class GenKeywords(SamplingKeywords, HandlingKeywords, KindKeywords, total=False):
    """Keyword-only options of `gen`, for type checkers and for its signature."""

    return_text_in_logprobs: bool | None
    return_cache_report: bool | None
    prediction: str | None
    timeout: float | None
    dtype: Any
    type: Any
    tools: Offered | None
    tool_choice: str | None
    whitespace: Literal["compact", "flexible"] | None
    strict: bool | None
    jump_forward: Literal["canonical", "off"] | bool | None


class Asked(NamedTuple):
    """Resolved options of one `gen`. `type` is the Python type of the value; None means text."""

    params: SamplingParams
    constraint: Constraint | None
    type: Any
    cache_report: bool = False
    handling: Handling = PLAIN
    prediction: str = ""


def resolve(
    defaults: Mapping[str, Any],
    own: Mapping[str, Any],
    caller: str = "gen()",
    form: ToolFormat = PLAIN_TOOLS,
) -> Asked:
    """Merge the program's defaults with the call's own options, which win. `form` is the model's
    tool-call format.

    A constraint among the call's options replaces the program's constraint of any kind.
    """
    if any(name in own for name in SOURCES):
        defaults = {name: value for name, value in defaults.items() if name not in SOURCES}
    merged = {**defaults, **own}
    params = {name: value for name, value in merged.items() if name in PARAMS}
    if "tools" in merged:  # some models write calls in special tokens
        params.setdefault("skip_special_tokens", False)
    if stops := _number_stops(merged):
        params["stop"] = (*params.get("stop", ()), *stops)
    return Asked(
        _convert(params, caller),
        constraint(merged, form),
        merged.get("type"),
        merged.get(REPORT, False),
        handling_of(defaults, own, caller),
        merged.get(PREDICTION, ""),
    )


def handling_of(
    defaults: Mapping[str, Any], own: Mapping[str, Any], caller: str = "gen()"
) -> Handling:
    """Return the handling of one request: the call's options override the program's."""
    found = read_handling(own, caller)
    if not found.cache.share:
        raise InvalidRequest(f"{caller}: only a whole run is not shared: run(cache=...)")
    return read_handling({**defaults, **own}, caller) if defaults else found


def _number_stops(options: Mapping[str, Any]) -> tuple[str, ...]:
    if "dtype" in options:
        bare = _dtype_name(options["dtype"]) in ("int", "float")
    else:
        bare = _is_bare(options.get("type"))
    return NUMBER_STOPS if bare else ()


def _is_bare(kind: Any) -> bool:
    return kind is int or kind is float


def _dtype_name(dtype: Any) -> str:
    return dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")


def constraint(options: Mapping[str, Any], form: ToolFormat = PLAIN_TOOLS) -> Constraint | None:
    """Return the constraint among canonical `options`. Raises InvalidConstraint if it is wrong."""
    name = next((name for name in SOURCES if name in options), None)
    if name is None:
        return None
    value = options[name]
    if name == "tools":
        if not isinstance(value, Offered):
            raise InvalidConstraint(f"tools takes what rl.tools(...) gives, not {value!r}")
        name, value = "structural_tag", value.constrain(form, options.get(TOOL_CHOICE, "auto"))
        if value is None:
            return None
    enforced = [options.get(option) for option in CONSTRAINT_OPTIONS]
    if isinstance(value, str) and len(value) <= _REMEMBERED_LENGTH:
        try:
            return _built_once(name, value, *enforced)
        except TypeError:
            pass  # an option that cannot be hashed: `_built` says what is wrong with it
    return _built(name, value, *enforced)


def _built(name: Any, value: Any, *enforced: Any) -> Constraint:
    """Build a constraint. `enforced` has the values of `CONSTRAINT_OPTIONS`, None for a missing
    option."""
    kind, source = _READERS[name](value) if name in _READERS else (name, KINDS[name].write(value))
    named = zip(CONSTRAINT_OPTIONS, enforced, strict=True)
    fields = {name: value for name, value in named if value is not None}
    return Constraint(kind, source, **_constraint_options(fields))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=128, typed=True)
def _built_once(name: str, value: str, *enforced: Any) -> Constraint:
    """Build a constraint, with a cache, since programs repeat the same text."""
    return _built(name, value, *enforced)


def _constraint_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for enforcing a constraint. Raises InvalidRequest for an unknown value."""
    fields = {name: options[name] for name in CONSTRAINT_OPTIONS if name in options}
    if not fields:
        return fields
    try:
        msgspec.convert({"kind": "regex", "source": "", **fields}, Constraint)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        values = ", ".join(map(repr, get_args(get_type_hints(Constraint)[name])))
        known = f"; there are {values}" if values else ""
        raise InvalidRequest(f"{name}: {reason}{known}") from None
    return fields


Source = tuple[str, str]


def _of_dtype(dtype: Any) -> Source:
    simple = dtype in (int, float, bool, str) or isinstance(dtype, str)
    if simple and _dtype_name(dtype) in _DTYPES:
        return "regex", _DTYPES[_dtype_name(dtype)]
    if isinstance(dtype, str):
        names = ", ".join(map(repr, _DTYPES))
        raise InvalidConstraint(f"dtype must be a type or one of {names}, not {dtype!r}")
    return "json_schema", types.schema_text(dtype)


def _of_type(kind: Any) -> Source:
    if _is_bare(kind):
        return "regex", _BARE[kind]
    return "json_schema", types.schema_text(kind)


_READERS: dict[str, Callable[[Any], Source]] = {"dtype": _of_dtype, "type": _of_type}
