"""A real model by name, from the package index to an answer."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import rootlace as rl
from tests.real_model import SMOLLM2


def _asked(url: str, path: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=240) as reply:
        return json.load(reply)


def test_a_name_is_enough(smollm2: rl.Runtime) -> None:
    assert smollm2.model_name == "smollm2" and smollm2.url is not None
    asked = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    reply = _asked(smollm2.url, "/v1/chat/completions", asked)
    assert "Paris" in reply["choices"][0]["message"]["content"]
    shown = _asked(smollm2.url, "/api/show", {"model": "smollm2"})
    assert shown["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "134.52M",
        "quantization_level": "Q4_1",
    }
    assert shown["model_info"]["general.license"] == "apache-2.0"
    info = json.load(urllib.request.urlopen(smollm2.url + "/get_model_info", timeout=60))
    assert info["model_path"] == str(SMOLLM2)
