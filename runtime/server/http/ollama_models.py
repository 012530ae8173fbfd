"""What is served, as Ollama's clients ask: the entries of tags and ps, and what show tells."""

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
"""When a model is unloaded that stays."""


class Details(TypedDict):
    """What the model's files say: the architecture as they name it, how many numbers its weights
    are, and the type of most of these. Texts are empty where nobody can tell."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Entry(TypedDict):
    """A model as Ollama lists it: the bytes of its files, and 64 hexadecimal digits of their names,
    sizes and times. Where it runs, also its context, when it is unloaded, and the bytes on a GPU:
    all or none."""

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
    """What is served."""

    models: list[Entry]


class Shown(TypedDict):
    """A model."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, str | int | float | bool]
    capabilities: list[str]
    modified_at: str


def entry_of(name: str, path: str, modified_at: str) -> Entry:
    """A model as Ollama lists it. Reads its files, which may take a while the first time."""
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
    """A model as Ollama lists it, and the same with each of its adapters."""
    return [{**entry, "name": name, "model": name} for name in model_names(info)]


def running_of(gateway: ServedModel, entry: Entry, expires_at: str = NEVER) -> Entry:
    """A model as Ollama lists it where it is loaded."""
    on_cpu = gateway.engine.info.device == "cpu"
    return {
        **entry,
        "expires_at": expires_at,
        "size_vram": 0 if on_cpu else entry["size"],
        "context_length": gateway.model_info.context_length,
    }


def files_at(path: Path) -> tuple[int, str]:
    """The bytes of a model's files, and a digest that changes when they do."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    size, found = 0, []
    for file in files:
        if file.is_file() and not file.name.startswith("."):
            about = file.stat()
            size += about.st_size
            found.append(f"{file.name}\0{about.st_size}\0{about.st_mtime_ns}")
    return size, hashlib.sha256("\0".join(found or [str(path)]).encode()).hexdigest()


@lru_cache(maxsize=64)
def about_of(path: str, digest: str) -> About:
    """What the files of that digest say of the model; nothing where there is no model."""
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
    """As Ollama writes how many there are: 134.52M, 8.0B."""
    if numbers >= 1e9:
        return f"{numbers / 1e9:.1f}B"
    return f"{numbers / 1e6:.2f}M" if numbers >= 1e6 else f"{numbers / 1e3:.0f}K"
