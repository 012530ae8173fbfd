"""Read a model's configuration: specification, dtype, end tokens and quantisation. Importing this
module imports no torch, so that an unsupported model is refused at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from rootlace.runtime.model.checkpoint.quantised.layouts import Quantisation
from rootlace.runtime.model.checkpoint.source import ModelSource, model_source
from rootlace.runtime.model.families.config_reader import (
    TEXT,
    TEXTS,
    TOKEN,
    TOKENS,
    ConfigReader,
    Kind,
)
from rootlace.runtime.model.families.reading import Family
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.families.table import (
    check_ignored,
    families,
    inside,
    known_by,
    text_part,
    with_head,
)
from rootlace.wire.errors import UnsupportedModel

# Installed ----------------------------------------------------------------------------------------
#
# Search transformers' files for a model's modules: importing transformers takes seconds.


ENDINGS = ("ForCausalLM", "LMHeadModel")
ATTENTION = ("full_attention", "sliding_attention", "attention")
"""Kinds of layers that cache nothing but keys and values."""
BORROWED = {"SarvamMoEForCausalLM": "Glm4MoeForCausalLM"}
"""Architectures of which transformers has the configuration alone -> the class that computes the
same."""
SUPPORT = re.compile(rb"^ +_supports_attention_backend(?:: bool)? = True", re.MULTILINE)


def find_architecture(file: Path, raw: dict[str, Any], known: Sequence[str]) -> str:
    """Return the first architecture of a `config.json` that transformers' modules may run. Raises
    `UnsupportedModel` if there is none or if the file rules the model out. `known`: the
    architectures that need no transformers."""
    names = _texts(raw.get("architectures"))
    where = f"{file}: architectures {names}"
    named = [BORROWED.get(name, name) for name in names if name.endswith(ENDINGS)]
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
    """Return the source of a class's module, from the `likely` model's folder first."""
    if not architecture.isidentifier():
        return None
    line = f"\nclass {architecture}(".encode()
    files = folder.glob("models/*/modeling_*.py")
    for file in sorted(files, key=lambda file: (file.parent.name != likely, file)):
        text = file.read_bytes()
        if line in text:
            return text
    return None


# Config -------------------------------------------------------------------------------------------


class ModelConfig(msgspec.Struct, frozen=True):
    """Configuration of a model. `spec`: what its decoder computes. `checkpoint_dtype`: torch's name
    of the dtype of the weights that are not quantised; None: not stated. `quantisation`: the
    storage of quantised weights; None: there are none. `allow_pickle`: weights may be read from
    torch's files. `published`: the spec with the names and the order of weights in adapters of the
    model; None: as in `spec`."""

    source: ModelSource
    spec: ModelSpec
    checkpoint_dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantisation: Quantisation | None = None
    allow_pickle: bool = False
    published: ModelSpec | None = None

    @classmethod
    def read(
        cls, model: str | Path, allow_pickle: bool = False, ignored: Collection[str] = ()
    ) -> ModelConfig:
        """Read the configuration of the folder or GGUF file `model`; see `of`."""
        return replace(cls.of(model_source(model), ignored), allow_pickle=allow_pickle)

    @classmethod
    def of(cls, source: ModelSource, ignored: Collection[str] | None = ()) -> ModelConfig:
        """Read the configuration of a source. Raises `UnsupportedModel`, naming file and field, for
        anything that cannot be run exactly as the checkpoint means. `ignored`: unknown keys to
        accept; None: all."""
        file, raw = source.config_file, source.config()
        text = text_part(file, raw, ignored)
        raw = raw if text is None else text
        architecture, family = _family(file, raw)
        if family is None:
            return _run_by_transformers(source, architecture, raw)
        config = ConfigReader(file, raw)
        check_ignored(config, ignored or ())
        quantisation = source.quantisation(config)
        spec = with_head(family.read(config), architecture, config)
        if text is not None:
            spec = replace(spec, names=inside(spec.names))
        config.finish(by_user=ignored)
        return cls(
            source=source,
            spec=source.adapted(spec),
            checkpoint_dtype=config.get("dtype", DTYPE.or_none(), None)
            or config.get("torch_dtype", DTYPE.or_none(), None),
            bos_token_id=config.get("bos_token_id", TOKEN.or_none(), family.bos_token_id),
            eos_token_ids=_eos(source, config, family),
            quantisation=quantisation,
            published=spec,
        )

    @property
    def path(self) -> Path:
        """Folder or file of the model."""
        return self.source.path

    @property
    def file(self) -> Path:
        """File that errors of the configuration name."""
        return self.source.config_file


def check_config(source: ModelSource, ignored: Collection[str] | None = ()) -> ModelConfig | None:
    """Check a configuration as `ModelConfig.of` does, without importing torch or transformers.
    Return None for a model that transformers runs, of which the file alone is checked."""
    file, raw = source.config_file, source.config()
    _, family = _family(file, text_part(file, raw, ignored) or raw)
    return None if family is None else ModelConfig.of(source, ignored)


def _run_by_transformers(
    source: ModelSource, architecture: str, raw: dict[str, Any]
) -> ModelConfig:
    """Configure a model that transformers' modules run."""
    # Only here: no other model should wait for transformers to be imported.
    from rootlace.runtime.model.transformers_backend.config import read_model

    spec, begin, end = read_model(source.path, architecture)
    eos = ConfigReader(source.config_file, {"": source.eos_token_id()}).get("", TOKENS.or_none())
    return ModelConfig(
        source=source,
        spec=spec,
        checkpoint_dtype=raw.get("dtype") or raw.get("torch_dtype"),
        bos_token_id=begin,
        eos_token_ids=_ids(end if eos is None else eos),
    )


_DTYPES = ("float32", "float16", "bfloat16", "float64")
DTYPE = Kind(
    f"one of {', '.join(_DTYPES)}",
    lambda name: TEXT.fits(name) and name.removeprefix("torch.") in _DTYPES,
)


def _family(file: Path, raw: dict[str, Any]) -> tuple[str, Family | None]:
    """Return the first known architecture and its family; None: transformers may run the model."""
    known = families()
    names = ConfigReader(file, raw).get("architectures", TEXTS.or_none(), None) or []
    for name in names:
        family = known_by(name, known)
        if family is None:
            continue
        if raw.get("model_type") not in family.model_types:
            raise UnsupportedModel(
                f"{file}: model_type {raw.get('model_type')!r} is not that of {name} "
                f"({' or '.join(family.model_types)})"
            )
        return name, family
    return find_architecture(file, raw, sorted(known)), None


def _eos(source: ModelSource, config: ConfigReader, family: Family) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text."""
    named = config.get("eos_token_id", TOKENS.or_none(), family.eos_token_id)
    found = ConfigReader(source.config_file, {"eos_token_id": source.eos_token_id()})
    eos = found.get("eos_token_id", TOKENS.or_none())
    return _ids((family.eos_token_id if named is None else named) if eos is None else eos)


def _ids(found: int | Sequence[int] | None) -> tuple[int, ...]:
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)
