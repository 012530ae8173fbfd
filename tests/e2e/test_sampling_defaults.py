"""Models use their recommended sampling, unless a request or the server's options say otherwise."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import rootlace as rl
from rootlace.cli.run import Conversation
from rootlace.wire.errors import InvalidRequest
from tests.cli.conftest import CPU, Serve
from tests.model.gguf.converting import convert
from tests.tiny_model import make_tiny_model

FILE = "generation_config.json"
GREEDY = {"temperature": 0, "max_new_tokens": 7, "do_sample": False}


@rl.function
def write(s: rl.State, options: dict[str, Any]) -> None:
    s += "Once upon" + rl.gen("text", max_tokens=20, seed=3, **options)


def written(runtime: rl.Runtime, **options: Any) -> str:
    return str(write.run(options, backend=runtime)["text"])


def asked(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def completed(url: str, **options: Any) -> str:
    body = {"prompt": "Once upon", "max_tokens": 20, "seed": 3, **options}
    return str(asked(url, "/v1/completions", body)["choices"][0]["text"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    (folder / FILE).write_text(json.dumps(GREEDY))
    return folder


def test_a_folder(folder: Path) -> None:
    with rl.Runtime(str(folder), num_blocks=64, http_port=0, threads=1) as runtime:
        assert runtime.url is not None
        greedy, drawn = written(runtime, temperature=0), written(runtime, temperature=1)
        assert greedy != drawn
        assert written(runtime) == greedy == completed(runtime.url)
        assert completed(runtime.url, temperature=1.0) == drawn
        info = asked(runtime.url, "/get_model_info")
        assert info["default_sampling"] == {"temperature": 0.0, "max_tokens": 7}
        assert info["default_sampling_from"] == {"temperature": FILE, "max_tokens": FILE}
        chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
        reply = asked(runtime.url, "/v1/chat/completions", chat)
        assert reply["usage"]["completion_tokens"] == 7
        assert runtime.endpoint.model_info.sampling == info["default_sampling"]
        for temperature in (None, 0.5):  # `rootlace chat` sends its option alone
            conversation = Conversation(runtime.endpoint, "", temperature, max_tokens=7)
            assert conversation._run.defaults.get("temperature") == temperature
            conversation.close()


def test_options_of_a_runtime(folder: Path, tmp_path: Path) -> None:
    own = {"temperature": 1.0, "top_p": 0.0}  # greedy by another parameter
    with rl.Runtime(
        str(folder), num_blocks=64, threads=1, default_sampling=own, generation_config="none"
    ) as runtime:
        assert written(runtime) == written(runtime, temperature=0)
        assert written(runtime, top_p=1.0) != written(runtime)
        assert runtime.endpoint.model_info.sampling == own
    with pytest.raises(InvalidRequest, match="--default-sampling: no parameter 'heat'"):
        rl.Runtime(str(folder), num_blocks=64, default_sampling={"heat": 1})


@pytest.mark.slow
def test_each_of_several_models_has_its_own(folder: Path, tmp_path: Path) -> None:
    """A folder's, a file's, the server's, and none. Each is logged once, also for the model that
    recommends nothing."""
    plain = make_tiny_model(tmp_path / "plain")
    file = convert(folder, tmp_path / "m.gguf", general__sampling__temp=0.0)
    options = ("--default-sampling", "b:top_k=9", "--port", "0", *CPU)
    serve = Serve(f"a={folder}", f"b={plain}", f"c={plain}", f"d={file}", *options)
    try:
        cards = {card["id"]: card for card in asked(serve.url, "/v1/models")["data"]}
        assert {name: card["default_sampling"] for name, card in cards.items()} == {
            "a": {"temperature": 0.0, "max_tokens": 7},
            "b": {"top_k": 9},
            "c": {},
            "d": {"temperature": 0.0},
        }
        assert cards["b"]["default_sampling_from"] == {"top_k": "--default-sampling"}
        assert cards["d"]["default_sampling_from"] == {"temperature": "m.gguf"}
        for model, greedy in (("a", True), ("b", False), ("c", False), ("d", True)):
            usual = completed(serve.url, model=model)
            assert (usual == completed(serve.url, model=model, temperature=0)) == greedy
    finally:
        serve.stop()
    assert serve.output.count("recommends no sampling") == 1
    assert "c recommends no sampling" in serve.output
    assert f"default sampling of a: temperature 0 ({FILE}), max_tokens 7 ({FILE})" in serve.output
    assert "default sampling of b: top_k 9 (--default-sampling)" in serve.output
