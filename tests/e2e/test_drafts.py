"""Drafts change no reply: each body is sent to a server without drafts, and several times to one
with drafts, whose cache then knows the answer."""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rootlace as rl
from rootlace.wire.errors import InvalidRequest
from tests.e2e.test_thoughts import OPENS, SCHEMA, post
from tests.model.eagle_heads import save_head_for
from tests.native import native_library
from tests.tiny_model import make_tiny_model

TIMES = 4
HI = [{"role": "user", "content": "hi"}]
OPEN = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}
DISTINCT = {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2}
TOOLS = [{"type": "function", "function": {"name": "go", "parameters": SCHEMA}}]


def form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


CHATS: dict[str, dict[str, Any]] = {
    # Behind a budget free text begins, where no mask may remain.
    "thoughts, then text": {"thinking_budget": 12},
    "thoughts, then stop strings": {"thinking_budget": 5, "stop": ["a", "}", "<"]},
    "thoughts, then a schema": {"thinking_budget": 5, **form(SCHEMA)},
    "no thoughts": {
        "enable_thinking": False,
        "logprobs": True,
        "top_logprobs": 2,
        "return_cache_report": True,
    },
    "closed object": {**form(SCHEMA), "n": 3},
    "open object": {**form(OPEN), "enable_thinking": False},
    "distinct items": {**form(DISTINCT), "enable_thinking": False, "logprobs": True},
    "pattern": {"regex": "(Dear (true|null), ?[a-z ]{3,9}; )+yours", "thinking_budget": 1},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "thinking_budget": 3},
    "bias and bans": {"logit_bias": {"3": -100, "9": 5}, "min_tokens": 30, "thinking_budget": 0},
    "tools": {"tools": TOOLS, "tool_choice": "required", "thinking_budget": 3},
    "stop patterns": {"stop_regex": "[0-9][a-f]", "thinking_budget": 0, "n": 2},
    "a prediction": {"prediction": {"type": "content", "content": "hi there"}, "top_k": 3},
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[rl.Runtime, rl.Runtime]]:
    """Return two servers: without drafts, and with drafts."""
    native_library()
    folder: Path = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, template=OPENS, tags=["<think>", "</think>"])
    given = {"http_port": 0, "dtype": "float32", "kernels": "native", "threads": 1}
    with (
        rl.Runtime(str(folder), speculation_tokens=0, **given) as off,
        rl.Runtime(str(folder), speculation_tokens=1 << 16, **given) as on,
    ):
        yield off, on


def told(runtime: rl.Runtime, body: dict[str, Any]) -> tuple[Any, int]:
    """Return the choices and the number of drafted tokens; log-probabilities must agree."""
    reply = post(runtime, "/v1/chat/completions", messages=HI, seed=3, **body)
    choices = reply["choices"]
    for choice in choices:
        for call in choice["message"].get("tool_calls") or ():
            call.pop("id")
    drafts = reply["usage"]["completion_tokens_details"].get("drafts", {})
    accepted = {source: counts["accepted"] for source, counts in drafts.items()}
    if body.get("return_cache_report"):
        tokens = [token for choice in choices for token in choice["logprobs"]["content"]]
        named = Counter(token.pop("drafted", None) for token in tokens)
        assert {source: named.pop(source, 0) for source in accepted} == accepted
        assert not named.keys() - {None}
    return choices, sum(accepted.values())


@pytest.mark.parametrize("temperature", [0, 1])
def test_they_change_no_reply(servers: tuple[rl.Runtime, rl.Runtime], temperature: float) -> None:
    off, on = servers
    drafted = 0
    for name, more in CHATS.items():
        body = {"max_tokens": 80, "ignore_eos": True, "temperature": temperature, **more}
        expected, none = told(off, body)
        assert not none
        for _ in range(TIMES):
            found, count = told(on, body)
            assert found == expected, name
            drafted += count
    if not drafted:
        pytest.skip("no draft was worth its cost on this machine: nothing was tried")


def test_a_draft_model(
    servers: tuple[rl.Runtime, rl.Runtime], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A draft model with the same tokens changes no reply; one with other tokens is refused."""
    folders = [tmp_path_factory.mktemp("draft") for _ in range(2)]
    model = make_tiny_model(folders[0], template=OPENS, tags=["<think>", "</think>"])
    draft = make_tiny_model(folders[1], seed=1, tags=["<think>", "</think>"])
    given = {"http_port": 0, "dtype": "float32", "kernels": "native", "threads": 1}
    given["speculation_tokens"] = 0
    with rl.Runtime(str(model), draft_model=draft, **given) as runtime:
        for name, more in CHATS.items():
            body = {"max_tokens": 80, "ignore_eos": True, "temperature": 1, **more}
            assert told(runtime, body)[0] == told(servers[0], body)[0], name
        with urllib.request.urlopen(f"{runtime.url}/metrics", timeout=60) as reply:
            assert 'source="model"' in reply.read().decode()
    head = save_head_for(model, tmp_path_factory.mktemp("head"))
    with rl.Runtime(str(model), draft_model=head, **given) as runtime:
        for name, more in CHATS.items():
            body = {"max_tokens": 80, "ignore_eos": True, "temperature": 1, **more}
            assert told(runtime, body)[0] == told(servers[0], body)[0], name
    make_tiny_model(folders[1], tags=["<think>", "</thinks>"])
    with pytest.raises(InvalidRequest, match="token 261 is '</thinks>' there, '</think>' in"):
        rl.Runtime(str(model), draft_model=draft, **given)
