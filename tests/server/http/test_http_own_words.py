"""Tools over every interface with a template that has no place for tools."""

import json
import logging
from typing import Any

import pytest

from rootlace.runtime.server.chat_template import ChatTemplate
from tests.server.http.conftest import Serve, Served
from tests.server.http.fake_model import FakeModel
from tests.server.test_tool_prompt import LISTS_ONLY, SMOL

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALLED = {"name": "weather", "arguments": '{"city":"Rome"}'}
OPENAI = {"type": "function", "function": FUNCTION}
USER = {"role": "user", "content": "Rome?"}

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": CALLED}]},
            {"role": "tool", "tool_call_id": "a", "content": "warm"},
        ],
        "tools": [OPENAI],
    },
    "/v1/responses": {
        "input": [
            USER,
            {"type": "function_call", "call_id": "a", **CALLED},
            {"type": "function_call_output", "call_id": "a", "output": "warm"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
    },
    "/v1/messages": {
        "max_tokens": 200,
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}}
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": "warm"}],
            },
        ],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
    },
    "/api/chat": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}],
            },
            {"role": "tool", "tool_name": "weather", "content": "warm"},
        ],
        "tools": [OPENAI],
    },
}
PATHS = sorted(BODIES)


def smol(**config: Any) -> FakeModel:
    model = FakeModel(**config)
    model.chat = ChatTemplate(SMOL, ["<|im_start|>", "<|im_end|>"])  # type: ignore[assignment]
    return model


async def ask(served: Served, path: str, **more: Any) -> tuple[int, str]:
    body = {"model": "fake", "stream": False, **BODIES[path], **more}
    async with served.http.post(path, json=body) as reply:
        return reply.status, await reply.text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_the_model_reads_all_and_its_calls_are_read(
    serve: Serve, path: str, stream: bool
) -> None:
    model = smol()
    served, seen = await serve(model), []

    def script(prompt: str, index: int) -> str:
        seen.append(prompt)
        return CALL

    model.script = script
    status, text = await ask(served, path, stream=stream)
    assert status == 200, text
    head, _, rest = seen[0].partition("<|im_end|>\n")
    assert head.startswith("<|im_start|>system\nBe kind.\n\n")
    assert json.dumps({"name": "weather", "parameters": SCHEMA}) in head
    assert rest == (
        f"<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nwarm\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "weather" in text and "tool_call>" not in text, "a call is no text"
    # Calls are constrained as with any template.
    constraint = model.last_generate.constraint
    assert constraint is not None and constraint.kind == "structural_tag"
    assert "<tool_call>" in constraint.source and '"weather' in constraint.source.replace("\\", "")


REQUIRED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"tool_choice": "required"},
    "/v1/responses": {"tool_choice": "required"},
    "/v1/messages": {"tool_choice": {"type": "any"}},
}


@pytest.mark.parametrize("path", sorted(REQUIRED))
async def test_who_must_call_knows_what(serve: Serve, path: str) -> None:
    model = smol()
    served, seen = await serve(model), []

    def script(prompt: str, index: int) -> str:
        seen.append(prompt)
        return '{"name":"weather","arguments":{"city":"Rome"}}'

    model.script = script
    status, text = await ask(served, path, **REQUIRED[path])
    assert status == 200 and "Rome" in text
    assert '"name": "weather"' in seen[0]
    # The text begun for the model is the beginning of a call in the later prompt, so it is cached.
    begun = seen[0].rpartition("<|im_start|>assistant\n")[2]
    assert begun == "<tool_call>\n" and CALL.startswith(begun + '{"name"')


async def test_the_log_says_so_once(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = await serve(smol())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await ask(served, "/v1/chat/completions")
    logged = [record.getMessage() for record in caplog.records]
    (said,) = [message for message in logged if "template" in message]
    assert said == (
        "the chat template of 'fake' has no place for tools and calls and results: the server "
        "writes them in words of its own"
    )


TURNS = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or () %}<tool_call>
CALL
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{{ tools | tojson }}<|im_start|>assistant
"""
JSON = (
    """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}"""
)
TAGS = """<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value }}
</parameter>
{% endfor %}</function>"""
TYPED_TAGS = """<invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments.items() %}
{{- '<parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' }}
{{- value }}</parameter>
{% endfor %}</invoke>"""


@pytest.mark.parametrize(("form", "lines"), [(JSON, 0), (TAGS, 0), (TYPED_TAGS, 1)])
async def test_the_log_says_once_that_a_form_of_calls_is_not_read(
    serve: Serve, caplog: pytest.LogCaptureFixture, form: str, lines: int
) -> None:
    """DeepSeek V3.2's calls are not read, for example; Qwen3-Coder's arguments in tags are."""
    model = FakeModel()
    model.chat = ChatTemplate(TURNS.replace("CALL", form))  # type: ignore[assignment]
    served = await serve(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            status, text = await ask(served, "/v1/chat/completions")
            assert status == 200, text
    said = (
        "the chat template of 'fake' writes calls in a form that is not read: behind '<tool_call>' "
        "a call is held to JSON, and any other form stays text"
    )
    logged = [record.getMessage() for record in caplog.records]
    assert [message for message in logged if "not read" in message] == [said] * lines


async def test_what_is_shown_of_a_model(serve: Serve) -> None:
    for source, config, able in (
        (SMOL, {}, {"tools", "tools-in-own-words"}),
        (SMOL, {"tools": "template-only"}, set[str]()),
        (LISTS_ONLY, {"tools": "template-only"}, {"tools"}),
    ):
        model = smol(**config)
        model.chat = ChatTemplate(source)  # type: ignore[assignment]
        served = await serve(model)
        shown = (await served.post("/api/show", {"model": "fake"})).json()["capabilities"]
        assert {one for one in shown if one.startswith("tools")} == able


@pytest.mark.parametrize("path", PATHS)
async def test_they_are_refused_if_the_server_is_to(serve: Serve, path: str) -> None:
    served = await serve(smol(tools="template-only"))
    status, text = await ask(served, path)
    assert status == 400, text
    assert "the chat template of 'fake' has no place for tools and calls and results" in text
    # Earlier calls are refused, too, instead of dropped silently.
    status, text = await ask(served, path, tools=None)
    assert status == 400 and "no place for calls and results" in text
    # A conversation without calls is served.
    body = {"model": "fake", "messages": [USER], "max_tokens": 9, "stream": False}
    assert (await served.post("/v1/chat/completions", body)).status == 200


async def test_a_template_of_its_own_for_tools(serve: Serve) -> None:
    model = smol(tools="template-only")
    own = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    model.chat = ChatTemplate(SMOL, tool_use=ChatTemplate(own))  # type: ignore[assignment]
    served, seen = await serve(model), []

    def script(prompt: str, index: int) -> str:
        seen.append(prompt)
        return "well"

    model.script = script
    for tools in ([OPENAI], None):
        body = {"model": "fake", "messages": [USER], "tools": tools}
        assert (await served.post("/v1/chat/completions", body)).status == 200
    assert seen[0] == json.dumps([OPENAI]) + "Rome?"
    assert seen[1].endswith("<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n")
