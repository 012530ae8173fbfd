"""Calls with arguments in tags that are special tokens, from the request to the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest

import rootlace as rl
from tests.e2e.test_special_tags import ask
from tests.server.test_tagged_arguments import GLM, GROUPED, QWEN
from tests.tiny_model import make_tiny_model

TAGS = (
    *("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|im_start|>", "<|im_end|>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "]~b]", "[e~["),
)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "room": {"type": "string", "minLength": 2, "maxLength": 5},
        "state": {"enum": ["on", "off"]},
        "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["room", "state"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[QWEN, GLM, GROUPED], ids=["qwen", "glm", "grouped"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    model = make_tiny_model(folder, template=request.param, tags=TAGS, context=1024)
    with rl.Runtime(
        model, dtype="float32", threads=1, num_blocks=256, check_invariants=True, http_port=0
    ) as runtime:
        yield runtime


@pytest.mark.parametrize("strict", [True, None])
def test_a_call_that_there_has_to_be(tiny: rl.Runtime, strict: bool | None) -> None:
    function = {"name": "lamp", "parameters": PARAMETERS}
    if strict is not None:
        function["strict"] = strict
    for seed in range(3):
        answer = ask(
            tiny,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "Lights?"}],
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
            enable_thinking=False,
            whitespace="compact",
            temperature=1,
            seed=seed,
            max_tokens=400,
        )
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "lamp"
        jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


def test_a_program_calls_its_function(tiny: rl.Runtime) -> None:
    """The list shows the model's own form, the constraint enforces it, and the call is parsed."""
    called: list[tuple[str, bool, list[int]]] = []

    def lamp(room: Literal["hall", "den"], on: bool, hours: list[int]) -> str:
        """Switch a lamp."""
        called.append((room, on, hours))
        return f"{room}: {on}"

    offered = rl.tools(lamp)

    @rl.function
    def program(s: Any) -> Any:
        s += rl.system("Help." + offered) + rl.user("Lights?")
        s += rl.assistant(rl.gen("said", tools=offered, tool_choice="lamp", max_tokens=300))
        return s.call_tools()

    for seed in range(3):
        state = program.run(backend=tiny, temperature=1, seed=seed)
        ((call,), (room, on, hours)) = state.ret_value, called.pop()
        assert call.error is None and call.result == f"{room}: {on}"
        assert room in ("hall", "den") and type(on) is bool and type(hours) is list
        assert "each argument in tags of its own" in state.text()
        assert "tool_call>" in state["said"] and '{"name"' not in state["said"]
