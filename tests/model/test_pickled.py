"""Weights in files of torch: read where that is asked for, and never run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.source import PICKLED, servable_folder
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.errors import UnsupportedModel
from tests.model.checkpoints import configs, save
from tests.model.plans import Blocks, Row, Work, make_plan


def top(folder: Path, **settings: Any) -> tuple[list[Any], list[Any]]:
    """The likeliest tokens behind a prompt, and their log-probabilities."""
    executor = ExecutorConfig(model=str(folder), **settings)
    runner = ModelRunner.load(executor, CacheConfig(16, 8), 128, 8)
    (score,) = runner.run(make_plan([Work(Row(Blocks(8, 16), [5, 6, 7, 8, 9]))])).scores
    assert score is not None
    tokens, logprobs = score.top_ids[0], score.top_logprobs[0]
    return list(tokens), list(logprobs)


def as_pickled(name: str) -> str:
    return name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin", 1)


def pickle_weights(folder: Path) -> None:
    """Replace safetensors files by torch's files, with the names for these."""
    for file in folder.glob("*.safetensors"):
        stored = load_file(file)
        # As some are: rows that do not lie one behind the other.
        turned = {n: t.t().contiguous().t() if t.ndim == 2 else t for n, t in stored.items()}
        torch.save(turned, folder / as_pickled(file.name))
        file.unlink()
    for file in folder.glob("*.safetensors.index.json"):
        index = json.loads(file.read_text())
        index["weight_map"] = {n: as_pickled(one) for n, one in index["weight_map"].items()}
        (folder / as_pickled(file.name)).write_text(json.dumps(index))
        file.unlink()


@pytest.mark.parametrize("size", ["5GB", "40KB"])
def test_they_are_the_same_model(tmp_path: Path, size: str) -> None:
    save(configs()["llama-tied"], tmp_path, max_shard_size=size)
    (tmp_path / "tokenizer.json").write_text("{}")
    expected = top(tmp_path)
    pickle_weights(tmp_path)
    assert (tmp_path / PICKLED[size != "5GB"]).is_file()
    with pytest.raises(UnsupportedModel, match=r"can run code .*--allow-pickle .*save_pretrained"):
        servable_folder(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"neither model\.safetensors"):
        top(tmp_path)
    assert servable_folder(tmp_path, allow_pickle=True) == tmp_path
    assert top(tmp_path, allow_pickle=True) == expected


class Hostile:
    """Object that creates a file when pickle loads it."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.made,)


@pytest.mark.parametrize("zipped", [True, False])
def test_what_a_file_says_is_not_run(tmp_path: Path, zipped: bool) -> None:
    save(configs()["llama-tied"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    file, made = tmp_path / PICKLED[0], tmp_path / "made"
    torch.save({"x": Hostile(made)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsupportedModel, match=r"pytorch_model.bin: "):
        top(tmp_path, allow_pickle=True)
    assert not made.exists()
    torch.load(file, weights_only=False)
    assert made.exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([torch.zeros(2)], "not a dictionary"),
        ({"state": {"x": torch.zeros(2)}}, "state is not a dense tensor"),
        ({"x": torch.zeros(2)}, "weights are missing"),
        (None, "cannot be read|damaged"),
    ],
)
def test_faults_are_named(tmp_path: Path, content: object, why: str) -> None:
    save(configs()["llama-tied"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if content is None:
        (tmp_path / PICKLED[0]).write_bytes(b"PK\x03\x04 no archive")
    else:
        torch.save(content, tmp_path / PICKLED[0])
    with pytest.raises(UnsupportedModel, match=why):
        top(tmp_path, allow_pickle=True)
