"""Thinking in each interface: whether to think, how long, and the answer behind the thoughts."""

from typing import Any

import msgspec
import pytest

from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.wire.protocol import Text, Thoughts
from tests.server.conftest import folder_of
from tests.server.http.conftest import Serve, Served
from tests.server.http.fake_model import FakeModel

ASK = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES, MESSAGES, OLLAMA = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
)
USUAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": ASK, "max_tokens": 200},
    OLLAMA: {"messages": ASK},
}
OPEN = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<a><think>\n' }}{# </think> #}"
"""The prompt begins thoughts, whatever it is told."""
OWN = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<a>' }}{# <think> </think> #}"
"""The model begins them, whatever the template is told."""
KNOWS = OWN[: -len("{# <think> </think> #}")] + (
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
)
HARMONY = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{{ '<|start|>assistant' }}{# <|channel|> <|message|> #}"
)
HARMONY_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + HARMONY
SCHEMA = {"type": "integer"}
THOUGHTS = Thoughts("</think>", gap="\n\n", close="\n</think>")
OPTIONAL = Thoughts("</think>", "<think>", gap="\n\n", close="\n</think>")
ANALYSIS = Thoughts(
    "<|end|>", "<|channel|>analysis<|message|>", gap="<|start|>assistant", close="<|end|>"
)


async def asked(serve: Serve, source: str, path: str, **more: Any) -> tuple[str, FakeModel]:
    """Return the end of the prompt, and the gateway."""
    model = FakeModel()
    model.chat = ChatTemplate(source)  # type: ignore[assignment]
    served: Served = await serve(model)
    body = {"model": "fake", "stream": False, **USUAL[path], **more}
    assert (await served.post(path, body)).status == 200
    text = "".join(part.text for part in model.last_parts if isinstance(part, Text))
    if not text:  # a response has tokens instead
        text = bytes(i for part in model.last_parts for i in part.ids if i < 256).decode()
    return text.removeprefix("hi"), model


@pytest.mark.parametrize("path", USUAL)
async def test_thoughts_come_before_what_is_asked_for(serve: Serve, path: str) -> None:
    for source, thoughts in ((OPEN, THOUGHTS), (OWN, OPTIONAL), (HARMONY, ANALYSIS)):
        end, model = await asked(serve, source, path)
        assert model.last_generate.thoughts == thoughts
        assert not end.endswith("</think>\n\n")


NONE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"reasoning_effort": "none"}),
    (CHAT, {"enable_thinking": False}),
    (CHAT, {"thinking": {"type": "disabled"}}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (RESPONSES, {"reasoning": {"effort": "none"}}),
    (MESSAGES, {"thinking": {"type": "disabled"}}),
    (OLLAMA, {"think": False}),
    (OLLAMA, {"think": "none"}),
]


@pytest.mark.parametrize("path, none", NONE)
async def test_who_asks_for_none_gets_none(serve: Serve, path: str, none: Any) -> None:
    """Holds also for a template that ignores the setting."""
    for source, end in (
        (OPEN, "<a><think>\n\n</think>\n\n"),
        (OWN, "<a><think>\n\n</think>\n\n"),
        (KNOWS, "<a><think></think>"),
        (HARMONY, "<|start|>assistant<|channel|>final<|message|>"),
    ):
        found, model = await asked(serve, source, path, **none)
        assert (found, model.last_generate.thoughts) == (end, None)


@pytest.mark.parametrize("path, none", NONE)
async def test_who_asks_for_none_and_has_tools_gets_empty_ones(
    serve: Serve, path: str, none: Any
) -> None:
    """In OpenAI's own format the model chooses the channel of a call or an answer. Thoughts that
    begin before that are ended at once."""
    tools: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL}]}
    if path == RESPONSES:
        tools = {"tools": [{"type": "function", **TOOL}]}
    elif path == MESSAGES:
        tools = {"tools": [{"name": "f", "input_schema": TOOL["parameters"]}]}
    found, model = await asked(serve, HARMONY_TOOLS, path, **tools, **none)
    assert found.endswith("<|start|>assistant")
    thoughts = model.last_generate.thoughts
    assert thoughts == msgspec.structs.replace(ANALYSIS, budget=0)
    constraint = model.last_generate.constraint
    assert constraint is not None and constraint.kind == "structural_tag"
    _, model = await asked(serve, HARMONY_TOOLS, path, **tools)
    assert model.last_generate.thoughts == ANALYSIS


BUDGETS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"thinking_budget": 7}),
    (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 7}}),
    (RESPONSES, {"thinking_budget": 7}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 7}}),
    (OLLAMA, {"thinking_budget": 7, "think": True}),
]


@pytest.mark.parametrize("path, budget", BUDGETS)
async def test_a_budget(serve: Serve, path: str, budget: Any) -> None:
    _, model = await asked(serve, OWN, path, **budget)
    thoughts = model.last_generate.thoughts
    assert thoughts is not None and thoughts.budget == 7


@pytest.mark.parametrize(
    "path, field",
    [
        (CHAT, {"thinking_budget": -1}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": -1}}),
    ],
)
async def test_a_budget_below_nothing_is_refused(serve: Serve, path: str, field: Any) -> None:
    served = await serve(FakeModel())
    async with served.http.post(path, json={"model": "fake", **USUAL[path], **field}) as reply:
        assert reply.status == 400 and "budget" in await reply.text()


FORMATS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    (CHAT, {"regex": "[0-9]+"}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    (OLLAMA, {"format": SCHEMA}),
]


@pytest.mark.parametrize("path, form", FORMATS)
async def test_a_constraint_is_that_of_the_answer(serve: Serve, path: str, form: Any) -> None:
    """A constraint leaves thinking possible, and thoughts are separated from the answer."""
    end, model = await asked(serve, OPEN, path, **form)
    given = model.last_generate
    assert given.constraint is not None and given.constraint.kind in ("json_schema", "regex")
    assert given.thoughts == THOUGHTS and end == "<a><think>\n"
    # In OpenAI's own format the answer is a message, whose beginning the model writes itself.
    end, model = await asked(serve, HARMONY, path, **form)
    final = "<|channel|>final<|message|>"
    assert model.last_generate.thoughts == Thoughts(
        ANALYSIS.end, ANALYSIS.begin, ANALYSIS.gap, final, ANALYSIS.close
    )
    assert end == "<|start|>assistant"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, form", FORMATS)
async def test_thoughts_before_a_constrained_answer_are_read(
    serve: Serve, path: str, form: Any, stream: bool
) -> None:
    model = FakeModel()
    model.chat = ChatTemplate(OPEN)  # type: ignore[assignment]
    model.script = lambda prompt, index: "let me see\n</think>\n\n12"
    served = await serve(model)
    body = {"model": "fake", **USUAL[path], **form, "stream": stream}
    async with served.http.post(path, json=body) as reply:
        text = await reply.text()
        assert reply.status == 200, text
    assert (
        "think>" not in text
        and "let" in text.replace('"l"', '"let"')
        and "12" in (text if not stream else text.replace('"1"', '"12"'))
    )
    if path == CHAT and not stream:
        whole = (await served.post(path, body)).json()
        message = whole["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("let me see", "12")
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 10


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
FORCED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}),
    (RESPONSES, {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"}),
    (
        MESSAGES,
        {
            "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
            "tool_choice": {"type": "any"},
        },
    ),
]


@pytest.mark.parametrize("path, tools", FORCED)
async def test_a_call_that_is_forced_comes_behind_thoughts(
    serve: Serve, path: str, tools: Any
) -> None:
    for source, end, begin in (
        (OPEN, "<a><think>\n", ""),
        (OWN, "<a>", "<think>"),
    ):
        found, model = await asked(serve, source, path, **tools)
        thoughts = model.last_generate.thoughts
        assert found.endswith(end) and thoughts is not None
        assert (thoughts.begin, thoughts.then) == (begin, "<tool_call>\n")
    # Without thoughts the beginning of a call is written for the model, as ever.
    none = dict(NONE)[path] if path != CHAT else {"reasoning_effort": "none"}
    found, model = await asked(serve, OPEN, path, **tools, **none)
    assert found.endswith("<think>\n\n</think>\n\n<tool_call>\n")
    assert model.last_generate.thoughts is None


async def test_a_call_behind_thoughts_is_read(serve: Serve) -> None:
    model = FakeModel()
    model.chat = ChatTemplate(OPEN)  # type: ignore[assignment]
    model.script = lambda p, i: 'so\n</think>\n\n<tool_call>{"name":"f","arguments":{}}'
    served = await serve(model)
    async with served.http.post(CHAT, json={"model": "fake", **USUAL[CHAT], **FORCED[0][1]}) as r:
        choice = (await r.json())["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "so"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize("path, none", NONE)
async def test_qwen3s_own_template(serve: Serve, path: str, none: Any) -> None:
    """Qwen3's always-thinking models have a template that begins the thoughts whatever is asked."""
    source = FolderSource(folder_of("qwen3")).chat_templates()["default"]
    end, model = await asked(serve, source, path)
    assert model.last_generate.thoughts == THOUGHTS
    assert end.endswith("<|im_start|>assistant\n<think>\n")
    end, model = await asked(serve, source, path, **none)
    assert model.last_generate.thoughts is None
    assert end.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
