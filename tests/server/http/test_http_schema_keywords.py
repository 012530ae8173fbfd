"""Keywords of schemas without effect, or of older drafts: reported in a header, or refused."""

import json
import logging
from typing import Any

import pytest

from rootlace.runtime.server.http.chat_request import (
    Tool,
    ToolChoice,
    calls_among_text,
    calls_or_format,
    forced_call,
)
from rootlace.runtime.server.http.constraints import Rule
from rootlace.runtime.server.tool_parsers.base import Format
from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint
from tests.server.http.conftest import Serve, Served
from tests.server.http.fake_model import FakeModel
from tests.server.test_formats import FORMATS
from tests.structured.random_model import byte_vocabulary

WRONG = {"type": "object", "propertes": {"a": {"type": "integer"}}}
TOLD = "json_schema: $.propertes is no keyword; did you mean 'properties'?"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
TAG = {"structures": [{"begin": "<a>", "schema": WRONG, "end": "</a>"}], "triggers": ["<a"]}

GRAMMAR = f'start: "%json {{" %json {json.dumps(WRONG)}'


def _named(strict: bool | None) -> dict[str, Any]:
    given = {"name": "n", "schema": WRONG, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": given}}


def _text(strict: bool | None) -> dict[str, Any]:
    return {
        "text": {"format": {"type": "json_schema", "name": "n", "schema": WRONG, "strict": strict}}
    }


def _tool(strict: bool | None) -> dict[str, Any]:
    function = {"name": "f", "parameters": WRONG, "strict": strict}
    return {"tools": [{"type": "function", "function": function}]}


REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {**CHAT, **_named(None)}, "response_format"),
    ("/v1/chat/completions", {**CHAT, "json_schema": WRONG}, "json_schema"),
    ("/v1/chat/completions", {**CHAT, "structural_tag": TAG}, "structural_tag"),
    ("/v1/chat/completions", {**CHAT, "ebnf": GRAMMAR}, "ebnf"),
    ("/v1/completions", {"prompt": "a", "guided_grammar": GRAMMAR}, "guided_grammar"),
    ("/v1/chat/completions", {**CHAT, **_tool(None)}, "tool 'f'"),
    ("/v1/chat/completions", {**CHAT, **_tool(None), "tool_choice": "required"}, "tool 'f'"),
    ("/v1/completions", {"prompt": "a", "guided_json": WRONG}, "guided_json"),
    ("/v1/completions", {"prompt": ["a", "b"], "guided_json": json.dumps(WRONG)}, "guided_json"),
    ("/v1/responses", {"input": "a", **_text(None)}, "text.format"),
    ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "f",
                                                "parameters": WRONG}]}, "tool 'f'"),
    ("/v1/messages", {**CHAT, "max_tokens": 5, "output_config": {
        "format": {"type": "json_schema", "schema": WRONG}}}, "output_config.format.schema"),
    ("/v1/messages", {**CHAT, "max_tokens": 5, "tools": [{"name": "f", "input_schema": WRONG}]},
     "tool 'f'"),
    ("/api/chat", {**CHAT, "format": WRONG}, "format"),
    ("/api/generate", {"model": "fake", "prompt": "a", "format": WRONG}, "format"),
    ("/api/chat", {**CHAT, **_tool(None)}, "tool 'f'"),
    ("/generate", {"text": "a", "sampling_params": {"json_schema": json.dumps(WRONG)}},
     "sampling_params.json_schema"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, body, whose", REQUESTS)
async def test_a_misspelt_keyword_is_told(
    served: Served, path: str, body: Any, whose: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with served.http.post(path, json={**body, "stream": stream}) as reply:
            assert reply.status == 200, await reply.text()
            assert reply.headers.getall("X-Rootlace-Warning") == [f"{whose}: {TOLD}"]
            await reply.read()
    assert f"{whose}: {TOLD}" in caplog.text


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/chat/completions", {**CHAT, **_named(True)}, "response_format"),
        ("/v1/chat/completions", {**CHAT, "json_schema": WRONG, "strict": True}, "json_schema"),
        ("/v1/chat/completions", {**CHAT, "structural_tag": TAG, "strict": True}, "structural_tag"),
        ("/v1/chat/completions", {**CHAT, "ebnf": GRAMMAR, "strict": True}, "ebnf"),
        ("/v1/chat/completions", {**CHAT, **_tool(True)}, "tools"),
        ("/v1/chat/completions", {**CHAT, **_tool(True), **_named(False)}, "tools"),
        ("/v1/chat/completions", {**CHAT, **_tool(False), **_named(True)}, "response_format"),
        ("/v1/responses", {"input": "a", **_text(True)}, "text.format"),
        ("/v1/messages", {**CHAT, "max_tokens": 5, "tools": [
            {"name": "f", "input_schema": WRONG, "strict": True}]}, "tools"),
        ("/generate", {"text": "a", "sampling_params": {"json_schema": WRONG, "strict": True}},
         "sampling_params.json_schema"),
    ],
)  # fmt: skip
async def test_in_a_strict_schema_it_is_an_error(
    served: Served, path: str, body: Any, param: str
) -> None:
    async with served.http.post(path, json=body) as reply:
        assert reply.status == 400
        error = (await reply.json())["error"]
        assert TOLD in error["message"]
        assert path == "/v1/messages" or (error["param"], error["code"]) == (
            param,
            "invalid_constraint",
        )


async def test_an_older_draft_is_told_and_served_where_strict_too(served: Served) -> None:
    schema = {
        "type": "array",
        "items": [{"type": "integer", "minimum": 1, "exclusiveMinimum": True}],
    }
    body = {**CHAT, "json_schema": schema, "strict": True}
    async with served.http.post("/v1/chat/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        told = reply.headers.getall("X-Rootlace-Warning")
    assert [one.split(" is ")[0] for one in told] == [
        "json_schema: json_schema: $.items",
        "json_schema: json_schema: $.items[0].exclusiveMinimum",
    ]


async def test_what_is_well_spelt_is_told_nothing(served: Served) -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"x-note": 1}]}
    for body in ({"json_schema": schema}, {"response_format": {"type": "json_object"}}, {}):
        async with served.http.post("/v1/chat/completions", json={**CHAT, **body}) as reply:
            assert reply.status == 200 and "X-Rootlace-Warning" not in reply.headers


async def test_warnings_are_few_short_and_ascii(served: Served) -> None:
    names = {f"é\r\nX: {i} " + "y" * 500: {"maxLenght": 1} for i in range(20)}
    body = {**CHAT, "json_schema": {"properties": names}}
    async with served.http.post("/v1/chat/completions", json=body) as reply:
        assert reply.status == 200 and "X" not in reply.headers
        told = reply.headers.getall("X-Rootlace-Warning")
    assert len(told) == 8
    assert all(one.isascii() and one.isprintable() and len(one) < 300 for one in told)


async def test_pages_may_read_it(serve: Serve) -> None:
    served = await serve(FakeModel(cors_origins="https://page.example"))
    headers = {"Origin": "https://page.example"}
    body = {**CHAT, "json_schema": WRONG}
    async with served.http.post("/v1/chat/completions", json=body, headers=headers) as reply:
        assert "X-Rootlace-Warning" in reply.headers["Access-Control-Expose-Headers"]
        assert "X-Rootlace-Warning" in reply.headers


# --- naming the wrong tool -----------------------------------------------------------------------

FORMAT = Rule(Constraint("json_schema", '{"type": "object"}'), "response_format")
FINE = Tool("fine", None, {"type": "object", "properties": {"a": {"type": "integer"}}})
PLAIN = Tool("plain")
BAD = Tool("bad", None, {"type": "object", "properties": {"x": {"type": "strin"}}}, True)
DEFINED = Tool(
    "defined",
    None,
    {"$defs": {"Q": {"type": "quux"}}, "properties": {"a": {"$ref": "#/$defs/Q"}}},
    True,
)


PATTERN = Tool(
    "pattern",
    None,
    {"type": "object", "properties": {"arguments": {"properties": {"x": {"pattern": "a("}}}}},
    True,
)
PLACES = {
    "bad": "#/properties/x/type: 'strin' is not",
    "defined": "#/$defs/Q/type: 'quux' is not",
    "pattern": "#/properties/arguments/properties/x/pattern: 'a(': missing )",
}
"""In the schema that the user wrote."""


def _made(form: Format, tools: list[Tool]) -> list[Rule]:
    return [
        forced_call(ToolChoice("required"), tools, form, {})[1],
        forced_call(ToolChoice("required", parallel=True), tools, form, {})[1],
        forced_call(ToolChoice("required", tools[-1].name), tools, form, {})[1],
        calls_among_text(tools, form, {}),
        calls_or_format(FORMAT, ToolChoice(), tools, form),
    ]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("wrong", [BAD, DEFINED, PATTERN], ids=lambda tool: tool.name)
def test_the_tool_whose_schema_is_malformed_is_named(form: Format, wrong: Tool) -> None:
    """The error's place is in the tool's schema, not in the grammar made from it."""
    compiler = GrammarCompiler(byte_vocabulary())
    for tools in ([wrong], [FINE, PLAIN, wrong]):
        for asked in _made(form, tools):
            with pytest.raises(InvalidConstraint) as caught:
                compiler.compile(asked.constraint)
            told = asked.with_tool(str(caught.value))
            assert told.startswith(f"tool {wrong.name!r}: json_schema: {PLACES[wrong.name]}")


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_the_format_that_is_malformed_is_no_tools(form: Format) -> None:
    constraint = Constraint("json_schema", '{"properties": {"x": {"type": "strin"}}}')
    wrong = Rule(constraint, "response_format")
    asked = calls_or_format(wrong, ToolChoice(), [FINE, PLAIN], form)
    with pytest.raises(InvalidConstraint) as caught:
        GrammarCompiler(byte_vocabulary()).compile(asked.constraint)
    assert asked.with_tool(str(caught.value)) == str(caught.value)


async def test_the_name_is_in_the_reply(served: Served) -> None:
    served.model.fail = InvalidConstraint("json_schema: #/anyOf/1/properties/arguments/type: no")
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("one", "two")
    ]
    body = {**CHAT, "tools": tools, "tool_choice": "required"}
    async with served.http.post("/v1/chat/completions", json=body) as reply:
        error = (await reply.json())["error"]
        assert (reply.status, error["param"]) == (400, "tools")
        assert error["message"] == "tool 'two': json_schema: #/type: no"


# --- malformed patterns --------------------------------------------------------------------------

MALFORMED = {"type": "object", "properties": {"q": {"type": "string", "pattern": "a("}}}
KEYS = {"type": "object", "patternProperties": {"[a": {}}}
UNHELD = {"type": "object", "properties": {"q": {"pattern": "(?<=ab+)[\\p{L}[^]"}}}
"""Nothing here can search for it, but it is a pattern."""


def _tools(schema: Any, strict: bool | None, path: str) -> dict[str, Any]:
    """Return two tools, the second with this schema."""
    key = "input_schema" if path == "/v1/messages" else "parameters"
    found: list[dict[str, Any]] = [
        {"name": "f", key: {"type": "object"}},
        {"name": "g", key: schema} | ({} if strict is None else {"strict": strict}),
    ]
    if path in ("/v1/chat/completions", "/api/chat"):
        return {**CHAT, "tools": [{"type": "function", "function": one} for one in found]}
    if path == "/v1/responses":
        return {"input": "a", "tools": [{"type": "function", **one} for one in found]}
    return {**CHAT, "max_tokens": 5, "tools": found}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize(
    "schema, told",
    [
        (
            MALFORMED,
            "$.properties.q.pattern 'a(': missing ), unterminated subpattern at position 1",
        ),
        (KEYS, "$.patternProperties '[a': unterminated character set at position 0"),
    ],
)
async def test_a_malformed_pattern_is_refused_where_calls_are_held(
    served: Served, path: str, strict: bool | None, schema: Any, told: str
) -> None:
    """Refused even where the model need not call, and where calls are held as far as possible."""
    async with served.http.post(path, json=_tools(schema, strict, path)) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["message"] == f"tool 'g': json_schema: {told}"


async def test_ollama_refuses_it(served: Served) -> None:
    async with served.http.post("/api/chat", json=_tools(MALFORMED, None, "/api/chat")) as reply:
        assert reply.status == 400
        told = (await reply.json())["error"]
        assert told.startswith("tools: tool 'g': json_schema: $.properties.q")


async def test_a_malformed_pattern_of_what_is_not_held_is_told(served: Served) -> None:
    path = "/v1/chat/completions"
    async with served.http.post(path, json=_tools(MALFORMED, False, path)) as reply:
        assert reply.status == 200
        (told,) = reply.headers.getall("X-Rootlace-Warning")
        assert told.startswith("tool 'g': json_schema: $.properties.q.pattern 'a(': missing )")


async def test_a_dictionary_that_may_be_empty_alone_is_told(served: Served) -> None:
    """crewAI 1.15.30 sends `dict[str, int]` so: `findings/strict_tools_close_dictionaries.sh`."""
    path = "/v1/chat/completions"
    counts = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    schema = {**counts, "properties": {"counts": counts}, "required": ["counts"]}
    async with served.http.post(path, json=_tools(schema, True, path)) as reply:
        assert reply.status == 200
        (told,) = reply.headers.getall("X-Rootlace-Warning")
        assert told.startswith("tool 'g': json_schema: $.properties.counts.additionalProperties is")


async def test_a_pattern_that_only_others_can_search_for_is_none(served: Served) -> None:
    path = "/v1/chat/completions"
    async with served.http.post(path, json=_tools(UNHELD, None, path)) as reply:
        assert reply.status == 200 and "X-Rootlace-Warning" not in reply.headers
