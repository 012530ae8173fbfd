"""OpenAI's responses over scripted answers, through the real `openai` client."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from rootlace.runtime.server import full_disk
from rootlace.runtime.server.session_store import SessionStore
from rootlace.wire.protocol import Constraint
from tests.server.full_disk import FAILURE_NAMES, FAILURES, FullDisk
from tests.server.http.conftest import Serve, Served, stop
from tests.server.http.fake_model import FakeModel

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
HELD: Any = {**TOOL, "strict": None}
SAID = '<think>hm</think>\n\nwell<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'


async def test_a_text(served: Served) -> None:
    client = served.openai()
    reply = await client.responses.create(
        model="fake", input="hi", instructions="be brief", metadata={"k": "v"}, temperature=0.5
    )
    assert (reply.output_text, reply.status, reply.object) == ("hello", "completed", "response")
    assert served.model.chat.last["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert (reply.temperature, reply.metadata) == (0.5, {"k": "v"})
    usage = reply.usage
    assert usage is not None and usage.output_tokens == 5
    assert usage.input_tokens_details.cached_tokens == usage.input_tokens // 2
    cut = await client.responses.create(model="fake", input="hi", max_output_tokens=2)
    assert cut.status == "incomplete" and cut.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


async def test_thoughts_and_calls_streamed_or_not(served: Served) -> None:
    served.model.chat.source = "{# <think> </think> #}"
    served.model.script = lambda prompt, index: SAID
    client = served.openai()
    given: dict[str, Any] = {"model": "fake", "input": "hi", "tools": [TOOL]}
    whole: Any = await client.responses.create(**given)
    thoughts, message, call = whole.output
    assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "hm")
    assert (message.type, message.content[0].text) == ("message", "well")
    assert (call.type, call.name, call.arguments) == ("function_call", "f", '{"x":1}')

    events = []
    async with client.responses.stream(**given) as stream:
        async for event in stream:
            events.append(event)
        last: Any = await stream.get_final_response()
    assert [event.sequence_number for event in events] == sorted(
        {event.sequence_number for event in events}
    )
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert last.output_text == "well" and last.output[2].arguments == '{"x":1}'
    deltas: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.type] = deltas.get(event.type, "") + event.delta
    assert deltas == {
        "response.reasoning_text.delta": "hm",
        "response.output_text.delta": "well",
        "response.function_call_arguments.delta": '{"x":1}',
    }
    added = [e.item.id for e in events if e.type == "response.output_item.added"]
    done = [e.item.id for e in events if e.type == "response.output_item.done"]
    assert added == done == [item.id for item in last.output]


@pytest.mark.parametrize(
    "given, top, text", [({"top_logprobs": 2}, 2, "well"), ({}, 0, "well " * 199 + "then")]
)
async def test_text_has_log_probabilities_where_they_are_asked_for(
    served: Served, given: dict[str, Any], top: int, text: str
) -> None:
    served.model.chat.source = "{# <think> </think> #}"
    served.model.script = lambda prompt, index: SAID.replace("hm", text).replace(
        "\nwell", f"\n{text}"
    )
    client = served.openai()
    given = {"model": "fake", "input": "hi", "tools": [TOOL], **given}
    if not top:
        given["include"] = ["message.output_text.logprobs"]
    whole: Any = await client.responses.create(**given)
    assert whole.top_logprobs == top
    logprobs = whole.output[1].content[0].logprobs
    assert "".join(one.token for one in logprobs) == text
    assert {len(one.top_logprobs) for one in logprobs} == {top}
    async with client.responses.stream(**given) as stream:
        events: list[Any] = [event async for event in stream]
    pieces = [one for e in events if e.type == "response.output_text.delta" for one in e.logprobs]
    (done,) = (event.logprobs for event in events if event.type == "response.output_text.done")
    last = events[-1].response.output[1].content[0].logprobs
    assert [one.to_dict() for one in last] == [one.to_dict() for one in logprobs]
    for found in (pieces, done):
        assert [(one.token, one.logprob) for one in found] == [
            (one.token, one.logprob) for one in logprobs
        ]
    turn: Any = [{"role": "user", "content": "hi"}, whole.output[1].to_dict()]
    again: Any = await client.responses.create(model="fake", input=turn)
    assert again.output[1].content[0].logprobs == []


@pytest.mark.parametrize(
    "given, reason, cut",
    [
        ({"max_output_tokens": 30}, "max_output_tokens", "well"),
        ({"max_output_tokens": 70}, "max_output_tokens", '{"x'),
        ({"stop": "1"}, "stop", '{"x":'),
    ],
)
async def test_an_item_that_was_cut_is_incomplete(
    served: Served, given: dict[str, Any], reason: str, cut: str
) -> None:
    served.model.script = lambda prompt, index: SAID.partition("</think>")[2].replace(
        "well", "well, let me see what there is"
    )
    body = {"input": "x", "tools": [TOOL], **given}
    whole = (await served.post("/v1/responses", body)).json()
    lines = (await served.post("/v1/responses", {**body, "stream": True})).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line[:5] == "data:"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for last, items in ((whole, whole["output"]), (events[-1]["response"], done)):
        assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": reason})
        assert [item["status"] for item in items] == ["completed"] * (len(items) - 1) + [
            "incomplete"
        ]
        assert cut in (items[-1].get("arguments") or items[-1]["content"][0]["text"])
    assert events[-1]["type"] == "response.incomplete"


async def test_a_response_is_gone_on_from(served: Served) -> None:
    served.model.script = lambda prompt, index: SAID.partition("</think>\n\n")[2]
    client = served.openai()
    first: Any = await client.responses.create(
        model="fake", input="hi", tools=[TOOL], instructions="once"
    )
    call = first.output[-1]
    served.model.script = lambda prompt, index: "done"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    second: Any = await client.responses.create(
        model="fake",
        input=[result],  # type: ignore[list-item]
        previous_response_id=first.id,
    )
    function = {"name": "f", "arguments": {"x": 1}}
    expected = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "well",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "3"},
    ]
    assert served.model.chat.last["messages"] == expected
    # The same without the server's memory: the client sends the output back unchanged.
    stateless = [{"role": "user", "content": "hi"}, *first.output, result]
    await client.responses.create(model="fake", input=stateless, store=False)
    assert served.model.chat.last["messages"] == expected

    counted: list[Any] = [
        await client.responses.input_tokens.count(model="fake", **given)
        for given in ({"input": [result], "previous_response_id": first.id}, {"input": stateless})
    ]
    assert [one.input_tokens for one in counted] == [second.usage.input_tokens] * 2
    assert counted[0].object == "response.input_tokens"
    assert served.model.chat.last["messages"] == expected

    assert (await client.responses.retrieve(second.id)).output_text == "done"
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError) as gone:
        await client.responses.create(model="fake", input="x", previous_response_id=second.id)
    assert gone.value.param == "previous_response_id"
    forgotten = await client.responses.create(model="fake", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(forgotten.id)


async def test_functions_of_a_namespace(served: Served) -> None:
    """The model's names of the functions contain the namespace's, clients' names do not."""
    call = {"name": "crm__f", "arguments": {"x": 1}}
    served.model.script = lambda prompt, index: f"<tool_call>{json.dumps(call)}</tool_call>"
    client = served.openai()
    inner: Any = [{**HELD, "description": "Finds."}, {**HELD, "name": "g"}]
    space: Any = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": inner}
    given: dict[str, Any] = {"model": "fake", "tools": [HELD, space]}
    first: Any = await client.responses.create(input="hi", **given)
    (found,) = first.output
    assert (found.name, found.namespace, found.arguments) == ("f", "crm", '{"x": 1}')
    assert [tool.type for tool in first.tools] == ["function", "namespace"]
    assert [tool.name for tool in first.tools[1].tools] == ["f", "g"]
    told = [tool.to_dict() for tool in (first.tools[0], *first.tools[1].tools)]
    assert {tuple(sorted(tool)) for tool in told} == {
        ("description", "name", "parameters", "strict", "type")
    }
    offered = [tool["function"] for tool in served.model.chat.last["tools"]]
    assert [tool["name"] for tool in offered] == ["f", "crm__f", "crm__g"]
    texts = [tool.get("description") for tool in offered]
    assert texts == [None, "Customers.\n\nFinds.", None]
    events = []
    async with client.responses.stream(input="hi", **given) as stream:
        async for event in stream:
            events.append(event)
    items: list[Any] = [each for each in events if each.type.startswith("response.output_item")]
    assert [(each.item.name, each.item.namespace) for each in items] == [("f", "crm")] * 2
    assert [e.name for e in events if e.type == "response.function_call_arguments.done"] == ["f"]

    result: Any = {"type": "function_call_output", "call_id": found.call_id, "output": "3"}
    second = await client.responses.create(input=[result], previous_response_id=first.id, **given)
    known = served.model.chat.last["messages"]
    assert known[1]["tool_calls"][0]["function"]["name"] == "crm__f"
    stateless: Any = [{"role": "user", "content": "hi"}, *first.output, result]
    await client.responses.create(input=stateless, store=False, **given)
    assert served.model.chat.last["messages"] == known
    listed: list[Any] = [one async for one in client.responses.input_items.list(second.id)]
    assert [(one.name, one.namespace) for one in listed if one.type == "function_call"] == [
        ("f", "crm")
    ]
    plain: Any = [stateless[0], {**first.output[0].to_dict(), "namespace": ""}, result]
    await client.responses.create(input=plain, store=False, **given)
    made = served.model.chat.last["messages"][1]["tool_calls"]
    assert made[0]["function"]["name"] == "f", "no namespace"
    named: Any = {"type": "function", "name": "g", "namespace": "crm"}
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in (named, allowed):
        await client.responses.create(input="hi", tool_choice=choice, **given)
        constraint = served.model.last_generate.constraint
        assert constraint is not None
        assert json.loads(constraint.source)["properties"]["name"] == {"const": "crm__g"}


async def test_a_search_that_may_not_leave_is_left_out(served: Served) -> None:
    """Codex offers a search in each request, which may be without access to the web."""
    search: dict[str, Any] = {"type": "web_search", "external_web_access": False}
    body = {"input": "x", "tools": [HELD, search], "client_metadata": {"a": "b"}}
    async with served.http.post("/v1/responses", json=body) as reply:
        response = await reply.json()
        assert reply.status == 200, response
        assert reply.headers.getall("X-Rootlace-Warning") == [
            "tools[1]: there is no web search, so the tool is left out"
        ]
    assert [tool["type"] for tool in response["tools"]] == ["function", "web_search"]
    assert len(served.model.chat.last["tools"]) == 1


async def test_what_a_response_was_made_from(served: Served) -> None:
    served.model.script = lambda prompt, index: SAID.partition("</think>\n\n")[2]
    client = served.openai()
    first: Any = await client.responses.create(model="fake", input="hi", tools=[TOOL])
    result: Any = {
        "type": "function_call_output",
        "call_id": first.output[-1].call_id,
        "output": "3",
    }
    second = await client.responses.create(
        model="fake", input=[result], previous_response_id=first.id
    )
    items: list[Any] = [
        item async for item in client.responses.input_items.list(second.id, limit=2, order="asc")
    ]
    assert [item.type for item in items] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert [items[0].role, items[0].content[0].type, items[0].content[0].text] == [
        "user",
        "input_text",
        "hi",
    ]
    assert (items[1].role, items[1].content[0].text) == ("assistant", "well")
    assert (items[2].arguments, items[2].call_id) == ('{"x":1}', items[3].call_id)
    assert items[3].output == "3" and len({item.id for item in items}) == 4
    path = f"/v1/responses/{second.id}/input_items"
    page = (await served.get(path, params={"limit": 1, "after": items[3].id})).json()
    assert (page["object"], page["has_more"]) == ("list", True)
    assert page["first_id"] == page["last_id"] == page["data"][0]["id"] == items[2].id


async def test_queries_about_a_kept_response(served: Served) -> None:
    made = await served.openai().responses.create(model="fake", input="hi")
    kept = await served.openai().responses.retrieve(
        made.id, include=["reasoning.encrypted_content"], stream=False
    )
    assert kept.output_text == "hello"
    for rest, param in (
        ("?stream=true", "stream"),
        ("?colour=red", "colour"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?after=x", "after"),
    ):
        async with served.http.get(f"/v1/responses/{made.id}{rest}") as reply:
            error = (await reply.json())["error"]
        assert (reply.status, error["param"]) == (400, param)


async def test_allowed_tools(served: Served) -> None:
    other = {**HELD, "name": "g"}
    named = [{"type": "function", "name": "g"}]
    chat_named = [{"type": "function", "function": {"name": "g"}}]
    for mode, kind in (("auto", "structural_tag"), ("required", "json_schema")):
        choice: Any = {"type": "allowed_tools", "mode": mode, "tools": named}
        body = {"input": "x", "tools": [HELD, other], "tool_choice": choice}
        inner = {"mode": mode, "tools": chat_named}
        chat = {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": name}} for name in "fg"],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": inner},
        }
        for path, asked in (("/v1/responses", body), ("/v1/chat/completions", chat)):
            assert (await served.post(path, asked)).status == 200
            offered = served.model.chat.last["tools"]
            assert [tool["function"]["name"] for tool in offered] == ["g"]
            sent = served.model.last_generate.constraint
            assert sent is not None and sent.kind == kind


async def test_constraints(served: Served) -> None:
    schema = {"type": "integer"}
    form: Any = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    await served.openai().responses.create(model="fake", input="x", text={"format": form})
    wanted = Constraint("json_schema", '{"type":"integer"}')
    assert served.model.last_generate.constraint == wanted
    await served.openai().responses.create(
        model="fake", input="x", tools=[HELD], tool_choice={"type": "function", "name": "f"}
    )
    constraint = served.model.last_generate.constraint
    assert constraint is not None
    assert json.loads(constraint.source)["properties"]["name"] == {"const": "f"}


@pytest.mark.parametrize(
    "given, param",
    [
        ({"input": []}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{**TOOL, "tools": []}]}, "tools[0].tools"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{**TOOL, "name": ""}]}]},
            "tools[0].tools[0].name",
        ),
        (
            {
                "tools": [
                    {"type": "namespace", "name": "n", "tools": [TOOL]},
                    {**TOOL, "name": "n__f"},
                ]
            },
            "tools[0].tools[0].name",
        ),
        (
            {
                "tools": [
                    {"type": "namespace", "name": "a__b", "tools": [TOOL]},
                    {"type": "namespace", "name": "a", "tools": [{**TOOL, "name": "b__f"}]},
                ]
            },
            "tools[1].tools[0].name",
        ),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "any"}}, "tool_choice.mode"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            "tool_choice",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input[0].call_id",
        ),
        ({"include": ["bogus"]}, "include[0]"),
        ({"background": True}, "background"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)
async def test_refusals(served: Served, given: dict[str, Any], param: str) -> None:
    body = {"model": "fake", "input": "x", **given}
    async with served.http.post("/v1/responses", json=body) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["param"]) == (400, param), error


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "path, given, said",
    [
        (
            "responses",
            {"input": "x", "tools": [{"type": "web_search"}]},
            "tools[0].type: there is no web search: tools are run by the client",
        ),
        (
            "responses",
            {"input": "x", "tools": [{"type": "mcp"}]},
            "tools[0].type: invalid enum value 'mcp' (there are 'function', 'namespace', "
            "'web_search': tools are run by the client)",
        ),
        (
            "chat/completions",
            {"messages": [MESSAGE], "tools": [{"type": "custom"}]},
            "tools[0].type: invalid enum value 'custom' (there is 'function': tools are run by",
        ),
        (
            "messages",
            {"messages": [MESSAGE], "max_tokens": 9, "tools": [{"type": "web_search_20250305"}]},
            "invalid enum value 'web_search_20250305' (there is 'custom': tools are run by the",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 9},
            "messages[0].content[0].type: invalid value 'image' (there are 'text', 'thinking', "
            "'redacted_thinking', 'tool_use', 'tool_result': only text can be read)",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "usr", "content": "x"}]},
            "messages[0].role: invalid enum value 'usr' (there are 'assistant', 'developer', "
            "'function', 'system', 'tool', 'user')",
        ),
        (
            "chat/completions",
            {"messages": [MESSAGE], "cache": {"pin": "yes"}},
            "cache.pin: invalid enum value 'yes' (there are true, false, 'try')",
        ),
    ],
)
async def test_refused_values_name_those_that_there_are(
    served: Served, path: str, given: dict[str, Any], said: str
) -> None:
    async with served.http.post(f"/v1/{path}", json=given) as reply:
        error = (await reply.json())["error"]
    assert reply.status == 400
    assert said in error["message"] and len(error["message"]) < 250


async def test_a_salt_is_kept_apart(served: Served) -> None:
    """A request with another salt can neither continue a response nor read it."""
    body = {"input": "x", "cache_salt": "mine"}
    first = (await served.post("/v1/responses", body)).json()["id"]
    for salt, status in (("mine", 200), ("other", 404), (None, 404)):
        more = {"input": "y", "cache_salt": salt, "previous_response_id": first}
        async with served.http.post("/v1/responses", json=more) as reply:
            assert reply.status == status
            if status == 404:
                assert (await reply.json())["error"]["param"] == "previous_response_id"


async def test_responses_outlive_the_server(serve: Serve, tmp_path: Path) -> None:
    config = {"state": str(tmp_path / "state")}
    before = await serve(FakeModel(**config))
    client = before.openai()
    first = await client.responses.create(model="fake", input="x")
    streamed = await client.responses.create(
        model="fake", input="y", previous_response_id=first.id, stream=True
    )
    last = [event async for event in streamed][-1]
    forgotten = await client.responses.create(model="fake", input="z")
    await client.responses.delete(forgotten.id)
    await stop(before)
    after = await serve(FakeModel(**config))
    client = after.openai()
    assert await client.responses.retrieve(first.id) == first
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(forgotten.id)
    await client.responses.create(
        model="fake",
        input="and",
        previous_response_id=last.response.id,  # type: ignore[union-attr]
    )
    said = [message["content"] for message in after.model.chat.last["messages"]]
    assert said == ["x", "hello", "y", "hello", "and"]


@pytest.mark.parametrize(("fails", "number"), FAILURES, ids=FAILURE_NAMES)
async def test_a_server_starts_on_a_full_disk_and_keeps_everything_later(
    fails: str, number: int, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs and responses are in one folder."""
    folder, old = tmp_path / "state", bool(fails)
    monkeypatch.setattr(full_disk, "RETRY_SECONDS", 0.0)

    async def start() -> tuple[SessionStore, Served]:
        return SessionStore(folder), await serve(FakeModel(state=str(folder)))

    async def end(programs: SessionStore, served: Served) -> None:
        await stop(served)
        programs.close()

    before: list[str] = []
    if old:
        programs, served = await start()
        programs.begin("before", "")
        before.append((await served.openai().responses.create(model="fake", input="x")).id)
        await end(programs, served)
    disk = FullDisk(monkeypatch, folder, fails, number)
    disk.full = True
    programs, served = await start()
    client = served.openai()
    programs.begin("meanwhile", "")
    programs.flush()
    for response_id in before:
        await client.responses.retrieve(response_id)
    first = await client.responses.create(model="fake", input="x")
    second = await client.responses.create(model="fake", input="y", previous_response_id=first.id)
    disk.full = False
    third = await client.responses.create(model="fake", input="z")
    await end(programs, served)
    programs, served = await start()
    assert (programs.find("before") is not None) is old and programs.find("meanwhile") is not None
    client = served.openai()
    for response_id in (*before, first.id, second.id, third.id):
        assert (await client.responses.retrieve(response_id)).id == response_id
    await end(programs, served)
