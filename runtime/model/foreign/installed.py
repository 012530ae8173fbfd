"""Whether transformers has modules for a model, found in its files: importing it takes seconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from rootlace.wire.errors import UnsupportedModel

ENDINGS = ("ForCausalLM", "LMHeadModel")
ATTENTION = ("full_attention", "sliding_attention", "attention")
"""Kinds of layers that cache nothing but keys and values."""
SUPPORT = re.compile(rb"^ +_supports_attention_backend(?:: bool)? = True", re.MULTILINE)


def find_architecture(file: Path, raw: dict[str, Any], known: Sequence[str]) -> str:
    """The first architecture of a `config.json` that transformers' modules may run. Raises
    `UnsupportedModel` where there is none, or what the file says rules them out; `known` are the
    architectures that need no transformers."""
    names = _texts(raw.get("architectures"))
    where = f"{file}: architectures {names}"
    named = [name for name in names if name.endswith(ENDINGS)]
    if not named:
        raise UnsupportedModel(f"{where} is not supported (supported: {', '.join(sorted(known))})")
    folder = _folder()
    if folder is None:
        raise UnsupportedModel(
            f"{where} is not supported (supported: {', '.join(sorted(known))}; some others with "
            "transformers: pip install 'rootlace[transformers]')"
        )
    likely = str(raw.get("model_type")).replace("-", "_")
    modules = [(n, text) for n in named if (text := _module_of(folder, n, likely)) is not None]
    if not modules:
        why = "they need code of their own, which is not run" if "auto_map" in raw else "unknown"
        raise UnsupportedModel(
            f"{where} is not supported (supported: {', '.join(sorted(known))}; transformers: {why})"
        )
    name, text = modules[0]
    if SUPPORT.search(text) is None:
        _refuse(file, name, "its modules do not use transformers' attention interface")
    if raw.get("is_encoder_decoder"):
        _refuse(file, name, "encoders are not supported")
    if raw.get("quantization_config") is not None:
        _refuse(file, name, "quantised weights are not supported where transformers runs a model")
    for key in ("layer_types", "layers_block_type"):
        others = {kind for kind in _texts(raw.get(key)) if kind not in ATTENTION}
        if others:
            _refuse(file, name, f"layers of {', '.join(sorted(others))} ({key}) are not supported")
    return name


def _refuse(file: Path, architecture: str, why: str) -> NoReturn:
    raise UnsupportedModel(f"{file}: {architecture}: {why}")


def _texts(found: Any) -> list[str]:
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def _folder() -> Path | None:
    found = find_spec("transformers")
    return None if found is None or found.origin is None else Path(found.origin).parent


@cache
def _module_of(folder: Path, architecture: str, likely: str) -> bytes | None:
    """The module that defines a class, looked for in the `likely` model's folder first."""
    if not architecture.isidentifier():
        return None
    line = f"\nclass {architecture}(".encode()
    files = folder.glob("models/*/modeling_*.py")
    for file in sorted(files, key=lambda file: (file.parent.name != likely, file)):
        text = file.read_bytes()
        if line in text:
            return text
    return None
