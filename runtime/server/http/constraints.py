"""Fields that ask for a constraint, as OpenAI, sglang, vLLM and Rootlace spell them. One
`Constraint` is made of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from rootlace.runtime.server.http.body import Body, ignored, refused
from rootlace.runtime.server.http.connections import note_warning
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.types.constraint_kinds import KINDS, Remark, patterns, remarks
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import CONSTRAINT_OPTIONS, Constraint, ConstraintKind

MAX_WHITESPACE_PATTERN = 256
MAX_PATTERNS = 256
"""Most patterns of a tool's schema checked here: each takes some 50 us."""

Source = str | bool | dict[str, Any] | list[str]

if TYPE_CHECKING:
    _KindFields = Body
else:
    _KindFields = msgspec.defstruct(
        "_KindFields",
        [(name, kind.field | None, None) for name, kind in KINDS.items()],
        bases=(Body,),
    )


class ConstraintBody(_KindFields):
    """Fields of one constraint (sglang's names, and `choices`), and how it is enforced.

    `whitespace`, `strict` and `jump_forward` are those of `protocol.Constraint`. The three apply to
    a constraint in any spelling, and have no effect without one.
    """

    whitespace: Literal["compact", "flexible"] | None = None
    strict: bool | None = None
    jump_forward: Literal["canonical", "off"] | bool | None = None


class JsonSchema(Body):
    """`response_format.json_schema`. The schema is always enforced; `strict` makes a keyword that
    looks misspelt an error."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's field. `json_object` may have llama.cpp's `schema`, or TGI's `value`, which Hugging
    Face's client makes of OpenAI's `json_schema`. `structural_tag` is sglang's with `structures`
    and `triggers`, or xgrammar's with a `format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    schema: dict[str, Any] | bool | None = None
    value: dict[str, Any] | bool | None = None
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Body):
    """vLLM's newer spelling of its `guided_*` fields."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Annotated[
        bool | None,
        refused("a schema means what it says: write additionalProperties: false into it"),
    ] = None
    disable_fallback: Annotated[
        bool | None, ignored("there is no fallback that would give up exactness")
    ] = None


class OpenAIConstraintBody(ConstraintBody):
    """`ConstraintBody` with OpenAI's `response_format` and vLLM's fields."""

    response_format: ResponseFormat | None = None
    guided_regex: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: StructuredOutputs | None = None


class OfTool(NamedTuple):
    """Part of a constraint about one tool: the schema of its arguments, and whether they must fit
    (None: as far as enforceable). `within`: JSON pointer to the arguments' schema in the
    constraint's schema."""

    name: str
    schema: Any
    strict: bool | None
    within: str = ""


class Rule(msgspec.Struct, frozen=True):
    """Constraint, and the field that asks for it, which the engine's errors are to name.

    `strict`: a keyword of the schema that looks misspelt is an error. `original`: the client's
    constraint, if `constraint` was derived from it. `tools`: tools that the constraint is made of.
    """

    constraint: Constraint
    param: str
    strict: bool = False
    original: Constraint | None = None
    tools: tuple[OfTool, ...] = ()

    @property
    def is_format(self) -> bool:
        """Return whether the field gives a text its format, and asks for no calls."""
        return self.param.startswith(("response_format", "text.format", "output_config.format"))

    def check_keywords(self) -> None:
        """Warn of keywords without effect or of older drafts. Raises InvalidConstraint for a
        misspelt keyword of a strict schema."""
        original = self.original or self.constraint
        if not self.tools or self.original is not None:
            strict = self.strict or original.strict
            if original.kind == "json_schema":
                _check_keywords(original.source, self.param, self.param, strict)
            elif original.kind in ("structural_tag", "ebnf"):
                from rootlace.runtime.structured.gbnf import schemas_of_grammar
                from rootlace.runtime.structured.structural_tag import schemas_of_tag

                within = schemas_of_tag if original.kind == "structural_tag" else schemas_of_grammar
                for schema in within(original.source):
                    _check_keywords(schema, self.param, self.param, strict)
        for tool in self.tools:
            source = msgspec.json.encode(tool.schema).decode()
            whose = f"tool {tool.name!r}"
            _check_keywords(source, "tools", whose, tool.strict is True)
            # The engine drops such a schema silently where it need not be enforced.
            for remark in _malformed_patterns(source):
                if tool.strict is not False:
                    raise InvalidConstraint(f"{whose}: {remark}", "tools")
                note_warning(f"{whose}: {remark}")

    def with_tool(self, message: str) -> str:
        """Return the engine's message with the name of the wrong schema's tool, and the place."""
        place, _, pointer = message.partition(" #")
        tags, alone = _TAG.findall(place), _ALONE.search(place)
        tools: list[OfTool] = []
        if tags and self.tools:
            tools = [self.tools[int(tags[-1]) % len(self.tools)]]
        elif alone and self.tools and self.tools[0].within:
            tools = [*self.tools[int(alone[1]) :][:1]]
        elif self.original is None:
            definition = _DEFINITION.match(pointer)
            tools = [
                tool
                for tool in self.tools
                if len(self.tools) == 1
                or (tool.within and pointer.startswith(f"{tool.within}/"))
                or (definition and definition[1] in (tool.schema or {}).get("$defs", ()))
            ]
        if tools and pointer:
            message = f"json_schema: #{pointer.removeprefix(tools[0].within)}"
        return f"tool {tools[0].name!r}: {message}" if tools else message


_TAG = re.compile(r"\btags\[(\d+)\]")
_ALONE = re.compile(r"\bformat\.elements\[(\d+)\]\.json_schema")
_DEFINITION = re.compile(r"/\$defs/([^/:]+)")


@functools.lru_cache(maxsize=128)
def _malformed_patterns(schema: str) -> tuple[Remark, ...]:
    """Find malformed patterns in a schema; such patterns have no effect."""
    try:
        malformed = [*islice(patterns(schema), MAX_PATTERNS)]
        if not malformed:
            return ()
        # Late imports: importing the reader of patterns takes a fifth of a server's start.
        from rootlace.runtime.structured.json_schema.pattern import syntax_error

        return tuple(
            Remark(path, f"{one!r}: {wrong}", misspelt=True)
            for path, one in malformed
            if (wrong := syntax_error(one))
        )
    except RecursionError:
        return ()  # too deep: it will be refused


def _check_keywords(source: str, param: str, whose: str, strict: bool) -> None:
    for remark in remarks(source):
        if strict and remark.misspelt:
            raise InvalidConstraint(f"{whose}: {remark}", param)
        note_warning(f"{whose}: {remark}")


_FIELDS = (
    *KINDS,
    "response_format",
    *("guided_regex", "guided_json", "guided_choice", "guided_grammar", "structured_outputs"),
)


_VLLM: Mapping[str, ConstraintKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choices",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
"""Kinds of vLLM's fields, by their names behind `guided_` and `structured_outputs.`."""
_values = attrgetter(*_FIELDS)
_NOTHING = (None,) * len(_FIELDS)


def openai_constraint(
    body: OpenAIConstraintBody, options: Mapping[str, Any] | None = None
) -> Rule | None:
    """Return the one constraint of a body of OpenAI's endpoints, with its `openai_options`.

    Raises InvalidParameter if there are several, or for an option that cannot be applied.
    """
    options = openai_options(body) if options is None else options
    if _values(body) == _NOTHING:
        return None
    outputs = body.structured_outputs or StructuredOutputs()
    found: dict[str, tuple[ConstraintKind, Source | None]] = {
        "response_format": _response_format(body.response_format),
        "structured_outputs.json_object": (
            "json_schema",
            {"type": "object"} if outputs.json_object else None,
        ),
    }
    for name, kind in _VLLM.items():
        found[f"guided_{name}"] = kind, getattr(body, f"guided_{name}", None)
        found[f"structured_outputs.{name}"] = kind, getattr(outputs, name)
    form = body.response_format and body.response_format.json_schema
    strict = bool(form and form.strict)
    return _only_one(_sglang(body) | found, options, strict)


def openai_options(body: OpenAIConstraintBody) -> dict[str, Any]:
    """Return `constraint_options`, with vLLM's fields for white space.

    Raises InvalidParameter for an option that cannot be applied.
    """
    options = constraint_options(body)
    if body.guided_whitespace_pattern is None and body.structured_outputs is None:
        return options
    outputs = body.structured_outputs or StructuredOutputs()
    for param, pattern in (
        ("guided_whitespace_pattern", body.guided_whitespace_pattern),
        ("structured_outputs.whitespace_pattern", outputs.whitespace_pattern),
    ):
        if pattern is not None and not _admits_flexible(param, pattern):
            _make_compact(options, param)
    if outputs.disable_any_whitespace:
        _make_compact(options, "structured_outputs.disable_any_whitespace")
    return options


def sglang_constraint(body: ConstraintBody, below: str) -> Rule | None:
    """Return the one constraint of sglang's `sampling_params`, at `below` in the body."""
    found = {f"{below}.{name}": source for name, source in _sglang(body).items()}
    return _only_one(found, constraint_options(body))


def constraint_options(body: ConstraintBody) -> dict[str, Any]:
    """Return the options of `Constraint` that a body sets."""
    options: dict[str, Any] = {}
    for name in CONSTRAINT_OPTIONS:
        if (value := getattr(body, name)) is not None:
            options[name] = value
    if isinstance(options.get("jump_forward"), bool):
        options["jump_forward"] = "canonical" if options["jump_forward"] else "off"
    return options


def json_source(value: Source) -> str:
    """Return a constraint's source as text: JSON, unless it is text already."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def schema_constraint(schema: Source, param: str, strict: bool = False) -> Rule:
    """Make the constraint of a JSON schema, requested by the field `param`."""
    return Rule(Constraint("json_schema", json_source(schema)), param, strict)


def _sglang(body: ConstraintBody) -> dict[str, tuple[ConstraintKind, Source | None]]:
    return {name: (name, getattr(body, name)) for name in KINDS}


def _only_one(
    sources: Mapping[str, tuple[ConstraintKind, Source | None]],
    options: Mapping[str, Any],
    strict: bool = False,
) -> Rule | None:
    present = [(name, kind, src) for name, (kind, src) in sources.items() if src is not None]
    if len(present) > 1:
        names = [name for name, _, _ in present]
        raise InvalidParameter(names[1], f"only one constraint is possible, not {', '.join(names)}")
    if not present:
        return None
    ((param, kind, source),) = present
    return Rule(Constraint(kind, json_source(source), **options), param, strict)


_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "json_object": ("schema", "value"),
    "json_schema": ("json_schema",),
    "structural_tag": ("structures", "triggers", "format"),
}


def _response_format(field: ResponseFormat | None) -> tuple[ConstraintKind, Source | None]:
    if field is None:
        return "json_schema", None
    for kind, names in _OF_TYPE.items():
        for name in names:
            if kind != field.type and getattr(field, name) is not None:
                # A schema that is not enforced must not look like one that is.
                param = f"response_format.{name}"
                says = f"{param} belongs to type {kind!r}, not to {field.type!r}"
                if field.type == "json_schema":
                    says += "; the schema of this type is response_format.json_schema.schema"
                raise InvalidParameter(param, says)
    if field.type == "text":
        return "json_schema", None
    if field.type == "json_object":
        schemas = [one for one in (field.schema, field.value) if one is not None]
        if len(schemas) > 1:
            param = "response_format.value"
            raise InvalidParameter(param, f"{param} is another name of response_format.schema")
        return "json_schema", schemas[0] if schemas else {"type": "object"}
    if field.type == "structural_tag" and field.format is not None:
        return "structural_tag", {"type": "structural_tag", "format": field.format}
    if field.type == "structural_tag":
        for name in ("structures", "triggers"):
            if getattr(field, name) is None:
                param = f"response_format.{name}"
                raise InvalidParameter(param, f"{param} is missing")
        return "structural_tag", {"structures": field.structures, "triggers": field.triggers}
    if field.json_schema is None or field.json_schema.schema is None:
        raise InvalidParameter(
            "response_format.json_schema", "response_format.json_schema.schema is missing"
        )
    return "json_schema", field.json_schema.schema


def _make_compact(options: dict[str, Any], param: str) -> None:
    if options.setdefault("whitespace", "compact") == "flexible":
        raise InvalidParameter("whitespace", f"{param} excludes flexible white space")


def _admits_flexible(param: str, pattern: str) -> bool:
    """Return whether a pattern matches all flexible white space. Raises InvalidParameter if it
    matches neither that nor the empty text."""
    if len(pattern) > MAX_WHITESPACE_PATTERN:
        raise InvalidParameter(
            param, f"{param} must not be longer than {MAX_WHITESPACE_PATTERN} characters"
        )
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidParameter(param, f"{param} is no regular expression: {error}") from None
    if compiled.fullmatch("") is None:
        raise InvalidParameter(param, f"{param} demands white space; the model may leave it out")
    from rootlace.runtime.structured.json_schema.json_text import WHITESPACES

    return all(compiled.fullmatch(gap) for gap in WHITESPACES)
