"""A GGUF file as a model: what other models have in several files."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rootlace.runtime.model.checkpoint.quantised.quantisation import Quantisation
from rootlace.runtime.model.families.given import Given
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.gguf.config import adapted, architecture_of, read_config
from rootlace.runtime.model.gguf.file import GgufFile
from rootlace.runtime.model.gguf.layout import check_types, quantisation_of
from rootlace.runtime.model.gguf.metadata import as_written
from rootlace.runtime.model.gguf.tokenizer import (
    TEMPLATE,
    chat_templates,
    tokenizer_config,
    tokenizer_json,
)
from rootlace.runtime.model.gguf.vocabulary import Vocabulary
from rootlace.wire.sampling import PARAMETERS

_SAMPLING = "general.sampling."
"""What the keys begin with that recommend how to sample (llama.cpp reads them since 2025-11)."""

MIXES = {14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M"}
"""What files with tensors of several types are called, by `general.file_type`."""


@dataclass(frozen=True)
class About:
    """What a model's files say of it. `numbers`: how many its weights are, None where nobody can
    tell; `stored`: the type of most of them, or the name of the mix of types. `stated`: short
    values by their keys, as a GGUF file has them; `architecture` is what these begin with."""

    format: str
    architecture: str
    numbers: int | None
    stored: str
    stated: dict[str, bool | int | float | str]


@dataclass(frozen=True)
class GgufSource:
    """See `checkpoint.source.ModelSource`."""

    file: GgufFile

    @classmethod
    def read(cls, path: Path) -> GgufSource:
        """Raises `UnsupportedModel` for a file that is not sound, or no model of a known kind."""
        file = GgufFile.read(path)
        architecture_of(file)
        return cls(file)

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def config_file(self) -> Path:
        return self.file.path

    def config(self) -> dict[str, Any]:
        check_types(self.file)
        return read_config(self.file) | {"bos_token_id": self._vocabulary.bos}

    def eos_token_id(self) -> list[int]:
        return list(self._vocabulary.ends)

    def generation_config(self) -> tuple[str, dict[str, Any]]:
        names = {about.gguf: name for name, about in PARAMETERS.items() if about.gguf}
        found = {
            key.removeprefix(_SAMPLING): as_written(value)
            for key, value in self.file.metadata.items()
            if key.startswith(_SAMPLING)
        }
        return self.path.name, {names.get(key, key): value for key, value in found.items()}

    def quantisation(self, given: Given) -> Quantisation | None:
        return quantisation_of(self.file)

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        return adapted(self.file, spec)

    def tokenizer_json(self) -> str:
        return tokenizer_json(self._vocabulary)

    def tokenizer_config(self) -> dict[str, Any]:
        return tokenizer_config(self._vocabulary)

    def chat_templates(self) -> dict[str, str]:
        return chat_templates(self.file)

    def pooling(self) -> str:
        return "last"

    def about(self) -> About:
        metadata, count = self.file.metadata, Counter[str]()
        for tensor in self.file.tensors.values():
            count[tensor.type.name] += math.prod(tensor.shape)
        kind = metadata.get("general.file_type")
        stored = MIXES.get(kind) if isinstance(kind, int) else None
        return About(
            "gguf",
            str(metadata["general.architecture"]),
            count.total(),
            stored or max(count, key=lambda name: count[name], default=""),
            {
                key: value
                for key, value in metadata.items()
                if isinstance(value, (bool, int, float, str)) and not key.startswith(TEMPLATE)
            },
        )

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.read(self.file)
