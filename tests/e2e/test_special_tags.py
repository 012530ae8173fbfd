"""Tool calls whose tags are special tokens, from the request to the parsed answer."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from tokenizers import Tokenizer

import rootlace as rl
from tests.tiny_model import make_tiny_model

# As gpt-oss's template, but <|end|> also ends the sequence.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)
TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "[TOOL_CALLS]")
STATES = {"type": "object", "properties": {"state": {"enum": ["on", "off"]}}}
STATES |= {"required": ["state"], "additionalProperties": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_tiny_model(folder, template=TEMPLATE, tags=TAGS, ends=["<|call|>"], context=1024)


@pytest.fixture(scope="module")
def tiny(model: Path) -> Iterator[rl.Runtime]:
    with rl.Runtime(
        model, dtype="float32", threads=1, num_blocks=256, check_invariants=True, http_port=0
    ) as runtime:
        yield runtime


def ask(runtime: rl.Runtime, path: str, **body: Any) -> Any:
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{runtime.url}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=240) as reply:
        return json.load(reply)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": STATES}}


@pytest.mark.parametrize("skip", [None, True])
def test_a_call_that_there_has_to_be(tiny: rl.Runtime, skip: bool | None) -> None:
    fields = {} if skip is None else {"skip_special_tokens": skip}
    answer = ask(
        tiny,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Lights?"}],
        tools=[tool("lamp"), tool("heater")],
        tool_choice="required",
        enable_thinking=False,
        whitespace="compact",
        max_tokens=200,
        logprobs=True,
        **fields,
    )
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]
    (call,) = choice["message"]["tool_calls"]
    name = call["function"]["name"]
    assert name in ("lamp", "heater")
    assert json.loads(call["function"]["arguments"])["state"] in ("on", "off")
    tokens = [each["token"] for each in choice["logprobs"]["content"]]
    assert [token for token in tokens if token in TAGS] == [
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
    ]
    written = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    assert "".join(tokens).startswith(written)
    forced = answer["usage"]["completion_tokens_details"]["forced_tokens"]
    assert forced == len(tokens) - 2  # all but the tokens where names, and states, differ


def test_a_name_does_not_forge_special_tokens(tiny: rl.Runtime) -> None:
    fields = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    for name, taken in (("a<b|>", True), ("a<|call|>", False), ("[TOOL_CALLS]", False)):
        if taken:
            assert ask(tiny, "/v1/chat/completions", tools=[tool(name)], **fields)
            continue
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(tiny, "/v1/chat/completions", tools=[tool(name)], **fields)
        with caught.value as refused:
            assert refused.code == 400
            assert "special tokens" in json.load(refused)["error"]["message"]


def test_what_is_forced_are_the_ids(tiny: rl.Runtime, model: Path) -> None:
    text = '[TOOL_CALLS][{"name": "lamp", "arguments": {"state":"on"}}]<|message|>'
    schema = {"const": {"state": "on"}}
    begin, end = text.split('{"state":"on"}')
    tag = {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}}
    reply = ask(
        tiny,
        "/generate",
        text="Lights?",
        sampling_params={
            "structural_tag": {"type": "structural_tag", "format": {**tag, "end": end}},
            "whitespace": "compact",
            "max_new_tokens": 120,
            "skip_special_tokens": False,
        },
    )
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert reply["text"] == text
    ids = tokenizer.encode(text).ids
    assert reply["output_ids"] == ids
    assert reply["meta_info"]["forced_tokens"] == len(ids)


def lamp(state: Literal["on", "off"]) -> str:
    """Turn the lamp on or off."""
    return f"it is {state}"


@rl.function
def lights(s: Any) -> None:
    offered = rl.tools(lamp)
    s += rl.system(offered) + rl.user("Lights?")
    s += rl.assistant(rl.gen("said", tools=offered, tool_choice="required", max_tokens=200))
    s.call_tools()


def test_a_program_finds_the_call(tiny: rl.Runtime) -> None:
    state = lights.run(backend=tiny)
    assert "<|channel|>commentary to=functions.lamp <|constrain|>json<|message|>" in state["said"]
    assert state.text().count("it is o") == 1
