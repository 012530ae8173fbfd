"""Which files of a repository a model needs."""

from __future__ import annotations

import re
from collections.abc import Collection

from rootlace.runtime.model.checkpoint.folder import INDEX, SINGLE
from rootlace.runtime.model.hub.name import HubName
from rootlace.wire.errors import UnsupportedModel

CONFIG = "config.json"
ABOUT = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""What else is read of a folder beside its weights, where it is there."""

USUAL = "Q4_K_M"
"""The GGUF format that is taken where none is named and several are there."""

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")
_FORMAT = re.compile(r"(?:^|[-_.])((?:IQ|Q|TQ)\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)


def gguf_files(name: HubName, files: Collection[str]) -> list[str]:
    """The files of the GGUF model that `name` means, the first of several first; empty where it
    means none. Raises `UnsupportedModel` where it is not clear which."""
    models = _gguf_models(files)
    if name.variant is None:
        if CONFIG in files or not models:
            return []
        found = [stem for stem in models if _format(stem) == USUAL] or list(models)
    else:
        wanted = name.variant.lower().removesuffix(".gguf")
        found = [
            stem
            for stem in models
            if wanted in (str(_format(stem)).lower(), stem.rpartition("/")[2].lower())
        ]
    if len(found) == 1:
        return models[found[0]]
    formats = sorted({_format(stem) or stem for stem in models})
    has = f"there are {', '.join(formats)}" if models else "there is no GGUF file"
    which = "say which" if name.variant is None else f"{len(found)} files match"
    raise UnsupportedModel(f"{name}: {which}, as in {name.repo}:{USUAL}; {has}")


def weight_files(name: HubName, files: Collection[str]) -> str:
    """The safetensors file, or the index of several. Raises `UnsupportedModel` where neither is
    there."""
    for file in (SINGLE, INDEX):
        if file in files:
            return file
    pickled = next((file for file in sorted(files) if file.endswith((".bin", ".pth"))), None)
    why = f"its weights are in {pickled}, and only safetensors and GGUF are read"
    raise UnsupportedModel(f"{name}: {why if pickled else 'the repository has no weights'}")


def _gguf_models(files: Collection[str]) -> dict[str, list[str]]:
    """By name without number and ending, the files of each; projectors of images are no models."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and "mmproj" not in file:
            found.setdefault(_SPLIT.sub("", file.removesuffix(".gguf")), []).append(file)
    return found


def _format(stem: str) -> str | None:
    found = _FORMAT.search(stem)
    return found[1].upper() if found else None
