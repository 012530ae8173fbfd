"""Thoughts before answers, on a real engine: a model of random weights never ends thoughts itself,
except by a bias."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import rootlace as rl
from tests.tiny_model import TEMPLATE, make_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {"name": "f", "parameters": SCHEMA}
LISTS = "{{ tools[0].function.name if tools }}" + TEMPLATE
OPENS = LISTS.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}{# </think> #}")
MAY = LISTS + "{# <think> </think> #}"
BUDGET = 12
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", params=["opens", "opens-text", "may"])
def runtime(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[rl.Runtime]:
    """Tags are special tokens, or text with a token per byte; the prompt begins the thoughts, or
    the model may."""
    source = MAY if request.param == "may" else OPENS
    tags = [] if request.param.endswith("text") else ["<think>", "</think>"]
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_tiny_model(folder, template=source, tags=tags)
    with rl.Runtime(str(folder), http_port=0, dtype="float32", threads=1) as started:
        yield started


def post(runtime: rl.Runtime, path: str, **body: Any) -> Any:
    """Return the reply, or the events of a stream."""
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{runtime.url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=240) as reply:
            text = reply.read().decode()
    except urllib.error.HTTPError as error:
        pytest.fail(error.read().decode())
    if not body.get("stream"):
        return json.loads(text)
    lines = [line.removeprefix("data: ") for line in text.split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


def chat(runtime: rl.Runtime, **more: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """Return thoughts, answer and usage of each choice, equal when streamed."""
    body = {"messages": ASK, "max_tokens": 300, "seed": 3, **more}
    whole = post(runtime, "/v1/chat/completions", **body)
    found = [
        (each["message"].get("reasoning_content", ""), each["message"]["content"] or "")
        for each in whole["choices"]
    ]
    joined = [["", ""] for _ in found]
    stream = {"include_usage": True}
    for event in post(runtime, "/v1/chat/completions", **body, stream=True, stream_options=stream):
        for choice in event["choices"]:
            joined[choice["index"]][0] += choice["delta"].get("reasoning_content") or ""
            joined[choice["index"]][1] += choice["delta"].get("content") or ""
    assert [(thoughts, said) for thoughts, said in joined] == found
    return [(*each, whole["usage"]) for each in found]


def begun(runtime: rl.Runtime) -> dict[str, Any]:
    """Return the bias with which an optional thinker begins thoughts."""
    return {"logit_bias": {str(_token(runtime, "<think>")): 100}} if _may(runtime) else {}


def _may(runtime: rl.Runtime) -> bool:
    reply = post(runtime, "/tokenize", messages=ASK, return_token_strs=True)
    return reply["token_strs"][-1] == "<|assistant|>"


def _token(runtime: rl.Runtime, text: str) -> int:
    (token,) = post(runtime, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    return int(token)


def test_a_format_is_that_of_the_answer_behind_a_budget(runtime: rl.Runtime) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    given = {"response_format": form, "thinking_budget": BUDGET, "temperature": 1}
    answers = chat(runtime, **given, n=3, **begun(runtime))
    for thoughts, said, _ in answers:
        jsonschema.validate(json.loads(said), SCHEMA)
        assert thoughts and "</think>" not in thoughts
    usage = answers[0][2]
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    around = len("<think>\n</think>\n\n") + len('{"n": 99}') + 1
    assert 3 * BUDGET < usage["completion_tokens"] <= 3 * (BUDGET + around)
    assert chat(runtime, **given, enable_thinking=False)[0][0] == ""


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "[0-9]{3}"},
        {"choices": ["yes", "no"]},
        {"response_format": {"type": "json_object"}},
        {"json_schema": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}},
    ],
)
def test_every_constraint_begins_behind_them(runtime: rl.Runtime, form: dict[str, Any]) -> None:
    for thoughts, said, _ in chat(
        runtime, **form, thinking_budget=BUDGET, temperature=1, **begun(runtime)
    ):
        assert thoughts
        if "regex" in form:
            assert said.isdigit() and len(said) == 3
        elif "choices" in form:
            assert said in form["choices"]
        elif "json_schema" in form:
            assert len(set(json.loads(said))) == len(json.loads(said))


def test_it_may_be_left_out(runtime: rl.Runtime) -> None:
    """The bound may be omitted if the model begins thoughts; it does not bound the answer."""
    if not _may(runtime):
        pytest.skip("the prompt begins them")
    bias = {str(_token(runtime, "<think>")): -100}
    (found,) = chat(runtime, regex="[a-z]{30}", thinking_budget=3, logit_bias=bias, temperature=1)
    assert found[0] == "" and len(found[1]) == 30


def test_stop_strings_tokens_and_patterns_do_not_fire_within(runtime: rl.Runtime) -> None:
    """Every possible text is a stop, yet thoughts are not cut."""
    letters = ["a", "e", "i", "o", "t", " ", "}", "x"]
    given = {"thinking_budget": BUDGET, "temperature": 1, "ignore_eos": True, **begun(runtime)}
    for stop in (
        {"stop_regex": "."},
        {"stop": letters},
        {"stop_token_ids": list(range(256))},
    ):
        (found,) = chat(runtime, **given, **stop)
        usage = found[2]["completion_tokens"]
        assert usage > BUDGET, stop


def test_prediction_logprobs_and_min_tokens_beside_them(runtime: rl.Runtime) -> None:
    form = {"regex": "[0-9]{3}", "thinking_budget": BUDGET, "temperature": 0, **begun(runtime)}
    (plain,) = chat(runtime, **form)
    predicted = {"type": "content", "content": plain[1] * 3}
    (same,) = chat(runtime, **form, prediction=predicted)
    assert same[:2] == plain[:2]
    body = {"messages": ASK, "max_tokens": 300, **form, "logprobs": True, "min_tokens": 20}
    whole = post(runtime, "/v1/chat/completions", **body)
    choice = whole["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == whole["usage"]["completion_tokens"]
    assert sum(bool(entry.get("forced")) for entry in entries) > 0
    (again,) = chat(runtime, **form, jump_forward="off")
    assert again[:2] == plain[:2]


def test_every_interface(runtime: rl.Runtime) -> None:
    """Thoughts and answer are separate, whole and streamed."""
    if _may(runtime):
        pytest.skip("only /v1/chat/completions takes a bias")
    model = post_model(runtime)
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    reply = post(
        runtime, "/v1/responses", input="hi", text=text, thinking_budget=BUDGET, model=model
    )
    kinds = [item["type"] for item in reply["output"]]
    assert kinds == ["reasoning", "message"], reply
    jsonschema.validate(json.loads(reply["output"][1]["content"][0]["text"]), SCHEMA)
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > 0

    reply = post(
        runtime,
        "/v1/messages",
        model=model,
        messages=ASK,
        max_tokens=200,
        thinking={"type": "enabled", "budget_tokens": BUDGET},
        tools=[{"name": "f", "input_schema": SCHEMA}],
        tool_choice={"type": "any"},
    )
    assert [block["type"] for block in reply["content"]] == ["thinking", "tool_use"], reply
    jsonschema.validate(reply["content"][1]["input"], SCHEMA)

    reply = post(
        runtime,
        "/api/chat",
        model=model,
        messages=ASK,
        think=True,
        thinking_budget=BUDGET,
        format=SCHEMA,
        stream=False,
    )
    assert reply["message"]["thinking"]
    jsonschema.validate(json.loads(reply["message"]["content"]), SCHEMA)
    events = post(
        runtime,
        "/api/chat",
        model=model,
        messages=ASK,
        think=True,
        thinking_budget=BUDGET,
        format=SCHEMA,
        stream=True,
    )
    said = "".join(event["message"]["content"] for event in events)
    assert any(event["message"].get("thinking") for event in events)
    jsonschema.validate(json.loads(said), SCHEMA)


def post_model(runtime: rl.Runtime) -> str:
    with urllib.request.urlopen(f"{runtime.url}/v1/models", timeout=240) as reply:
        return str(json.load(reply)["data"][0]["id"])
