"""A model folder's `config.json`: which model it is, and what else it says.

Imports no torch, so that a model that is refused is refused at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rootlace.runtime.model.checkpoint.folder import model_folder
from rootlace.runtime.model.checkpoint.quantised.methods import read_quantisation
from rootlace.runtime.model.checkpoint.quantised.quantisation import Quantisation
from rootlace.runtime.model.families.given import COUNT, TEXT, TEXTS, Given, Kind
from rootlace.runtime.model.families.reading import Family
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.families.table import families
from rootlace.wire.errors import UnsupportedModel


@dataclass(frozen=True)
class ModelConfig:
    """A model folder. `spec` is what its decoder computes; `checkpoint_dtype` is torch's name of
    the type that weights which are not quantised are stored in, None where the configuration does
    not say; `quantisation` is how others are stored, None where there are none."""

    path: Path
    spec: ModelSpec
    checkpoint_dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantisation: Quantisation | None = None

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
        given = Given(file, raw)
        quantisation = read_quantisation(given)
        spec = family.read(given)
        given.finish()
        return cls(
            path=path,
            spec=spec,
            checkpoint_dtype=given("dtype", DTYPE.or_none(), None)
            or given("torch_dtype", DTYPE.or_none(), None),
            bos_token_id=given("bos_token_id", TOKEN.or_none(), family.bos_token_id),
            eos_token_ids=_eos(path, given, family),
            quantisation=quantisation,
        )


_DTYPES = ("float32", "float16", "bfloat16", "float64")
DTYPE = Kind(
    f"one of {', '.join(_DTYPES)}",
    lambda name: TEXT.fits(name) and name.removeprefix("torch.") in _DTYPES,
)
TOKEN = Kind("a token id", COUNT.fits)
TOKENS = Kind(
    "a token id or a list of them",
    lambda ids: COUNT.fits(ids) or (type(ids) is list and all(map(COUNT.fits, ids))),
)


def _read_json(path: Path, name: str) -> dict[str, Any]:
    file = path / name
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{file}: {error}") from error
    except RecursionError as error:
        raise UnsupportedModel(f"{file}: it is nested too deeply") from error
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{file}: not a JSON object")
    return raw


def _family(file: Path, raw: dict[str, Any]) -> Family:
    known = families()
    names = Given(file, raw)("architectures", TEXTS.or_none(), None) or []
    for name in names:
        if name not in known:
            continue
        family = known[name]
        if raw.get("model_type") not in family.model_types:
            raise UnsupportedModel(
                f"{file}: model_type {raw.get('model_type')!r} is not that of {name} "
                f"({' or '.join(family.model_types)})"
            )
        return family
    raise UnsupportedModel(
        f"{file}: architectures {names} is not supported (supported: {', '.join(sorted(known))})"
    )


def _eos(path: Path, given: Given, family: Family) -> tuple[int, ...]:
    """Ids that end a text: `generation_config.json` decides where it says anything."""
    eos = given("eos_token_id", TOKENS.or_none(), family.eos_token_id)
    file = path / "generation_config.json"
    if file.exists():
        generation = Given(file, _read_json(path, file.name))
        found = generation("eos_token_id", TOKENS.or_none(), None)
        eos = eos if found is None else found
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
