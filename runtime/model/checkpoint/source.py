"""Where a model is read from: a folder as transformers writes it, or a GGUF file.

Imports no torch, so that a model that is refused is refused at once.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from rootlace.runtime.model.checkpoint.folder import (
    INDEX,
    TOKENIZERS,
    check_fetched,
    gguf_file,
    index_files,
    model_folder,
    read_pooling,
    servable_folder,
    stored_in,
)
from rootlace.runtime.model.checkpoint.quantised.layouts import Quantisation
from rootlace.runtime.model.checkpoint.quantised.methods import read_quantisation
from rootlace.runtime.model.families.config_reader import TOKENS, ConfigReader
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.gguf import tokenizer
from rootlace.runtime.model.gguf.config import About as About
from rootlace.runtime.model.gguf.config import GgufSource
from rootlace.runtime.model.gguf.sentencepiece import read_sentencepiece, sentencepiece_json
from rootlace.runtime.model.gguf.tokenizer import Vocabulary
from rootlace.wire.errors import InvalidRequest, UnsupportedModel

TEMPLATES = "additional_chat_templates"
"""Where a folder has templates with names."""
GENERATION_CONFIG = "generation_config.json"


_GGUF_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}
"""What GGUF files call some keys of `config.json`."""


class ModelSource(Protocol):
    """All of a model but its weights, which `checkpoint.loader` reads.

    Where something is not there or cannot be read, `UnsupportedModel` or `InvalidRequest` says so.
    """

    @property
    def path(self) -> Path:
        """The folder or file."""

    @property
    def config_file(self) -> Path:
        """What faults of the configuration name."""

    def config(self) -> dict[str, Any]:
        """`config.json`."""

    def eos_token_id(self) -> Any:
        """What ends a text: a token's id, a list of them, or None where nothing says so."""

    def generation_config(self) -> tuple[str, dict[str, Any]]:
        """How the model is to be sampled: where that stands, and what stands there by the names of
        `generation_config.json`, empty where there is nothing."""

    def quantisation(self, config: ConfigReader) -> Quantisation | None:
        """How weights are stored, as `config` says; None: as they are."""

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        """What a family has read from `config`, as the weights are stored here."""

    def tokenizer_json(self) -> str:
        """`tokenizer.json`."""

    def tokenizer_config(self) -> dict[str, Any]:
        """`tokenizer_config.json`, empty where there is none."""

    def chat_templates(self) -> dict[str, str]:
        """In Jinja, by name: that of "default", and those that are used where their name says."""

    def pooling(self) -> str:
        """What vector of a text the model was trained for; see `read_pooling`."""

    def about(self) -> About:
        """What is told of the model, as its files have it."""


@dataclass(frozen=True)
class FolderSource:
    """A model folder. Nothing is read before it is asked for."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    def config(self) -> dict[str, Any]:
        return _read_json(self.config_file)

    def eos_token_id(self) -> Any:
        """`generation_config.json` decides where it says anything."""
        for file in (self.path / GENERATION_CONFIG, self.config_file):
            config = ConfigReader(file, _read_json(file) if file.is_file() else {})
            found = config.get("eos_token_id", TOKENS.or_none(), None)
            if found is not None:
                return found
        return None

    def generation_config(self) -> tuple[str, dict[str, Any]]:
        file = self.path / GENERATION_CONFIG
        return file.name, _read_json(file) if file.is_file() else {}

    def quantisation(self, config: ConfigReader) -> Quantisation | None:
        return read_quantisation(config)

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        return spec

    def tokenizer_json(self) -> str:
        if self._pieces is not None:
            return sentencepiece_json(self._pieces, self.tokenizer_config())
        file = self.path / TOKENIZERS[0]
        if not file.is_file():
            raise InvalidRequest(f"{self.path}: neither {' nor '.join(TOKENIZERS)} is there")
        return file.read_text("utf-8")

    def tokenizer_config(self) -> dict[str, Any]:
        file = self.path / "tokenizer_config.json"
        own = {} if self._pieces is None else tokenizer.tokenizer_config(self._pieces)
        return own | (_read_json(file) if file.is_file() else {})

    @cached_property
    def _pieces(self) -> Vocabulary | None:
        """What SentencePiece's own file has; None where it is not needed."""
        there = [name for name in TOKENIZERS if (self.path / name).is_file()]
        return read_sentencepiece(self.path / there[0]) if there == [*TOKENIZERS[1:]] else None

    def chat_templates(self) -> dict[str, str]:
        """In files of their own, as transformers saves them, else in `tokenizer_config.json`."""
        own = self.path / "chat_template.jinja"
        files = {file.stem: file for file in self.path.glob(f"{TEMPLATES}/*.jinja")}
        files |= {"default": own} if own.is_file() else {}
        if files:
            return {name: file.read_text("utf-8") for name, file in files.items()}
        found = self.tokenizer_config().get("chat_template")
        if isinstance(found, list):
            return {entry["name"]: entry["template"] for entry in found}
        return {} if found is None else {"default": found}

    def pooling(self) -> str:
        return read_pooling(self.path)

    def about(self) -> About:
        config = self.config()
        architecture = str(config.get("model_type", ""))
        sizes = config | (config.get("text_config") or {})  # of a model that sees images
        stated = {
            f"{architecture}.{name}": sizes[key]
            for key, name in _GGUF_KEYS.items()
            if isinstance(sizes.get(key), int)
        }
        method = (config.get("quantization_config") or {}).get("quant_method")
        count = _stored_numbers(self.path)
        most = max(count, key=lambda name: count[name], default="")
        return About(
            "safetensors" if count else "",
            architecture,
            None if method or not count else count.total(),
            str(method or most).upper(),
            stated,
        )


def model_source(given: str | Path) -> ModelSource:
    """The model that `given` names. Raises `UnsupportedModel` where it is none."""
    file = gguf_file(given)
    return FolderSource(model_folder(given)) if file is None else GgufSource.read(file)


def servable_source(given: str | Path, allow_pickle: bool = False) -> ModelSource:
    """As `model_source`, of a model that has weights and a tokenizer in files that are read."""
    file = gguf_file(given)
    if file is not None:
        check_fetched([file])
        return GgufSource.read(file)
    return FolderSource(servable_folder(given, allow_pickle))


def _stored_numbers(folder: Path) -> Counter[str]:
    """How many numbers the safetensors files of a folder have, by their types; empty where there
    are none. Reads the files' headers alone."""
    stored, count = stored_in(folder, False), Counter[str]()
    names = index_files(folder / stored) if stored == INDEX else [stored] if stored else []
    try:
        for name in names:
            with (folder / name).open("rb") as opened:
                header = opened.read(int.from_bytes(opened.read(8), "little"))
            for key, tensor in json.loads(header).items():
                if key != "__metadata__":
                    count[tensor["dtype"]] += math.prod(tensor["shape"])
    except (OSError, ValueError, KeyError, TypeError, MemoryError) as error:
        raise UnsupportedModel(f"{folder}: {error!r}") from error
    return count


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{file}: {error}") from error
    except RecursionError as error:
        raise UnsupportedModel(f"{file}: it is nested too deeply") from error
    if not isinstance(raw, dict):
        raise UnsupportedModel(f"{file}: not a JSON object")
    return raw
