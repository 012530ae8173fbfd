"""Contents of a state: strings and immutable expressions, joined with `+`.

An expression knows the line that made it, so that a failure on the server can name it.
"""

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
    """A way of scoring choices, known to the runtime by its name."""

    name: ChoicesMethodName

    def __repr__(self) -> str:
        return f"rootlace.{self.name}"


token_length_normalized = ChoicesMethod("token_length_normalized")
"""The mean log-probability of a choice's tokens (the default)."""

greedy_token_selection = ChoicesMethod("greedy_token_selection")
"""Token by token, only the choices whose next token is likeliest are kept. A choice that has ended
counts as if it went on with the mean of its own log-probabilities."""

unconditional_likelihood_normalized = ChoicesMethod("unconditional_likelihood_normalized")
"""The mean over a choice's tokens of log p(token | prompt) - log p(token | choice alone)."""


def method_name(method: ChoicesMethod | str | None) -> ChoicesMethodName:
    """The wire name of `method`; None is the default. Raises TypeError for anything else."""
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
    """Expressions one after the other; flat."""

    parts: tuple[Appendable, ...]


@dataclass(frozen=True, slots=True)
class Gen(Expression):
    """Let the model write. `options` are under canonical names (`rootlace.language.sampling`)."""

    name: str | None
    options: Mapping[str, Any]
    site: Site = field(default_factory=call_site, repr=False, compare=False)

    @property
    def what(self) -> str:
        return f"gen({self.name!r})" if self.name else "gen()"


@dataclass(frozen=True, slots=True)
class Select(Expression):
    """Let the model choose one of `choices`. Of `options`, those of a `gen`, the seed and how it is
    served have a meaning here."""

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
    """An image (`image`)."""

    part: Image
    site: Site = field(default_factory=call_site, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class TemplateText(Expression):
    """Text of the model's chat template, such as stands around a list of tools: special tokens in
    it are recognised."""

    text: str


def items(expression: Appendable) -> tuple[Appendable, ...]:
    """The flat parts of `expression`."""
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
    """Generate text, under `name` if one is given.

    `options` are the sampling parameters of `rootlace.wire.sampling` (`temperature`, `top_p`,
    `seed`, ...) and those of a constraint. An option that is None is taken from the defaults given
    to `.run(...)`; without one, `max_tokens` is 128, and the rest is as the
    model recommends, or the temperature 1 and everything else off.
    With `n` > 1 the variable is a list, and the program goes on from the first sample. `choices`
    makes this a `select`. `logprobs`, `top_logprobs` are OpenAI's; `return_logprob`,
    `top_logprobs_num` and `logprob_start_len` (also the prompt's, from that token on) are sglang's:
    see `get_meta_info`. With `return_cache_report`, `get_meta_info(name)["cache_report"]` says how
    much of the prompt was cached and why no more (`rootlace.wire.protocol`).

    `prediction`: what the text may be much like (the document that it rewrites, say). As far as it
    is, it comes faster; it is the same with any prediction.

    `stop_regex`, patterns of Python's `re`, end the text where one of them is first found in it.

    `priority` (higher comes first), `timeout` (in seconds; that of `run` is the whole run's) and
    `cache`, an `rl.Cache`, say how the request is served: `rootlace.wire.sampling`.

    At most one of these says exactly what the text must be:

    - `type`: a pydantic model, dataclass, TypedDict, NamedTuple, msgspec Struct, Literal, Enum or
      plain type, or a combination. The text is its JSON (properties in the order of the fields,
      none besides them) and `s[name]` the value; `s.text(name)` is the text, which is also what
      the program goes on from. A value that was cut off (`max_tokens`) raises where it is read.
    - `json_schema`: a JSON schema, as a dictionary, a boolean or JSON text; a type is as `type=`.
    - `regex`: a pattern in the syntax of Python's `re` that the whole text matches.
    - `ebnf`: a grammar, Lark's or GBNF.
    - `structural_tag`: free text with constrained islands, such as tool calls; sglang's form:
      {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, a `schema` may be a type.
    - `tools`: those of `rl.tools(...)`: text in which each call is of one of them and fits its
      arguments, as the model is used to writing it; `s.call_tools()` then runs what it called.
      `tool_choice`: "auto" (the default), "required", "none" or the name of the tool to be called.
    - `dtype`: sglang's; int, float, bool or str, or a type as above; the value stays text.

    `whitespace` is that of JSON: "flexible" (the default) lets the model write it as it is used to,
    within bounds; "compact" has none, so that more of the text is forced. What token masks cannot
    enforce of a schema (`uniqueItems`, `not`, ...) is checked while the text is generated, and text
    that fails is rolled back and generated again; `strict=True` refuses such a schema instead. Text
    that must follow is appended without sampling it; `jump_forward="off"` samples every token.

    Raises TypeError for an unknown keyword, InvalidRequest or InvalidConstraint for a wrong value.
    """
    given = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "n": n,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        **options,
    }
    known = sampling.normalise(given, "gen()")
    if choices is None:
        return Gen(_name(name, "gen()"), known)
    if others := [source for source in sampling.SOURCES if source in known]:
        raise TypeError(f"gen() got several constraints (choices, {', '.join(others)}); give one")
    if known.get("n", 1) > 1:
        raise InvalidRequest(f"gen(): choices take no n={known['n']}; fork() for several choices")
    drawn = known.get("temperature", 0.0)
    return _select(name, choices, drawn, choices_method, "gen()", known)


def ids(tokens: Iterable[int]) -> TokenIds:
    """Append token ids as they are: a prompt that was tokenized elsewhere, say.

    Nothing is put before or between them, no BOS either, and text around them is tokenized on its
    own. A state's `text()` does not show them, for only the runtime knows what they spell. Raises
    TypeError for a value that is not a whole number, InvalidRequest for a negative one; an id that
    the model does not have fails on the server.
    """
    try:
        found = tuple(map(operator.index, tokens))
    except TypeError as error:
        raise TypeError(f"ids() takes token ids: {error}") from None
    if min(found, default=0) < 0:
        raise InvalidRequest(f"ids(): {min(found)} is no token id")
    return TokenIds(found)


# What the first bytes of an image say of its type.
_IMAGES = (
    (re.compile(rb"\x89PNG\r\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
)


def image(source: str | os.PathLike[str] | bytes) -> ImagePart:
    """An image in a message: a file's path, its bytes, or an address (http://, https://, data:).

    Models that read text only refuse it at its line; `OpenAIBackend`, `AnthropicBackend` and
    `LiteLLMBackend` pass it on. Raises InvalidRequest for a file that cannot be read, or that is no
    PNG, JPEG, GIF or WebP.
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
    """Generate a string in double quotes, as JSON writes it: `gen(dtype=str)`."""
    return _typed(name, max_tokens, str, "gen_string()", options)


def _typed(
    name: str | None, max_tokens: int | None, dtype: type, caller: str, options: dict[str, Any]
) -> Gen:
    for reserved in options.keys() & set(sampling.SOURCES):
        raise TypeError(f"{caller} got an unexpected keyword argument {reserved!r}")
    given = {"max_tokens": max_tokens, **options, "dtype": dtype}
    return Gen(_name(name, caller), sampling.normalise(given, caller))


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | str | None = None,
) -> Select:
    """Let the model choose one of `choices`; the best one becomes part of the text.

    `choices_method` is `token_length_normalized` (default), `greedy_token_selection` or
    `unconditional_likelihood_normalized`. With a temperature above 0 the choice is drawn, by the
    seed of the run if there is one.
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
    """A system message."""
    return _role("system", content)


def user(content: Appendable | None = None) -> Chain:
    """A user's message."""
    return _role("user", content)


def assistant(content: Appendable | None = None) -> Chain:
    """An assistant's message; usually it holds a `gen`."""
    return _role("assistant", content)


def tool(content: Appendable | None = None) -> Chain:
    """A tool's result, for models whose chat template has that role."""
    return _role("tool", content)


def messages(given: Sequence[Mapping[str, Any]]) -> Chain:
    """The messages of a conversation as OpenAI's interface has them: {"role", "content"}, where
    the content is a string or a list of {"type": "text", "text"} and {"type": "image_url",
    "image_url": {"url"}}."""
    parts: list[Appendable] = []
    for index, message in enumerate(given):
        if not isinstance(message, Mapping) or not message.keys() >= {"role", "content"}:
            raise TypeError(f"messages[{index}] is no dictionary with 'role' and 'content'")
        # What a client's own message does not have stands there as None.
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
