"""A model folder's `config.json`: which model it is, and what else it says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from rootlace.runtime.model.checkpoint.folder import model_folder
from rootlace.runtime.model.families.reading import Family, Given
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.families.table import families
from rootlace.wire.errors import UnsupportedModel


@dataclass(frozen=True)
class ModelConfig:
    """A model folder. `spec` is what its decoder computes; `checkpoint_dtype` is None where the
    configuration does not say."""

    path: Path
    spec: ModelSpec
    checkpoint_dtype: torch.dtype | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json`, if any) of a model folder.

        Raises `UnsupportedModel`, naming the file and field, for whatever cannot be run exactly as
        the checkpoint means it.
        """
        path = model_folder(folder)
        file = path / "config.json"
        raw = _read_json(path, "config.json")
        family = _family(file, raw)
        if _quantized_weights(raw):
            raise UnsupportedModel(
                f"{file}: quantization_config: quantized weights are not supported"
            )
        try:
            hf = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise UnsupportedModel(f"{file}: {error}") from error
        if hf.model_type not in family.model_types:
            raise UnsupportedModel(
                f"{file}: model_type {hf.model_type!r} is not that of the architectures "
                f"{raw['architectures']}"
            )
        # Where transformers has a value of its own (a default, a new form of old keys), it counts.
        given = Given(file, raw | hf.to_dict())
        spec = family.read(given)
        given.finish(GENERATION_KEYS)
        return cls(
            path=path,
            spec=spec,
            checkpoint_dtype=_dtype(hf.dtype),
            bos_token_id=hf.bos_token_id,
            eos_token_ids=_eos(path, hf.eos_token_id),
        )


GENERATION_KEYS = frozenset(GenerationConfig().to_dict())
"""Keys that say how to sample: old checkpoints have them in `config.json`."""


def _read_json(path: Path, name: str) -> dict[str, Any]:
    file = path / name
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{file}: {error}") from error
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{file}: not a JSON object")
    return raw


def _family(file: Path, raw: dict[str, Any]) -> Family:
    known = families()
    names = raw.get("architectures") or []
    for name in names:
        if name in known:
            return known[name]
    raise UnsupportedModel(
        f"{file}: architectures {names} is not supported (supported: {', '.join(sorted(known))})"
    )


def _quantized_weights(raw: dict[str, Any]) -> bool:
    """False also where only the KV cache is to be quantized (its scales are used if it is)."""
    found = raw.get("quantization_config")
    if not isinstance(found, dict):
        return bool(found)
    only_cache = found.get("kv_cache_scheme") and not found.get("config_groups")
    return bool(found) and not (only_cache and found.get("quant_method") == "compressed-tensors")


def _dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, str):
        value = getattr(torch, value, None)
    return value if isinstance(value, torch.dtype) else None


def _eos(path: Path, configured: int | list[int] | None) -> tuple[int, ...]:
    """Ids that end a text: `generation_config.json` decides where it says anything."""
    eos = None
    if (path / "generation_config.json").exists():
        eos = _read_json(path, "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = configured
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
