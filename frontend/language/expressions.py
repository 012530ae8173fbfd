"""Contents of a state: strings and immutable expressions, joined with `+`. An expression remembers
the line that made it, so that a failure on the server can name the line."""

from __future__ import annotations

import base64
import inspect
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, get_args, get_type_hints

from rootlace.language import sampling
from rootlace.language.failures import Site, call_site
from rootlace.language.sampling import keyword, with_keywords
from rootlace.language.variables import check_awaited
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import ChoicesMethod as ChoicesMethodName
from rootlace.wire.protocol import Image

# Choices ------------------------------------------------------------------------------------------
#
# How `select` compares its choices. The scoring itself is done by the runtime.
#
# Each method is a constant to pass as `choices_method`; its name as a string works as well.


@dataclass(frozen=True)
class ChoicesMethod:
    """Method of scoring choices; the runtime knows it by its name."""

    name: ChoicesMethodName

    def __repr__(self) -> str:
        return f"rootlace.{self.name}"


token_length_normalized = ChoicesMethod("token_length_normalized")
"""Mean log-probability of a choice's tokens (the default)."""

greedy_token_selection = ChoicesMethod("greedy_token_selection")
"""Token by token, keep only the choices with the most probable next token. A choice that has ended
continues with the mean of its own log-probabilities."""

unconditional_likelihood_normalized = ChoicesMethod("unconditional_likelihood_normalized")
"""Mean over a choice's tokens of log p(token | prompt) - log p(token | choice alone)."""


def method_name(method: ChoicesMethod | str | None) -> ChoicesMethodName:
    """Return the wire name of `method`; None is the default. Raises TypeError for anything else."""
    if method is None:
        return token_length_normalized.name
    name = method.name if isinstance(method, ChoicesMethod) else method
    for known in get_args(ChoicesMethodName):
        if name == known:
            return known
    raise TypeError(
        f"choices_method must be one of {', '.join(get_args(ChoicesMethodName))}, not {method!r}"
    )


# Expressions --------------------------------------------------------------------------------------


class Expression:
    """Base of all expressions."""

    __slots__ = ()

    def __add__(self, other: object) -> Chain:
        if not isinstance(other, (str, Expression)):
            return NotImplemented
        return Chain((*items(self), *items(other)))

    def __radd__(self, other: object) -> Chain:
        if not isinstance(other, (str, Expression)):
            return NotImplemented
        return Chain((*items(other), *items(self)))

    def __format__(self, spec: str) -> str:
        # An f-string would quietly put the expression's description into the prompt.
        raise TypeError(
            f"{self!r} cannot be put into an f-string; join it with + (s += 'Answer: ' + gen('x'))"
        )


Appendable = str | Expression


@dataclass(frozen=True, slots=True)
class Chain(Expression):
    """Sequence of expressions, flat."""

    parts: tuple[Appendable, ...]


@dataclass(frozen=True, slots=True)
class Gen(Expression):
    """Generation of text. `options` have canonical names (`rootlace.language.sampling`)."""

    name: str | None
    options: Mapping[str, Any]
    site: Site = field(default_factory=call_site, repr=False, compare=False)

    @property
    def what(self) -> str:
        return f"gen({self.name!r})" if self.name else "gen()"


@dataclass(frozen=True, slots=True)
class Select(Expression):
    """Choice of the model among `choices`. Of a `gen`'s options, only the seed and the handling
    have an effect."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethodName
    temperature: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    site: Site = field(default_factory=call_site, repr=False, compare=False)

    @property
    def what(self) -> str:
        return f"select({self.name!r})" if self.name else "select()"


@dataclass(frozen=True, slots=True)
class RoleBegin(Expression):
    role: str
    site: Site = field(default_factory=call_site, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class RoleEnd(Expression):
    role: str
    site: Site = field(default_factory=call_site, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class TokenIds(Expression):
    """Token ids, appended unchanged (`ids`, and the offline engine's `input_ids`)."""

    ids: tuple[int, ...]
    site: Site = field(default_factory=call_site, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ImagePart(Expression):
    """Image (`image`)."""

    part: Image
    site: Site = field(default_factory=call_site, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class TemplateText(Expression):
    """Text of the model's chat template, around a list of tools for example. Special tokens in the
    text are recognised."""

    text: str


def items(expression: Appendable) -> tuple[Appendable, ...]:
    """Return the flat parts of `expression`."""
    return expression.parts if isinstance(expression, Chain) else (expression,)


# ---------------------------------------------------------------- what users call


@with_keywords(keyword(name, kind) for name, kind in get_type_hints(sampling.GenKeywords).items())
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    *,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | str | None = None,
    **options: Unpack[sampling.GenKeywords],
) -> Gen | Select:
    """Generate text, and store it as the variable `name` if given.

    `options` are the sampling parameters of `rootlace.wire.sampling` (`temperature`, `top_p`,
    `seed`, ...) and those of a constraint. None takes the default given to `.run(...)`. Without
    one, `max_tokens` is 128. Other options then take the model's recommended values, or the
    temperature is 1 and the rest is off. With `n` > 1 the variable is a list, and the program goes
    on from the first sample. `choices` makes the call a `select`. `logprobs`, `top_logprobs` are
    OpenAI's; `return_logprob`, `top_logprobs_num` and `logprob_start_len` (also the prompt's, from
    the token of this index) are sglang's: see `get_meta_info`. With `return_cache_report`,
    `get_meta_info(name)["cache_report"]` explains the number of the prompt's cached tokens.

    `prediction`: expected text, such as the document to rewrite. Matching parts come faster; the
    generated text is the same with any prediction.

    `stop_regex`, patterns of Python's `re`, end the text at the first match of one of them.

    `priority` (higher comes first), `timeout` (in seconds; that of `run` is the whole run's) and
    `cache`, an `rl.Cache`, control the serving of the request: `rootlace.wire.sampling`.

    At most one of these options constrains the text:

    - `type`: a pydantic model, dataclass, TypedDict, NamedTuple, msgspec Struct, Literal, Enum or
      plain type, or a combination. The text is its JSON (properties in the order of the fields,
      no others) and `s[name]` the value; `s.text(name)` is the text, from which the program goes
      on. Reading a value that was cut off (`max_tokens`) raises ProgramError.
    - `json_schema`: a JSON schema, as a dictionary, a boolean or JSON text; a type acts as `type=`.
    - `regex`: a pattern in the syntax of Python's `re` that the whole text matches.
    - `ebnf`: a grammar, Lark's or GBNF.
    - `structural_tag`: free text with constrained islands, such as tool calls; sglang's form:
      {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, a `schema` may be a type.
    - `tools`: the result of `rl.tools(...)`. Calls in the text have the model's own format, and
      name one of these tools with fitting arguments; `s.call_tools()` then runs the calls.
      `tool_choice`: "auto" (the default), "required", "none" or the name of the tool to be called.
    - `dtype`: sglang's; int, float, bool or str, or a type as above; the value stays text.

    `whitespace` of JSON: "flexible" (the default) lets the model write white space, within bounds;
    "compact" has none, so that more tokens are forced. Schema keywords that token masks cannot
    enforce (`uniqueItems`, `not`, ...) are checked during generation. Failing text is rolled back
    and generated again; `strict=True` refuses such a schema instead. Forced tokens are appended
    without sampling; `jump_forward="off"` samples every token.

    Raises TypeError for an unknown keyword, InvalidRequest or InvalidConstraint for a wrong value.
    """
    fields = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "n": n,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        **options,
    }
    known = sampling.normalise(fields, "gen()")
    if choices is None:
        return Gen(_name(name, "gen()"), known)
    if others := [source for source in sampling.SOURCES if source in known]:
        raise TypeError(f"gen() got several constraints (choices, {', '.join(others)}); give one")
    if known.get("n", 1) > 1:
        raise InvalidRequest(f"gen(): choices take no n={known['n']}; fork() for several choices")
    drawn = known.get("temperature", 0.0)
    return _select(name, choices, drawn, choices_method, "gen()", known)


def ids(tokens: Iterable[int]) -> TokenIds:
    """Append token ids unchanged, for example of a prompt that was tokenized elsewhere.

    No BOS or other token is added, and the surrounding text is tokenized separately. A state's
    `text()` omits the ids, since only the runtime can decode them. Raises TypeError for a value
    that is not a whole number, InvalidRequest for a negative one. An id outside the model's
    vocabulary fails on the server.
    """
    try:
        token_ids = tuple(map(operator.index, tokens))
    except TypeError as error:
        raise TypeError(f"ids() takes token ids: {error}") from None
    if min(token_ids, default=0) < 0:
        raise InvalidRequest(f"ids(): {min(token_ids)} is no token id")
    return TokenIds(token_ids)


# Media types by an image's first bytes.
_IMAGES = (
    (re.compile(rb"\x89PNG\r\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
)


def image(source: str | os.PathLike[str] | bytes) -> ImagePart:
    """Append an image to a message: a file's path, its bytes, or an address (http://, https://,
    data:).

    Text-only models refuse the image at its line; `OpenAIBackend`, `AnthropicBackend` and
    `LiteLLMBackend` pass the image on. Raises InvalidRequest for an unreadable file, and for a
    format other than PNG, JPEG, GIF or WebP.
    """
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return ImagePart(Image(url=source))
    try:
        if isinstance(source, bytes):
            data = source
        elif isinstance(source, str) and source.startswith("data:"):
            data = base64.b64decode(source.partition(";base64,")[2], validate=True)
        else:
            data = Path(source).read_bytes()
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"image(): {error}") from None
    kind = next((kind for begin, kind in _IMAGES if begin.match(data)), None)
    if kind is None:
        raise InvalidRequest("image() takes a PNG, JPEG, GIF or WebP")
    return ImagePart(Image(data=data, media_type=kind))


_OF_TYPED = [
    option
    for option in inspect.signature(gen).parameters.values()
    if option.name not in {*sampling.SOURCES, "choices_method"}
]


@with_keywords(_OF_TYPED)
def gen_int(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Gen:
    """Generate a whole number: `gen(dtype=int)`."""
    return _typed(name, max_tokens, int, "gen_int()", options)


@with_keywords(_OF_TYPED)
def gen_string(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Gen:
    """Generate a JSON string in double quotes: `gen(dtype=str)`."""
    return _typed(name, max_tokens, str, "gen_string()", options)


def _typed(
    name: str | None, max_tokens: int | None, dtype: type, caller: str, options: dict[str, Any]
) -> Gen:
    for reserved in options.keys() & set(sampling.SOURCES):
        raise TypeError(f"{caller} got an unexpected keyword argument {reserved!r}")
    settings = {"max_tokens": max_tokens, **options, "dtype": dtype}
    return Gen(_name(name, caller), sampling.normalise(settings, caller))


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | str | None = None,
) -> Select:
    """Let the model choose one of `choices`; the best one becomes part of the text.

    `choices_method` is `token_length_normalized` (default), `greedy_token_selection` or
    `unconditional_likelihood_normalized`. A temperature above 0 draws the choice at random, with
    the run's seed if there is one.
    """
    if choices is None:
        raise TypeError("select() needs choices")
    return _select(name, choices, temperature, choices_method, "select()")


def _select(
    name: str | None,
    choices: Iterable[str],
    temperature: float,
    method: ChoicesMethod | str | None,
    caller: str,
    given: Mapping[str, Any] = {},
) -> Select:
    if isinstance(choices, str):
        raise TypeError(f"{caller}: choices must be a list of strings, not one string")
    options = tuple(map(sampling.plain, choices))
    if not options:
        raise InvalidRequest(f"{caller}: choices must not be empty")
    for index, choice in enumerate(options):
        if not isinstance(choice, str):
            raise TypeError(f"{caller}: choices[{index}] is {type(choice).__name__}, not a string")
        if not choice:
            raise InvalidRequest(f"{caller}: choices[{index}] is empty")
    if not temperature >= 0:
        raise InvalidRequest(f"{caller}: temperature must not be negative, not {temperature}")
    return Select(_name(name, caller), options, method_name(method), float(temperature), given)


def _name(name: str | None, caller: str) -> str | None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{caller}: name must be a string, not {type(name).__name__}")
    return sampling.plain(name)


def _role(role: str, content: Appendable | None) -> Chain:
    check_awaited(content)
    if content is not None and not isinstance(content, (str, Expression)):
        raise TypeError(f"{role}() takes a string or an expression, not {type(content).__name__}")
    inner = () if content is None else items(content)
    return Chain((RoleBegin(role), *inner, RoleEnd(role)))


def system(content: Appendable | None = None) -> Chain:
    """Return a system message."""
    return _role("system", content)


def user(content: Appendable | None = None) -> Chain:
    """Return a user message."""
    return _role("user", content)


def assistant(content: Appendable | None = None) -> Chain:
    """Return an assistant message; usually it holds a `gen`."""
    return _role("assistant", content)


def tool(content: Appendable | None = None) -> Chain:
    """Return a tool message, for models whose chat template has the role `tool`."""
    return _role("tool", content)


def messages(given: Sequence[Mapping[str, Any]]) -> Chain:
    """Return a conversation of OpenAI messages: {"role", "content"}. The content is a string or a
    list of {"type": "text", "text"} and {"type": "image_url", "image_url": {"url"}}."""
    parts: list[Appendable] = []
    for index, message in enumerate(given):
        if not isinstance(message, Mapping) or not message.keys() >= {"role", "content"}:
            raise TypeError(f"messages[{index}] is no dictionary with 'role' and 'content'")
        # Clients' message objects hold missing fields as None.
        for extra in sorted(message.keys() - {"role", "content"}):
            if message[extra] not in (None, []):
                raise InvalidRequest(f"messages[{index}]: {extra!r} cannot be appended to a state")
        role, content = message["role"], message["content"]
        if isinstance(content, (list, tuple)):
            content = Chain(tuple(_content_part(part, index) for part in content))
        if not isinstance(role, str) or not isinstance(content, (str, Chain)):
            raise TypeError(f"messages[{index}]: role and content must be strings")
        parts += items(_role(role, content))
    return Chain(tuple(parts))


def _content_part(part: Any, index: int) -> Appendable:
    if isinstance(part, Mapping) and part.get("type") == "text":
        return str(part.get("text", ""))
    if isinstance(part, Mapping) and part.get("type") == "image_url":
        given = part.get("image_url")
        address = given.get("url") if isinstance(given, Mapping) else None
        # Messages may come from anybody: they name no file of this machine.
        if isinstance(address, str) and address.startswith(("http://", "https://", "data:")):
            return image(address)
        raise InvalidRequest(f"messages[{index}]: its image_url has no http, https or data address")
    raise InvalidRequest(
        f"messages[{index}]: its content may have parts of the types 'text' and 'image_url' only"
    )


def system_begin() -> RoleBegin:
    return RoleBegin("system")


def system_end() -> RoleEnd:
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    return RoleBegin("user")


def user_end() -> RoleEnd:
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    return RoleEnd("assistant")


def tool_begin() -> RoleBegin:
    return RoleBegin("tool")


def tool_end() -> RoleEnd:
    return RoleEnd("tool")
