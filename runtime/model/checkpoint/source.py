"""Find a model's files: a folder as transformers writes it, or a GGUF file. Importing this module
imports no torch, so that an unsupported model is refused at once."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from rootlace.runtime.model.checkpoint.quantised.layouts import Quantisation
from rootlace.runtime.model.checkpoint.quantised.methods import read_quantisation
from rootlace.runtime.model.families.config_reader import TOKENS, ConfigReader, read_json
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.gguf import tokenizer
from rootlace.runtime.model.gguf.config import About as About
from rootlace.runtime.model.gguf.config import GgufSource
from rootlace.runtime.model.gguf.file import MAGIC
from rootlace.runtime.model.gguf.sentencepiece import read_sentencepiece, sentencepiece_json
from rootlace.runtime.model.gguf.tokenizer import Vocabulary
from rootlace.wire.errors import InvalidRequest, UnsupportedModel

# Pooling ------------------------------------------------------------------------------------------
#
# Read the pooling that a folder's model was trained for, in sentence-transformers' files.
#
# Importing this section imports no torch: the gateway uses it.


POOLING_FILES = MODULES, POOLING = "modules.json", "1_Pooling/config.json"
KNOWN = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
PLAIN = ("Transformer", "Pooling", "Normalize")
"""Modules of sentence-transformers that Rootlace computes."""


def read_pooling(folder: Path) -> str:
    """Return "last" (also if the folder states nothing), "mean", or the names of unsupported
    settings. Raises `UnsupportedModel` for files that cannot be read."""
    kinds = {
        str(module.get("type")).rpartition(".")[2]
        for module in read_json(folder / MODULES, [])
        if isinstance(module, dict)
    }
    if kinds - {*PLAIN}:
        return " and ".join(sorted(kinds - {*PLAIN}))
    config = read_json(folder / POOLING, {})
    prefix = "pooling_mode_"
    chosen = [key for key, value in config.items() if value is True]
    modes = [key.removeprefix(prefix) for key in chosen if key.startswith(prefix)]
    named = config.get("pooling_mode")
    modes = modes or ([named] if isinstance(named, str) else [])
    return " and ".join(KNOWN.get(mode, mode) for mode in modes) or "last"


# Folder -------------------------------------------------------------------------------------------


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Weight files of a folder: the single file, or the index of several."""
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Torch's weight files, which are read only if allowed."""
INDEXES = (INDEX, PICKLED[1])
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""Tokenizer files of a folder: the first that exists counts."""
TEKKEN = "tekken.json"
"""Mistral's own vocabulary file, the only one in some folders of newer models."""

_POINTER = b"version https://git-lfs.github.com/spec/"

_RESAVE = (
    "python -c \"from transformers import {cls}; {cls}.from_pretrained('{source}')"
    ".save_pretrained('{target}')\""
)


def gguf_file(model: str | Path) -> Path | None:
    """Return the GGUF file that `model` names; None if `model` names anything else, which
    `model_folder` then judges."""
    try:
        path = Path(model).expanduser()
        if not path.is_file():
            return None
        if path.suffix.lower() == ".gguf":
            return path
        with path.open("rb") as opened:  # some tools' caches name files without an ending
            return path if opened.read(len(MAGIC)) == MAGIC else None
    except (OSError, RuntimeError, ValueError):
        return None


def model_folder(model: str | Path) -> Path:
    """Return the folder that `model` names, with a model's `config.json`. Raises `UnsupportedModel`
    with the finding and a remedy."""
    try:
        return _model_folder(model, Path(model).expanduser())
    except (OSError, RuntimeError, ValueError) as error:  # unknown user, bad name or no permission
        why = getattr(error, "strerror", None) or error
        raise _refusal(model, f"it cannot be looked up: {why}") from error


def _model_folder(model: str | Path, folder: Path) -> Path:
    if not folder.is_dir():
        raise _not_a_folder(model, folder)
    if (folder / "adapter_config.json").is_file() and not has_weights(folder):
        base = _base_of_adapter(folder)
        raise _refusal(
            model,
            f"a LoRA adapter (adapter_config.json), not a model; merge it into its base model "
            f"({base}) with merge_and_unload() of peft, and name the folder of the result",
        )
    if (folder / "config.json").is_file():
        return folder
    if any(folder.glob("*.gguf")):
        raise _refusal(model, f"it has no config.json; {_name_one(folder)}")
    snapshots = sorted(path.parent for path in folder.glob("snapshots/*/config.json"))
    if snapshots:
        raise _refusal(
            model, f"a folder of the Hugging Face cache; the model in it is {snapshots[-1]}"
        )
    raise _refusal(model, "it has no config.json, so it is not a model folder")


def servable_folder(model: str | Path, allow_pickle: bool = False) -> Path:
    """Return `model_folder`. Raises `UnsupportedModel` if weights or a tokenizer are missing."""
    folder = model_folder(model)
    stored = stored_in(folder, allow_pickle)
    if stored is None:
        raise _no_weights(model, folder)
    parts = index_files(folder / stored) if stored in INDEXES else ()
    for name in parts:
        if not (folder / name).exists():
            raise UnsupportedModel(f"{folder / name}: the file is missing")
    check_fetched(folder / name for name in (stored, *parts, *TOKENIZERS))
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise _no_tokenizer(model, folder)
    return folder


def _no_tokenizer(model: str | Path, folder: Path) -> UnsupportedModel:
    """Say how to make a `tokenizer.json`. AutoTokenizer would only copy Mistral's file."""
    what = "others are converted with"
    cls = "AutoTokenizer"
    if (folder / TEKKEN).is_file():
        what = f"{TEKKEN} is converted, where mistral-common and Pillow are installed, with"
        cls = "PreTrainedTokenizerFast"
    resave = _RESAVE.format(cls=cls, source=folder, target=folder)
    return _refusal(model, f"it has neither {' nor '.join(TOKENIZERS)}; {what}: {resave}")


def check_fetched(files: Iterable[Path]) -> None:
    """Raise `UnsupportedModel` for a Git LFS pointer in place of a file. Files that cannot be
    opened are skipped."""
    for file in files:
        with suppress(OSError), file.open("rb") as opened:
            if opened.read(len(_POINTER)) == _POINTER:
                raise UnsupportedModel(
                    f"{file}: a pointer of Git LFS, not the file; fetch it with: git lfs pull"
                )


def has_weights(folder: Path, allow_pickle: bool = False) -> bool:
    """Tell whether there are weights that Rootlace reads: a GGUF file always has some."""
    return folder.is_file() or stored_in(folder, allow_pickle) is not None


def stored_in(folder: Path, allow_pickle: bool) -> str | None:
    """Return the name of the weight file, or of the index of several; None if there is none."""
    names = weight_names(allow_pickle)
    return next((name for name in names if (folder / name).is_file()), None)


def weight_names(allow_pickle: bool) -> tuple[str, ...]:
    """List the names of weight files and indexes; the first that exists counts."""
    return (SINGLE, INDEX, *(PICKLED if allow_pickle else ()))


def index_files(index: Path) -> list[str]:
    """Return the sorted files that an index of weights names. Raises `UnsupportedModel`."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedModel(f"{index}: not a weight index: {error!r}") from error
    for name in names:
        # The index is data: it may not lead out of the folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise UnsupportedModel(f"{index}: weight_map: bad file name {name!r}")
    return sorted(set(names))


def _not_a_folder(model: str | Path, path: Path) -> UnsupportedModel:
    if path.suffix.lower() == ".gguf":
        return _refusal(model, "there is no such file")
    if path.is_file():
        return _refusal(model, f"a file; name the folder it is in, {path.parent}")
    if str(model).count("/") == 1 and not path.is_absolute() and path.parent.is_dir():
        return _refusal(
            model,
            "there is no such folder; it is not looked up on the Hugging Face hub because there "
            f"is a folder {path.parent} here",
        )
    return _refusal(
        model,
        "there is no such folder (a model of the Hugging Face hub is named as in Qwen/Qwen3-0.6B; "
        "`rootlace models` lists those that a short name is enough for)",
    )


def _no_weights(named: str | Path, folder: Path) -> UnsupportedModel:
    pickled = sorted({*folder.glob("pytorch_model*.bin"), *folder.glob("*.pth")})
    if pickled:
        target = f"{folder.resolve().name}-safetensors"
        model = _RESAVE.format(cls="AutoModelForCausalLM", source=folder, target=target)
        allowed = "--allow-pickle (allow_pickle=True) reads the tensors, and runs no code. "
        return _refusal(
            named,
            f"its weights are in {pickled[0].name}: such files can run code when they are read, "
            f"so only safetensors are. {allowed if stored_in(folder, True) else ''}Convert them "
            f"with: {model} && cp -n {folder}/*token* {target}/",
        )
    if any(folder.glob("*.gguf")):
        return _refusal(named, f"it has no safetensors files; {_name_one(folder)}")
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    there = f" ({_some(others)}: other names are not read)" if others else ""
    return _refusal(named, f"it has no weights: neither {SINGLE} nor {INDEX} is there{there}")


def _name_one(folder: Path) -> str:
    """Advise on a folder that has GGUF files."""
    found = sorted(path.name for path in folder.glob("*.gguf"))
    return f"name one of its GGUF files: {_some(found)}"


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{' ...' if names[5:] else ''}"


def _base_of_adapter(folder: Path) -> str:
    try:
        found = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        return str(found["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "adapter_config.json names it"


def _refusal(model: str | Path, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"{model}: {why}")


# Source -------------------------------------------------------------------------------------------


TEMPLATES = "additional_chat_templates"
"""Folder of named chat templates."""
PROCESSOR_TEMPLATE = "chat_template.json"
GENERATION_CONFIG = "generation_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
"""File of transformers before 4.34; versions before 5 repeat its contents elsewhere."""


_GGUF_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}
"""GGUF's names for some keys of `config.json`."""


class FolderSource(msgspec.Struct, frozen=True, dict=True):
    """Model folder. Nothing is read before it is asked for."""

    path: Path

    @property
    def config_file(self) -> Path:
        """File that errors of the configuration name."""
        return self.path / "config.json"

    def config(self) -> dict[str, Any]:
        return read_json(self.config_file)

    def eos_token_id(self) -> Any:
        """Return the ids of the tokens that end a text: one, a list, or None if not stated.
        `generation_config.json` goes before `config.json`."""
        for file in (self.path / GENERATION_CONFIG, self.config_file):
            config = ConfigReader(file, read_json(file, {}))
            found = config.get("eos_token_id", TOKENS.or_none(), None)
            if found is not None:
                return found
        return None

    def generation_config(self) -> tuple[str, dict[str, Any]]:
        """Return the recommended sampling settings: the name of their file, and the settings by the
        names of `generation_config.json`; empty if there are none."""
        file = self.path / GENERATION_CONFIG
        return file.name, read_json(file, {})

    def quantisation(self, config: ConfigReader) -> Quantisation | None:
        """Return the storage of the weights that `config` states; None: not quantised."""
        return read_quantisation(config)

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        """Adapt a family's spec to the storage of the weights; a folder needs no change."""
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
        read = {} if self._pieces is None else tokenizer.tokenizer_config(self._pieces)
        config: dict[str, Any] = read | read_json(file, {})
        if "added_tokens_decoder" in config:
            return config
        # The map is older than the config: transformers 5 writes no map, and removes none.
        tokens = read_json(self.path / SPECIAL_TOKENS, {}).items()
        return config | {name: token for name, token in tokens if config.get(name) is None}

    @cached_property
    def _pieces(self) -> Vocabulary | None:
        """Vocabulary of SentencePiece's own file; None where `tokenizer.json` exists."""
        there = [name for name in TOKENIZERS if (self.path / name).is_file()]
        return read_sentencepiece(self.path / there[0]) if there == [*TOKENIZERS[1:]] else None

    def chat_templates(self) -> dict[str, str]:
        """Return chat templates in Jinja by name: "default", and others named by their use. The
        first source counts: transformers' files, `tokenizer_config.json`, the file of older image
        processors."""
        own = self.path / "chat_template.jinja"
        files = {file.stem: file for file in self.path.glob(f"{TEMPLATES}/*.jinja")}
        files |= {"default": own} if own.is_file() else {}
        if files:
            return {name: file.read_text("utf-8") for name, file in files.items()}
        found = self.tokenizer_config().get("chat_template")
        of_processor = self.path / PROCESSOR_TEMPLATE
        if found is None:
            found = read_json(of_processor, {}).get("chat_template")
        if isinstance(found, list):
            return {entry["name"]: entry["template"] for entry in found}
        if isinstance(found, dict):
            return found
        return {} if found is None else {"default": found}

    def pooling(self) -> str:
        return read_pooling(self.path)

    def release_texts(self) -> None:
        """Do nothing: only `GgufSource` releases its texts."""

    def about(self) -> About:
        config = self.config()
        architecture = str(config.get("model_type", ""))
        sizes = config | (config.get("text_config") or {})  # a multimodal model
        stated = {
            f"{architecture}.{name}": sizes[key]
            for key, name in _GGUF_KEYS.items()
            if isinstance(sizes.get(key), int)
        }
        method = (config.get("quantization_config") or {}).get("quant_method")
        count = _stored_numbers(self.path)
        commonest = max(count, key=lambda name: count[name], default="")
        return About(
            "safetensors" if count else "",
            architecture,
            None if method or not count else count.total(),
            str(method or commonest).upper(),
            stated,
        )


ModelSource = FolderSource | GgufSource
"""Source of all of a model but its weights, which `checkpoint.loader` reads. Methods raise
`UnsupportedModel` or `InvalidRequest` if something is missing or unreadable."""


def model_source(model: str | Path) -> ModelSource:
    """Return the source of the model `model`. Raises `UnsupportedModel` if there is no model."""
    file = gguf_file(model)
    return FolderSource(model_folder(model)) if file is None else GgufSource.read(file)


def servable_source(model: str | Path, allow_pickle: bool = False) -> ModelSource:
    """Return `model_source`. Raises `UnsupportedModel` if a folder lacks weights or a tokenizer."""
    file = gguf_file(model)
    if file is not None:
        check_fetched([file])
        return GgufSource.read(file)
    return FolderSource(servable_folder(model, allow_pickle))


def _stored_numbers(folder: Path) -> Counter[str]:
    """Count the numbers in a folder's safetensors files by dtype, from the files' headers alone;
    empty without such files."""
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
