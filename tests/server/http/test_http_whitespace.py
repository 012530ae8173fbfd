"""White space of JSON on every interface: the same table of texts for every way to ask."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import rootlace as rl
from rootlace.language import sampling
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.protocol import Constraint
from tests.server.http.conftest import Served
from tests.structured.test_whitespace import PAIR, REFUSED, TAKEN, takes

ASK = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "$", "arguments": %}</tool_call>'
FORM = {"type": "json_schema", "schema": PAIR}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": PAIR}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PAIR}}]
CHAT: dict[str, Any] = {"model": "fake", "messages": ASK}
CALLED = '<tool_call>{"name": "f", "arguments": $}</tool_call>'
TAG = {
    "structures": [{"begin": "<f>", "schema": PAIR, "end": "</f>"}],
    "triggers": ["<f>"],
}
ROUTES: dict[str, tuple[str, dict[str, Any], str]] = {
    "response_format": ("/v1/chat/completions", {**CHAT, "response_format": NAMED}, "$"),
    "json_object": (
        *("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "$"),
    ),
    "completions": ("/v1/completions", {"model": "fake", "prompt": "x", "guided_json": PAIR}, "$"),
    "generate": ("/generate", {"text": "x", "sampling_params": {"json_schema": PAIR}}, "$"),
    "responses": ("/v1/responses", {"model": "fake", "input": "x", "text": {"format": FORM}}, "$"),
    "messages": (
        "/v1/messages",
        {**CHAT, "max_tokens": 9, "output_config": {"format": FORM}},
        "$",
    ),
    "Ollama": ("/api/chat", {**CHAT, "stream": False, "format": PAIR}, "$"),
    "Ollama's json": ("/api/generate", {"model": "fake", "prompt": "x", "format": "json"}, "$"),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": TOOLS}, CALLED),
    "tools of messages": (
        "/v1/messages",
        {**CHAT, "max_tokens": 9, "tools": [{"name": "f", "input_schema": PAIR}]},
        CALLED,
    ),
    "tools of Ollama": ("/api/chat", {**CHAT, "stream": False, "tools": TOOLS}, CALLED),
    "tools beside a format": (
        "/v1/chat/completions",
        {**CHAT, "tools": TOOLS, "response_format": NAMED},
        "$",
    ),
    "a forced call": (
        "/v1/chat/completions",
        {**CHAT, "tools": TOOLS, "tool_choice": "required"},
        '{"name": "f", "arguments": $}',
    ),
    "structural_tag": ("/v1/chat/completions", {**CHAT, "structural_tag": TAG}, "so <f>$</f>"),
    "ebnf": ("/v1/chat/completions", {**CHAT, "ebnf": f"start: %json {json.dumps(PAIR)}"}, "$"),
}


@pytest.fixture(scope="module")
def compiler(demo_model: Path) -> GrammarCompiler:
    return GrammarCompiler(
        Vocabulary((demo_model / "tokenizer.json").read_text("utf-8"), 4096, [2])
    )


def check(compiler: GrammarCompiler, asked: Constraint, around: str, inner: bool = False) -> None:
    """`inner`: the value is part of another, and may have white space around it."""
    assert asked.whitespace == "flexible"
    grammar = compiler.compile(asked)
    for text in [*TAKEN, *REFUSED]:
        whole = around.replace("$", text)
        if inner and text != text.strip():
            continue
        assert takes(compiler.vocabulary, grammar, whole) == (text in TAKEN), whole


@pytest.mark.parametrize("name", ROUTES)
async def test_the_table_of_texts(served: Served, compiler: GrammarCompiler, name: str) -> None:
    path, body, around = ROUTES[name]
    served.model.chat.call = CALL
    assert (await served.post(path, body)).status == 200
    asked = served.model.last_generate.constraint
    assert asked is not None
    check(compiler, asked, around, inner=name == "a forced call")


def f(a: int, b: int) -> int:
    """Add."""
    return a + b


@dataclass
class Pair:
    a: int
    b: int


def test_types_of_programs(compiler: GrammarCompiler) -> None:
    asked = sampling.constraint({"type": Pair})
    assert asked is not None
    check(compiler, asked, "$")


def test_tools_of_programs(compiler: GrammarCompiler) -> None:
    asked = sampling.constraint({"tools": rl.tools(f), "tool_choice": "auto"})
    assert asked is not None and asked.kind == "structural_tag"
    (begin,) = {structure["begin"] for structure in _structures(json.loads(asked.source))}
    (end,) = {structure["end"] for structure in _structures(json.loads(asked.source))}
    check(compiler, asked, f"so: {begin}${end}")


def _structures(tag: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tag["format"]["tags"] if "format" in tag else tag["structures"]
    return found
