"""Vercel's `ai` and its providers: `vercel/calls.mjs` asks the server and prints the answers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import rootlace as rl

FOLDER = Path(__file__).parent / "vercel"
NODE = shutil.which("node")
PROVIDERS = ("compatible", "chat", "responses", "anthropic")
each = pytest.mark.parametrize("provider", PROVIDERS)

pytestmark = [
    pytest.mark.skipif(NODE is None, reason="needs node"),
    pytest.mark.skipif(
        not (FOLDER / "node_modules" / "ai").exists(),
        reason="needs the packages of tests/clients/vercel, which `make clients` installs",
    ),
]


@pytest.fixture(scope="module")
def found(runtime: rl.Runtime) -> dict[str, Any]:
    done = subprocess.run(
        [str(NODE), "calls.mjs", str(runtime.url)],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return json.loads(done.stdout)


@each
def test_text(found: dict[str, Any], provider: str) -> None:
    whole, stream = found[f"text_{provider}"], found[f"stream_{provider}"]
    assert "Rootlace" in whole["text"], whole
    assert "".join(stream["pieces"]) == whole["text"] and len(stream["pieces"]) > 1, stream
    assert (whole["finishReason"], stream["finishReason"]) == ("stop", "stop")
    for usage in (whole["usage"], stream["usage"]):
        assert (usage["inputTokens"], usage["outputTokens"]) == (
            found["goes_on"]["first"]["inputTokens"],
            found["goes_on"]["first"]["outputTokens"],
        )
    # The same prompt was computed for the whole text before.
    usage = stream["usage"]
    assert usage["inputTokenDetails"]["cacheReadTokens"] == usage["inputTokens"] - 1


@each
def test_tools_are_called_and_answered(found: dict[str, Any], provider: str) -> None:
    calling, answering = found[f"tools_{provider}"]
    (call,), (result,) = calling["calls"], calling["results"]
    assert result == {"asked": call["expression"], "result": 42}
    # The embedded model's text behind a result means little, but the model has read the result.
    before, after = calling["usage"], answering["usage"]
    assert after["inputTokens"] > before["inputTokens"] + before["outputTokens"]


@each
def test_calls_stream_as_they_are_written(found: dict[str, Any], provider: str) -> None:
    stream = found[f"tool_stream_{provider}"]
    (call,) = stream["calls"]
    assert json.loads("".join(stream["deltas"])) == call and len(stream["deltas"]) > 1


@each
def test_objects(found: dict[str, Any], provider: str) -> None:
    objects = found[f"object_{provider}"]
    assert isinstance(objects["object"]["large"], bool) and len(objects["object"]["name"]) <= 12
    assert objects["output"] == objects["parts"][-1] == objects["object"]
    assert len(objects["parts"]) > 1


def test_the_rest(found: dict[str, Any]) -> None:
    assert found["completion"]["text"] and found["completion"]["usage"]["inputTokens"]
    assert [len(vector) for vector in found["embeddings"]] == [8, 8]
    first, second = found["goes_on"]["first"], found["goes_on"]["second"]
    cached = second["inputTokenDetails"]["cacheReadTokens"]
    assert cached >= first["inputTokens"] + first["outputTokens"] - 1
    assert found["unknown_model"]["name"] == "AI_APICallError"
    assert found["unknown_model"]["status"] == 404
    assert "this server has" in found["unknown_model"]["message"]
