"""Served models in Ollama's form: entries of tags and ps, and the reply of show."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import NotRequired, TypedDict

from rootlace.runtime.model.checkpoint.source import About, model_source
from rootlace.runtime.server.served_model import ServedModel, model_names
from rootlace.wire.errors import RootlaceError
from rootlace.wire.protocol import ModelInfo

NEVER = "9999-12-31T23:59:59+00:00"
"""Time at which a model that stays loaded is unloaded."""


class Details(TypedDict):
    """Facts of the model's files: their name of the architecture, the number of weights, and the
    type of most weights. Texts are empty where unknown."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Entry(TypedDict):
    """Model in Ollama's list: the bytes of its files, and a SHA-256 (hexadecimal) of their names,
    sizes and times. A running model also has its context, when it is unloaded, and the bytes on a
    GPU: all or none."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    expires_at: NotRequired[str]
    size_vram: NotRequired[int]
    context_length: NotRequired[int]


class Entries(TypedDict):
    """Served models."""

    models: list[Entry]


class Shown(TypedDict):
    """Reply of show."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, str | int | float | bool]
    capabilities: list[str]
    modified_at: str


def entry_of(name: str, path: str, modified_at: str) -> Entry:
    """Return a model's entry in Ollama's list. Reads its files, slowly at the first time."""
    size, digest = files_at(Path(path))
    return {
        "name": name,
        "model": name,
        "modified_at": modified_at,
        "size": size,
        "digest": digest,
        "details": details_of(about_of(path, digest)),
    }


def with_adapters(entry: Entry, info: ModelInfo) -> list[Entry]:
    """Return a model's entry, and the same for each of its adapters."""
    return [{**entry, "name": name, "model": name} for name in model_names(info)]


def running_of(model: ServedModel, entry: Entry, expires_at: str = NEVER) -> Entry:
    """Return the entry of a loaded model."""
    on_cpu = model.engine.info.device == "cpu"
    return {
        **entry,
        "expires_at": expires_at,
        "size_vram": 0 if on_cpu else entry["size"],
        "context_length": model.model_info.context_length,
    }


def files_at(path: Path) -> tuple[int, str]:
    """Return the bytes of a model's files, and a digest that changes with them."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    size, paths = 0, []
    for file in files:
        if file.is_file() and not file.name.startswith("."):
            about = file.stat()
            size += about.st_size
            paths.append(f"{file.name}\0{about.st_size}\0{about.st_mtime_ns}")
    return size, hashlib.sha256("\0".join(paths or [str(path)]).encode()).hexdigest()


@lru_cache(maxsize=64)
def about_of(path: str, digest: str) -> About:
    """Return the facts in the files with that digest; empty facts without a model."""
    try:
        return model_source(path).about()
    except RootlaceError:
        return About("", "", None, "", {})


def details_of(about: About) -> Details:
    return {
        "parent_model": "",
        "format": about.format,
        "family": about.architecture,
        "families": [about.architecture] if about.architecture else [],
        "parameter_size": "" if about.numbers is None else _shown(about.numbers),
        "quantization_level": about.stored,
    }


def _shown(numbers: int) -> str:
    """Write a number of weights as Ollama does: 134.52M, 8.0B."""
    if numbers >= 1e9:
        return f"{numbers / 1e9:.1f}B"
    return f"{numbers / 1e6:.2f}M" if numbers >= 1e6 else f"{numbers / 1e3:.0f}K"
