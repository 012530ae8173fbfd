"""Which vector of a text a folder's model was trained for, as sentence-transformers writes it.

Imports no torch: the gateway reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rootlace.wire.errors import UnsupportedModel

POOLING_FILES = MODULES, POOLING = "modules.json", "1_Pooling/config.json"
KNOWN = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
PLAIN = ("Transformer", "Pooling", "Normalize")
"""The modules whose work is done here."""


def read_pooling(folder: Path) -> str:
    """ "last" (also where the folder does not say) or "mean", or what is not supported, by name.
    Raises `UnsupportedModel` for files that cannot be read."""
    kinds = {
        str(module.get("type")).rpartition(".")[2]
        for module in _read(folder / MODULES, [])
        if isinstance(module, dict)
    }
    if kinds - {*PLAIN}:
        return " and ".join(sorted(kinds - {*PLAIN}))
    given = _read(folder / POOLING, {})
    if not isinstance(given, dict):
        return "last"
    prefix = "pooling_mode_"
    asked = [key for key, value in given.items() if value is True]
    modes = [key.removeprefix(prefix) for key in asked if key.startswith(prefix)]
    named = given.get("pooling_mode")
    modes = modes or ([named] if isinstance(named, str) else [])
    return " and ".join(KNOWN.get(mode, mode) for mode in modes) or "last"


def _read(file: Path, default: Any) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{file}: {error}") from error
