"""Pooling that a folder names, as sentence-transformers reads it."""

import json
from pathlib import Path
from typing import Any

import pytest

from rootlace.runtime.model.checkpoint.source import read_pooling
from rootlace.wire.errors import UnsupportedModel

KINDS = "sentence_transformers.models."
MODES = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")


def flags(*modes: str) -> dict[str, Any]:
    """Return the flags of a file that names each of these modes."""
    return {"word_embedding_dimension": 8, "include_prompt": True} | {
        f"pooling_mode_{mode}": mode in modes for mode in MODES
    }


@pytest.mark.parametrize(
    ("given", "modules", "found"),
    [
        (None, (), "last"),
        (flags("lasttoken"), ("Transformer", "Pooling", "Normalize"), "last"),
        (flags("mean_tokens"), ("Transformer", "Pooling"), "mean"),
        ({"pooling_mode": "mean"}, (), "mean"),
        (flags("cls_token"), (), "cls_token"),
        (flags("cls_token", "mean_tokens"), (), "cls_token and mean"),
        (flags("mean_tokens"), ("Transformer", "Pooling", "Dense"), "Dense"),
    ],
)
def test_what_a_folder_names(given, modules, found, tmp_path: Path) -> None:
    if given is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(given))
    if modules:
        listed = [{"idx": at, "type": KINDS + kind} for at, kind in enumerate(modules)]
        (tmp_path / "modules.json").write_text(json.dumps(listed))
    assert read_pooling(tmp_path) == found


@pytest.mark.parametrize("text", ["[", "{}"])
def test_a_file_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(UnsupportedModel, match="modules"):
        read_pooling(tmp_path)
