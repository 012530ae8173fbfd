"""Models of the hub in commands: by their names, and listed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from typer.testing import CliRunner

from rootlace.cli.app import app
from rootlace.cli.model import described_model, served_model
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.doctor import cached_models
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.decoder.packed_weights import PackedWeights
from rootlace.runtime.model.executor.refusals import check_memory
from rootlace.runtime.model.executor.runner import chosen_dtype
from rootlace.runtime.model.kv.main_memory import MainMemory
from rootlace.runtime.model.weight_cache.folder import WeightCache
from rootlace.wire.errors import InvalidRequest
from tests.hub_stand_in import Hub, serve_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("COLUMNS", "200")
        yield served


def _models(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["models", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_name_is_a_model(hub: Hub, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit = hub.add("people/tiny", tiny_model)
    folder = described_model("people/tiny")
    assert Path(folder).name == commit and not hub.sent("model.safetensors")
    assert served_model("people/tiny") == folder
    assert (Path(folder) / "model.safetensors").is_file()
    result = CliRunner().invoke(app, ["serve", "people/none"])
    assert result.exit_code == 1 and "no such model on the Hugging Face hub" in result.output


def test_models_are_listed(hub: Hub, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No models are cached" in _models()
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    hub.add("people/tiny", files)
    served_model("people/tiny")
    free = MainMemory(1 << 40, 1 << 30)
    monkeypatch.setattr(cached_models, "main_memory", lambda: free)
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
    dtype, needs = chosen_dtype("auto", model), found["needs"]
    check_memory(model, dtype, executor, cache, needs, head_apart=True)
    with pytest.raises(InvalidRequest):
        check_memory(model, dtype, executor, cache, needs - 1, head_apart=True)
    free = MainMemory(1 << 40, found["needs"] - 1)
    assert "too much" in _models() and not json.loads(_models("--json"))["models"][0]["fits"]
    (Path(found["path"]) / "config.json").unlink()
    (Path(found["path"]) / "config.json").write_text('{"architectures": ["Pelican"]}')
    (found,) = json.loads(_models("--json"))["models"]
    assert "Pelican" in found["refused"] and found["needs"] is None
    assert "Pelican" in _models().replace("\n", "")


def test_packed_weights_are_listed_and_deleted(hub: Hub, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)
    weights = PackedWeights({}, {"embedding": torch.zeros(1024)})
    cache.keep("1", weights, "people/tiny", None).join()
    there = ("--weight-cache", str(tmp_path))
    assert "people/tiny" in _models(*there)
    (kept,) = cache.kept()
    assert json.loads(_models("--json", *there))["packed"] == [
        {"model": "people/tiny", "path": str(kept.path), "size": kept.size}
    ]
    assert "deleted" in _models("--delete-packed", *there)
    assert not cache.kept()
