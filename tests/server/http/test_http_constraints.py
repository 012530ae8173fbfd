"""Constraints over HTTP: all spellings, messages to the engine, errors, and counts."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from rootlace.runtime.assets import demo_model
from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.runtime.server.model_texts import load_chat
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.runtime.server.tool_parsers.base import Format
from rootlace.runtime.server.tool_parsers.learnt import format_of
from rootlace.wire import tool_calls
from rootlace.wire.errors import ConstraintNotMet, InvalidConstraint
from rootlace.wire.protocol import Constraint, Thoughts
from tests.server.http.conftest import Served

ASK = [{"role": "user", "content": "hi"}]
NULL = {"type": "null"}
NUMBERS = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}
NOTHING = {"type": "object", "additionalProperties": False}
ISLAND = {"begin": "<a>", "schema": NULL, "end": "</a>"}
NEW_TAG = {"type": "structural_tag", "format": {"type": "triggered_tags"}}
TAG = {"structures": [ISLAND], "triggers": ["<a"]}


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def named(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": False, "schema": schema}}


SPELLINGS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": named(NULL)}, "json_schema", compact(NULL)),
    ({"response_format": named(True)}, "json_schema", "true"),
    ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
    ({"response_format": {"type": "json_object", "schema": NULL}}, "json_schema", compact(NULL)),
    ({"response_format": {"type": "json_object", "value": NULL}}, "json_schema", compact(NULL)),
    ({"response_format": {"type": "structural_tag", **TAG}}, "structural_tag", compact(TAG)),
    ({"response_format": NEW_TAG}, "structural_tag", compact(NEW_TAG)),
    ({"regex": "a"}, "regex", "a"),
    ({"json_schema": NULL}, "json_schema", compact(NULL)),
    ({"json_schema": ' {"type": "null"}'}, "json_schema", ' {"type": "null"}'),
    ({"json_schema": True}, "json_schema", "true"),
    ({"ebnf": "start: A"}, "ebnf", "start: A"),
    ({"choices": ["a", "é"]}, "choices", '["a","é"]'),
    ({"structural_tag": TAG}, "structural_tag", compact(TAG)),
    ({"structural_tag": json.dumps(TAG)}, "structural_tag", json.dumps(TAG)),
    ({"guided_regex": "a"}, "regex", "a"),
    ({"guided_json": NULL}, "json_schema", compact(NULL)),
    ({"guided_json": compact(NULL)}, "json_schema", compact(NULL)),
    ({"guided_choice": ["a"]}, "choices", '["a"]'),
    ({"guided_grammar": "root ::= x"}, "ebnf", "root ::= x"),
    ({"structured_outputs": {"json": NULL}}, "json_schema", compact(NULL)),
    ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
    ({"structured_outputs": {"choice": ["a"]}}, "choices", '["a"]'),
    ({"structured_outputs": {"grammar": "start: A"}}, "ebnf", "start: A"),
    ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
    ({"structured_outputs": {"structural_tag": compact(TAG)}}, "structural_tag", compact(TAG)),
]
NATIVE = ("regex", "json_schema", "ebnf", "choices", "structural_tag")


def bodies(given: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The request in every endpoint that knows its fields."""
    found = [
        ("/v1/chat/completions", {"model": "fake", "messages": ASK, **given}),
        ("/v1/completions", {"model": "fake", "prompt": "x", **given}),
    ]
    if given.keys() <= {*NATIVE, "whitespace", "strict", "jump_forward"}:
        found.append(("/generate", {"text": "x", "sampling_params": given}))
    return found


async def post(served: Served, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with served.http.post(path, json=body) as reply:
        return reply.status, await reply.json()


@pytest.mark.parametrize("given, kind, source", SPELLINGS)
async def test_every_spelling(
    served: Served, given: dict[str, Any], kind: str, source: str
) -> None:
    for path, body in bodies(given):
        status, reply = await post(served, path, body)
        assert status == 200, reply
        assert served.model.last_generate.constraint == Constraint(kind, source)  # type: ignore[arg-type]


@pytest.mark.parametrize("jump, meant", [("off", "off"), (False, "off"), (True, "canonical")])
async def test_how_it_is_enforced(served: Served, jump: Any, meant: Any) -> None:
    given = {"regex": "a", "whitespace": "compact", "strict": True, "jump_forward": jump}
    for path, body in bodies(given):
        assert (await post(served, path, body))[0] == 200
        expected = Constraint("regex", "a", "compact", True, meant)
        assert served.model.last_generate.constraint == expected


@pytest.mark.parametrize(
    "given, meant",
    [
        ({"structured_outputs": {"json": NULL, "disable_any_whitespace": True}}, "compact"),
        ({"structured_outputs": {"json": NULL, "disable_any_whitespace": False}}, "flexible"),
        ({"structured_outputs": {"json": NULL, "whitespace_pattern": "[ ]?"}}, "compact"),
        ({"guided_json": NULL, "guided_whitespace_pattern": "[ \n]?"}, "compact"),
        ({"guided_json": NULL, "guided_whitespace_pattern": r"\s*"}, "flexible"),
        ({"guided_json": NULL, "guided_whitespace_pattern": "[\n\t ]*"}, "flexible"),
    ],
)
async def test_vllms_white_space_is_kept(served: Served, given: dict[str, Any], meant: Any) -> None:
    """A text never contains white space that the pattern does not match."""
    for path, body in bodies(given):
        assert (await post(served, path, body))[0] == 200
        assert served.model.last_generate.constraint == Constraint(
            "json_schema", compact(NULL), meant
        )


async def test_constraint_options_without_a_constraint(served: Served) -> None:
    text = {"response_format": {"type": "text"}}
    for path, body in (*bodies({"strict": True, "jump_forward": "off"}), *bodies(text)):
        assert (await post(served, path, body))[0] == 200
        assert served.model.last_generate.constraint is None


async def test_each_prompt_its_own(served: Served) -> None:
    params = [{"regex": "a"}, {}, {"choices": ["b"]}]
    status, _ = await post(
        served, "/generate", {"text": ["a", "b", "c"], "sampling_params": params}
    )
    assert status == 200
    ops = [op for op in served.model.sessions[-1].ops if hasattr(op, "constraint")]
    assert [op.constraint and op.constraint.kind for op in ops] == ["regex", None, "choices"]


@pytest.mark.parametrize(
    "given, param",
    [
        ({"regex": "a", "json_schema": {}}, "json_schema"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_json": 3}, "guided_json"),
        ({"choices": "ab"}, "choices"),
        ({"choices": [1]}, "choices[0]"),
        ({"structural_tag": [1]}, "structural_tag"),
        ({"whitespace": "wide"}, "whitespace"),
        ({"strict": "yes"}, "strict"),
        ({"jump_forward": "far"}, "jump_forward"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {**named(NULL), "type": "json_object"}},
            "response_format.json_schema",
        ),
        ({"response_format": {**named(NULL), "type": "text"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "schema": NULL}}, "response_format.schema"),
        ({"response_format": {"type": "text", "schema": NULL}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "triggers": []}}, "response_format.triggers"),
        (
            {"response_format": {"type": "json_object", "schema": NULL, "value": NULL}},
            "response_format.value",
        ),
        ({"response_format": {"type": "text", "value": NULL}}, "response_format.value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": named(None)}, "response_format.json_schema"),
        ({"response_format": named("x")}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "structural_tag", "structures": []}},
            "response_format.triggers",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_whitespace_pattern": "("}, "guided_whitespace_pattern"),
        ({"guided_whitespace_pattern": " ?" * 200}, "guided_whitespace_pattern"),
        (
            {"guided_whitespace_pattern": " ?", "whitespace": "flexible"},
            "whitespace",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": "\n"}},
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"structured_outputs": {"disable_any_whitespace": True}, "whitespace": "flexible"},
            "whitespace",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml"),
    ],
)
async def test_what_is_refused_at_once(served: Served, given: dict[str, Any], param: str) -> None:
    for path, body in bodies(given):
        status, reply = await post(served, path, body)
        below = "sampling_params." if path == "/generate" else ""
        assert (status, reply["error"]["param"]) == (400, below + param)
    assert not served.model.sessions


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_names_the_field(served: Served, stream: bool) -> None:
    served.model.fail = InvalidConstraint("json_schema: /type: there is no type 'nil'")
    for given, param in (
        ({"json_schema": {"type": "nil"}}, "json_schema"),
        ({"response_format": named({"type": "nil"})}, "response_format"),
        ({"structured_outputs": {"json": {"type": "nil"}}}, "structured_outputs.json"),
    ):
        for path, body in bodies(given):
            status, reply = await post(served, path, {**body, "stream": stream})
            below = "sampling_params." if path == "/generate" else ""
            assert status == 400
            assert reply["error"] == {
                "message": "json_schema: /type: there is no type 'nil'",
                "type": "invalid_request_error",
                "param": below + param,
                "code": "invalid_constraint",
            }
    body = {"text": ["a"], "sampling_params": [{"regex": "("}]}
    _, reply = await post(served, "/generate", body)
    assert reply["error"]["param"] == "sampling_params[0].regex"


async def test_a_constraint_that_was_not_met(served: Served) -> None:
    served.model.fail = ConstraintNotMet("uniqueItems: 64 tries were not enough")
    for path, body in bodies({"json_schema": {"uniqueItems": True}}):
        status, reply = await post(served, path, body)
        assert (status, reply["error"]["code"]) == (422, "constraint_not_met")
        assert reply["error"]["type"] == "unprocessable_entity_error"
    with pytest.raises(openai.UnprocessableEntityError):
        await served.openai().completions.create(model="fake", prompt="x")


async def test_not_met_in_mid_stream(served: Served) -> None:
    def script(prompt: str, index: int) -> Any:
        yield "h"
        raise ConstraintNotMet("no more tries")

    served.model.script = script
    for path, body in bodies({"json_schema": {}}):
        async with served.http.post(path, json={**body, "stream": True}) as reply:
            assert reply.status == 200
            lines = [line[6:] for line in (await reply.text()).splitlines() if line]
        assert lines[-1] == "[DONE]"
        error = json.loads(lines[-2])["error"]
        assert (error["code"], error["message"]) == ("constraint_not_met", "no more tries")


# ---------------------------------------------------------------- forced tokens


async def test_forced_tokens_are_counted(served: Served) -> None:
    served.model.forced = 2
    client = served.openai()
    for n in (1, 2):
        reply = await client.completions.create(model="fake", prompt="x", n=n)
        assert reply.usage is not None
        assert reply.usage.model_dump()["completion_tokens_details"]["forced_tokens"] == 2 * n
    chunks = await client.chat.completions.create(
        model="fake",
        messages=ASK,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = [chunk.usage async for chunk in chunks][-1]
    assert usage is not None
    assert usage.model_dump()["completion_tokens_details"]["forced_tokens"] == 2
    _, replies = await post(served, "/generate", {"text": "x", "sampling_params": {"n": 2}})
    assert [reply["meta_info"]["forced_tokens"] for reply in replies] == [2, 2]


# ---------------------------------------------------------------- strict tools


def tool(name: str, strict: bool | None, parameters: Any = None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "strict": strict}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


async def ask(served: Served, **given: Any) -> Constraint | None:
    status, reply = await post(
        served, "/v1/chat/completions", {"model": "fake", "messages": ASK, **given}
    )
    assert status == 200, reply
    return served.model.last_generate.constraint


def offered(path: str, strict: Any, choice: Any, stream: bool) -> dict[str, Any]:
    """Return two tools in the spelling of the endpoint's clients; `strict` is the first one's."""
    said = {} if strict is ... else {"strict": strict}
    if path == "/v1/messages":
        tools = [
            {"name": "add", "input_schema": NUMBERS, **said},
            {"name": "now", "input_schema": {}},
        ]
        return {"messages": ASK, "max_tokens": 99, "tools": tools, "stream": stream, **choice}
    functions = [{"name": "add", "parameters": NUMBERS, **said}, {"name": "now"}]
    if path == "/v1/responses":
        tools = [{"type": "function", **function} for function in functions]
        return {"input": "hi", "tools": tools, "stream": stream, "store": False, **choice}
    tools = [{"type": "function", "function": function} for function in functions]
    return {"messages": ASK, "tools": tools, "stream": stream, **choice}


INTERFACES = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
AUTO = {"/v1/messages": {"tool_choice": {"type": "auto"}}, "/api/chat": {}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strict", [..., None, True, False])
@pytest.mark.parametrize("path", INTERFACES)
async def test_calls_among_text_are_of_the_tools(
    served: Served, path: str, strict: Any, stream: bool
) -> None:
    """Holds in all interfaces, streamed or not, with `auto` or without. Ollama's own tools have no
    `strict`, but LangChain sends it."""
    served.model.chat.call = '<tool_call>{"name":"$","arguments":%}</tool_call>'
    begin = '<tool_call>{"name":"%s","arguments":'
    schema = {"type": "object", **NUMBERS}
    if strict is True:
        content = {"type": "json_schema", "json_schema": schema}
    elif strict is False:
        content = {"type": "json_schema", "json_schema": {"type": "object"}}
    else:
        content = {"type": "json_schema", "json_schema": schema, "lenient": True}
    none = {"type": "object"} if path == "/v1/messages" else NOTHING
    empty = {"type": "json_schema", "json_schema": none, "lenient": True}
    tags = [
        {"begin": begin % "add", "content": content, "end": "}</tool_call>"},
        {"begin": begin % "now", "content": empty, "end": "}</tool_call>"},
    ]
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}
    for choice in ({}, AUTO.get(path, {"tool_choice": "auto"})):
        body = {"model": "fake", **offered(path, strict, choice, stream)}
        assert (await served.post(path, body)).status == 200
        sent = served.model.last_generate.constraint
        assert sent is not None and (sent.kind, sent.strict) == ("structural_tag", False)
        assert json.loads(sent.source) == {"type": "structural_tag", "format": form}
        # The prompt stays as it is: the model may answer without a call.
        assert served.model.last_parts[-1].text == "<assistant>"


async def test_where_no_call_can_stand_nothing_is_held(served: Served) -> None:
    assert await ask(served, tools=[tool("f", True)], tool_choice="none") is None
    sent = await ask(served, tools=[tool("f", True)], tool_choice="required")
    assert sent is not None and sent.kind == "json_schema"
    # A format describes a text, and a forced call excludes a text.
    form = {"response_format": {"type": "json_object"}}
    assert await ask(served, tools=[tool("f", True)], tool_choice="required", **form) == sent
    # The text of another constraint has no room for calls.
    assert await ask(served, tools=[tool("f", True)], regex="a") == Constraint("regex", "a")
    held = await ask(served, tools=[tool("f", None)])
    assert held is not None and held.whitespace == "flexible"
    vllms = {"structured_outputs": {"disable_any_whitespace": True}}
    for asked in ({"whitespace": "compact"}, vllms):
        held = await ask(served, tools=[tool("f", None)], **asked)
        assert held is not None and held.whitespace == "compact"


async def test_calls_are_held_if_that_can_be_had_unless_a_tool_is_strict(served: Served) -> None:
    for strict, optional in ((None, True), (False, True), (True, False)):
        sent = await ask(served, tools=[tool("f", None), tool("g", strict)])
        assert sent is not None and sent.optional is optional
    forced = await ask(served, tools=[tool("f", None)], tool_choice="required")
    assert forced is not None and not forced.optional


@pytest.mark.parametrize("strict", [None, True])
async def test_a_forced_call_of_a_tool_that_opts_out(served: Served, strict: Any) -> None:
    """Without a second tool, or beside one that does not opt out, the arguments are an object."""
    sent = await ask(served, tools=[tool("f", strict, NULL)], tool_choice="required")
    assert sent is not None
    assert json.loads(sent.source)["properties"]["arguments"] == NULL
    both = [tool("f", strict, NULL), tool("g", False, NULL)]
    sent = await ask(served, tools=both, tool_choice="required")
    assert sent is not None
    calls = [one["properties"]["arguments"] for one in json.loads(sent.source)["anyOf"]]
    assert calls == [NULL, {"type": "object"}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("parallel", [None, False, True])
async def test_where_all_tools_opt_out_a_forced_call_is_held_as_far_as_can_be(
    served: Served, choice: Any, parallel: bool | None
) -> None:
    """LlamaIndex opts all tools out, and so does Haystack in responses."""
    both = [tool("f", False, NULL), tool("g", False, {"pattern": "("})]
    given = {} if parallel is None else {"parallel_tool_calls": parallel}
    sent = await ask(served, tools=both, tool_choice=choice, **given)
    assert sent is not None and not sent.optional
    calls = json.loads(sent.source)["format"]["elements"][1]
    assert calls["stop_after_first"] == (not (parallel and choice == "required"))
    lenient = {"type": "json_schema", "json_schema": NULL, "lenient": True}
    assert calls["tags"][0]["content"] == lenient
    assert len(calls["tags"]) == (2 if choice == "required" else 1)


def _beside_tools(path: str) -> dict[str, Any]:
    """Return a tool and a format in the spelling of the endpoint's clients."""
    function = {"name": "f", "parameters": NULL, "strict": True}
    if path == "/v1/responses":
        form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}}
        return {"input": "hi", "tools": [{"type": "function", **function}], "text": form}
    if path == "/v1/messages":
        given = {"name": "f", "input_schema": NULL, "strict": True}
        form = {"format": {"type": "json_schema", "schema": {"type": "integer"}}}
        return {"messages": ASK, "max_tokens": 99, "tools": [given], "output_config": form}
    tools = [{"type": "function", "function": function}]
    return {"messages": ASK, "tools": tools, "response_format": named({"type": "integer"})}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_format_leaves_room_for_calls(served: Served, path: str) -> None:
    """OpenAI's and Anthropic's formats hold for a text; a call stays possible."""
    served.model.chat.source = "{# <think> </think> #}"
    served.model.chat.call = '<tool_call>{"name":"$","arguments":%}</tool_call>'
    prompts = []

    def script(prompt: str, index: int) -> str:
        prompts.append(prompt)
        return '<think>hm</think>\n\n<tool_call>{"name":"f","arguments":null}</tool_call>'

    served.model.script = script
    status, reply = await post(served, path, {"model": "fake", **_beside_tools(path)})
    assert status == 200 and '"f"' in json.dumps(reply), reply
    assert "<tool_call>" not in json.dumps(reply) and "hm" in json.dumps(reply)
    sent = served.model.last_generate.constraint
    assert sent is not None and sent.kind == "structural_tag"
    begin = '<tool_call>{"name":"f","arguments":'
    assert json.loads(sent.source) == tool_calls.or_json(
        [(begin, tool_calls.arguments(NULL, True))],
        "}</tool_call>",
        {"type": "integer"},
        last=False,
        around=("", "", ""),
    )
    # The format holds behind the thoughts.
    thoughts = Thoughts("</think>", "<think>", gap="\n\n", close="\n</think>")
    assert served.model.last_generate.thoughts == thoughts
    # The model itself may think: no tag is written for it.
    assert prompts[0].endswith("<assistant>")


async def test_a_format_beside_calls_that_are_json_themselves(served: Served) -> None:
    """Llama's calls have no tag: a call is one of the objects that the format allows."""
    served.model.chat.source = "{# <|python_tag|> #}"
    schema = {"$ref": "#/$defs/N", "$defs": {"N": {"type": "integer"}}}
    given = {"tools": [tool("f", False)], "response_format": named(schema)}
    call = {
        "type": "object",
        "properties": {"name": {"const": "f"}, "parameters": {"type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    sent = await ask(served, **given)
    assert sent is not None and sent.kind == "structural_tag"
    elements = json.loads(sent.source)["format"]["elements"]
    assert [one["json_schema"] for one in elements] == [call, schema]
    served.model.script = lambda prompt, index: '{"name":"f","parameters":{"a":1}}'
    _, reply = await post(served, "/v1/chat/completions", {"messages": ASK, **given})
    (made,) = reply["choices"][0]["message"]["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": '{"a":1}'}


@pytest.mark.parametrize("strict", [True, None])
@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_arguments_are_an_object(served: Served, choice: str, strict: Any) -> None:
    """Arguments are an object: a bare text is no JSON, and Anthropic's clients get no array."""
    given = {"type": "array", "items": {"type": "integer"}}
    body = {"messages": ASK, "tool_choice": choice, "tools": [tool("f", strict, given)]}
    status, reply = await post(served, "/v1/chat/completions", {"model": "fake", **body})
    if choice == "required" or strict:
        assert status == 400 and reply["error"]["param"] == "tools"
        said = "tool 'f': json_schema: #/type: arguments are an object, not array"
        assert reply["error"]["message"] == said
    else:  # no request is refused
        sent = served.model.last_generate.constraint
        assert status == 200 and sent is not None
        (tag,) = json.loads(sent.source)["format"]["tags"]
        assert tag["content"]["json_schema"]["type"] == "object"


async def test_a_tool_with_a_bad_schema_is_the_tools_fault(served: Served) -> None:
    served.model.fail = InvalidConstraint("no")
    for choice in ("auto", "required"):
        body = {"messages": ASK, "tools": [tool("f", True)], "tool_choice": choice}
        status, reply = await post(served, "/v1/chat/completions", body)
        assert (status, reply["error"]["param"]) == (400, "tools")


def test_the_form_of_calls_is_the_templates(shared_dir: Path) -> None:
    def form(folder: Path) -> Format:
        return format_of(load_chat(FolderSource(folder), Tokenizer.read(FolderSource(folder))))

    demo = form(demo_model())
    assert demo.begin('a"b') == '<tool_call>{"name":"a\\"b","arguments":'
    assert (demo.trigger, demo.end, demo.always) == ("<tool_call>", "}</tool_call>", False)
    tokenizers = shared_dir / "data" / "tokenizers"
    for name, thinks in (("qwen3", True), ("gpt2", False)):
        found = form(tokenizers / name)
        assert found.begin("f") == '<tool_call>\n{"name": "f", "arguments": '
        assert (found.end, found.always) == ("}\n</tool_call>", thinks)
