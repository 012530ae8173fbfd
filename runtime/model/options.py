"""Check that options and adapters fit a model, by its files. Importing this module imports no
torch, so that an unfit option is refused at once."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from rootlace.runtime.config import CacheConfig, ExecutorConfig, KVDtype
from rootlace.runtime.model.checkpoint.config import ModelConfig, check_config
from rootlace.runtime.model.checkpoint.eagle_head import HeadConfig, is_head, read_head
from rootlace.runtime.model.checkpoint.source import (
    FolderSource,
    check_fetched,
    gguf_file,
    model_folder,
    model_source,
)
from rootlace.runtime.model.families.config_reader import (
    COUNT,
    FLAG,
    NUMBER,
    SIZE,
    TABLE,
    TEXT,
    TEXTS,
    ConfigReader,
    Kind,
    names,
    read_json,
)
from rootlace.runtime.model.parallel.shard import why_not
from rootlace.wire.errors import InvalidRequest, UnsupportedModel

log = logging.getLogger(__name__)


def check_options(config: ModelConfig, executor: ExecutorConfig, cache: CacheConfig) -> None:
    """Raise `InvalidRequest` if an option does not fit the model; `UnsupportedModel` for a cache of
    few bits that does not."""
    spec, modules = config.spec, config.spec.transformers
    if modules is not None:
        options = {
            "quantize": executor.quantize != "none",
            "kv_dtype fp8_e4m3": executor.kv_dtype == "fp8_e4m3",
            "adapters": bool(executor.adapters),
        }
        for name in (name for name, is_set in options.items() if is_set):
            raise InvalidRequest(
                f"{name} is not supported for {modules.architecture}, which transformers' modules"
                " run"
            )
    if executor.quantize != "none" and config.quantisation is not None:
        how = config.quantisation.method
        raise InvalidRequest(f"quantize: the model's weights are quantised already ({how})")
    ranks = executor.tensor_parallel
    reason = None if ranks == 1 else why_not(spec, ranks)
    if reason is None and ranks > 1 and executor.kv_dtype == "fp8_e4m3":
        reason = "the scales of kv_dtype fp8_e4m3 are found by running a whole model"
    if reason is None and ranks > 1 and (cache.disk or cache.host_gb):
        reason = "cache_disk and cache_host_gb keep the blocks of a whole model"
    if reason is not None:
        raise InvalidRequest(f"{config.file}: tensor_parallel {ranks}: {reason}")
    if executor.draft_model:
        read_draft(config, executor, cache)
    length, longest = executor.context_length, spec.max_context
    if length is not None and not 0 < length <= longest:
        raise InvalidRequest(
            f"context_length {length} is not between 1 and the model's {longest} "
            f"({config.file}: max_position_embeddings, and what extends it)"
        )
    check_kv_dtype(executor.kv_dtype, config)


def check_kv_dtype(dtype: KVDtype, config: ModelConfig) -> None:
    """Raise `UnsupportedModel` if a cache of the `dtype` type cannot hold this model's keys."""
    attention = config.spec.attention
    if dtype != "auto" and attention.latent is not None:
        raise UnsupportedModel(
            f"{config.file}: kv_lora_rank: its cache is not stored in few bits, as kv_dtype "
            f"{dtype!r} asks"
        )
    if dtype == "int4" and attention.qkv_bias:
        log.warning(
            "%s: keys have biases, for which kv_dtype 'int4' may be too coarse; 'int8' is finer",
            config.file,
        )
    if dtype in ("int8", "int4") and attention.head_dim % 2:
        raise UnsupportedModel(
            f"{config.file}: head_dim {attention.head_dim}: keys of kv_dtype {dtype!r} are mixed "
            "in pairs of numbers"
        )


# Draft model --------------------------------------------------------------------------------------


def names_head(model: str | Path) -> bool:
    """Tell whether `model` is the folder of a head that reads a model's hidden states. Raises
    `UnsupportedModel` if it is neither a head nor a model."""
    return gguf_file(model) is None and is_head(FolderSource(model_folder(model)).config())


def read_draft(config: ModelConfig, executor: ExecutorConfig, cache: CacheConfig) -> ModelConfig:
    """Return the configuration of `executor.draft_model`; a `HeadConfig` for a head. Raises
    `InvalidRequest` if it does not fit the model and the other options, `UnsupportedModel` for an
    unsupported model or head."""
    path, ignored = executor.draft_model, executor.ignore_config_keys
    draft: ModelConfig | None
    if names_head(path):
        try:
            draft = read_head(model_folder(path), config, ignored)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"draft_model {path}: EAGLE head: {error}") from error
    else:
        draft = check_config(model_source(path), ignored)
    reasons = {
        "transformers' modules would run it": draft is None,
        "it scores labels": draft is not None and draft.spec.labels is not None,
        "the model scores labels": config.spec.labels is not None,
        "not served with tensor_parallel": executor.tensor_parallel > 1,
        "not served with adapters": bool(executor.adapters),
        "served on a CPU only": executor.device.startswith("cuda"),
        "served with native kernels only": executor.kernels == "reference",
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise InvalidRequest(f"draft_model {path}: {reason}")
    assert draft is not None
    try:
        check_options(draft, draft_executor(executor, draft), cache)
    except (InvalidRequest, UnsupportedModel) as error:
        raise type(error)(f"draft_model {path}: {error}") from error
    return replace(draft, allow_pickle=executor.allow_pickle)


def draft_executor(executor: ExecutorConfig, draft: ModelConfig) -> ExecutorConfig:
    """Return the options of a draft model: the model's, as far as they fit."""
    quantised = draft.quantisation is not None
    return dataclasses.replace(
        executor,
        model=executor.draft_model,
        draft_model="",
        device="cpu",
        context_length=None,
        quantize="none" if quantised else executor.quantize,
    )


def check_same_tokens(config: ModelConfig, draft: ModelConfig) -> None:
    """Raise `InvalidRequest` unless both tokenizers have the same token for every id. Either may be
    padded behind the last token of the other. A head has no tokenizer."""
    if isinstance(draft, HeadConfig):
        return
    texts = config.source.tokenizer_json(), draft.source.tokenizer_json()
    if texts[0] == texts[1]:
        return
    known, other = map(_tokens, texts)
    last = min(max(known, default=0), max(other, default=0))
    for token_id in sorted(known.keys() | other.keys()):
        if token_id > last:
            return
        if known.get(token_id) != other.get(token_id):
            raise InvalidRequest(
                f"draft_model {draft.path}: it has another tokenizer: token {token_id} is "
                f"{other.get(token_id)!r} there, {known.get(token_id)!r} in {config.path}"
            )


def _tokens(tokenizer_json: str) -> dict[int, str]:
    """Return the token of each id."""
    found = json.loads(tokenizer_json)
    listed = found["model"]["vocab"]
    if isinstance(listed, list):  # pieces and their scores
        tokens = {at: piece for at, (piece, _) in enumerate(listed)}
    else:
        tokens = {at: token for token, at in listed.items()}
    return tokens | {one["id"]: one["content"] for one in found.get("added_tokens") or ()}


# Adapters -----------------------------------------------------------------------------------------


FILE, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
NAMES = Kind("a text or a list of texts", lambda v: TEXT.fits(v) or TEXTS.fits(v))
LAYERS = Kind(
    "a layer's number or a list of them",
    lambda v: COUNT.fits(v) or (type(v) is list and all(map(COUNT.fits, v))),
)
START = Kind("true, false or a text", lambda v: FLAG.fits(v) or TEXT.fits(v))
RANKS = Kind("an object of ranks", lambda v: TABLE.fits(v) and all(map(SIZE.fits, v.values())))
SCALES = Kind("an object of numbers", lambda v: TABLE.fits(v) and all(map(NUMBER.fits, v.values())))


PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Starts of training that left the model's own weights unchanged."""
IGNORED = names(
    "peft_type task_type auto_mapping base_model_name_or_path revision inference_mode "
    "lora_dropout fan_in_fan_out megatron_core runtime_config loftq_config eva_config "
    "qalora_group_size ensure_weight_tying"
)
"""Keys that do not change an adapter's computation."""


class AdapterConfig(msgspec.Struct, frozen=True):
    """Configuration of the adapter `name`, in the folder of `file`.

    A module's rank and alpha are those of the first pattern that matches the end of its name, or
    `rank` and `alpha`. Its addition is multiplied by alpha / rank or, if `rank_stabilised`, by
    alpha / sqrt(rank).
    """

    name: str
    file: Path
    rank: int
    alpha: float
    rank_stabilised: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    chosen: str | Sequence[str]
    parameters: Sequence[str]
    excluded: str | Sequence[str]
    layers: Sequence[int] | None
    layer_patterns: Sequence[str]
    version: tuple[int, ...]
    """Version of the PEFT that wrote the adapter; empty if unknown."""

    @property
    def folder(self) -> Path:
        return self.file.parent

    def targets(self, module: str, *, linear_layer: bool = True) -> bool:
        """Tell whether the adapter changes the module of this name in the whole model. "all-linear"
        means the linear modules of the layers."""
        if self.excluded and _matches(self.excluded, module):
            return False
        if self.chosen == ALL_LINEAR:
            return linear_layer and self._has_layer(module)
        if not isinstance(self.chosen, str) and module in self.chosen:
            return True  # PEFT, too, ignores `layers` for a whole name
        return _matches(self.chosen, module) and self._has_layer(module)

    def targets_parameter(self, name: str) -> bool:
        """Tell whether the adapter changes this parameter, which is no module's weight."""
        return _matches(self.parameters, name)

    def _has_layer(self, module: str) -> bool:
        if self.layers is None:
            return True
        for pattern in self.layer_patterns or (r"[^.]*",):
            found = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module)
            if found:
                return int(found[1]) in self.layers
        return False

    def rank_of(self, module: str) -> int:
        return [*_matching(self.ranks, module), self.rank][0]

    def alphas_of(self, module: str) -> list[float]:
        """Return the alphas of all patterns that match the module; the first one counts."""
        return _matching(self.alphas, module)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = [*self.alphas_of(module), self.alpha][0]
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    def refuse(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"adapter {self.name!r}: {self.folder}: {what}")


def read_adapters(options: Sequence[str]) -> list[AdapterConfig]:
    """Read the adapters of an option's values, each `NAME=PATH`. Raises `InvalidRequest` for other
    values, `UnsupportedModel` for unsupported settings, naming file and key."""
    found: dict[str, AdapterConfig] = {}
    for one in options:
        name, equals, path = one.partition("=")
        if not name or not equals or not path:
            raise InvalidRequest(f"adapter {one!r}: write it as NAME=PATH")
        if f":{name}".endswith(":latest"):
            raise InvalidRequest(
                f"adapter {one!r}: no adapter is called latest: a tag that "
                "Ollama's clients put behind every model"
            )
        if name in found:
            raise InvalidRequest(f"two adapters are called {name!r}")
        found[name] = _read(name, Path(path).expanduser())
    return list(found.values())


def _read(name: str, folder: Path) -> AdapterConfig:
    file = folder / FILE
    # Keys without a value have no effect.
    raw = {key: value for key, value in read_json(file, {}).items() if value is not None}
    if not raw:
        raise UnsupportedModel(
            f"adapter {name!r}: {folder} is not the folder of a PEFT adapter: {FILE} is missing,"
            " or says nothing"
        )
    check_fetched([folder / WEIGHTS])
    config = ConfigReader(file, raw)
    config.pass_over(*(key for key, value in raw.items() if value in (False, {}, [], "")))
    config.get("peft_type", Kind("LORA", lambda value: value == "LORA"))
    config.get("bias", Kind("none (biases are not changed)", lambda value: value == "none"), "none")
    start = config.get("init_lora_weights", START, True)
    if start not in PLAIN_STARTS:
        config.refuse(
            "init_lora_weights",
            "training changed the model's own weights; convert the adapter to plain LoRA",
        )
    layers = config.get("layers_to_transform", LAYERS, None)
    parameters = config.get("target_parameters", TEXTS, ())
    adapter = AdapterConfig(
        name=name,
        file=file,
        rank=config.size("r", 8),
        alpha=config.number("lora_alpha", 8),
        rank_stabilised=config.flag("use_rslora", False),
        ranks=config.get("rank_pattern", RANKS, {}),
        alphas=config.get("alpha_pattern", SCALES, {}),
        chosen=_lowered(config.get("target_modules", NAMES, *[()] * bool(parameters))),
        parameters=parameters,
        excluded=config.get("exclude_modules", NAMES, ()),
        layers=[layers] if isinstance(layers, int) else layers or None,
        layer_patterns=_listed(config.get("layers_pattern", NAMES, None)),
        version=tuple(map(int, re.findall(r"\d+", config.get("peft_version", TEXT, ""))[:3])),
    )
    config.finish(IGNORED)
    _check_patterns(adapter, config)
    return adapter


def _check_patterns(adapter: AdapterConfig, config: ConfigReader) -> None:
    patterns: dict[str, Sequence[str]] = {
        "target_modules": _listed(adapter.chosen if isinstance(adapter.chosen, str) else None),
        "exclude_modules": _listed(adapter.excluded if isinstance(adapter.excluded, str) else None),
        "layers_pattern": adapter.layer_patterns,
        "rank_pattern": tuple(adapter.ranks),
        "alpha_pattern": tuple(adapter.alphas),
    }
    for key, texts in patterns.items():
        for text in texts:
            try:
                re.compile(text)
            except re.error as error:
                config.refuse(key, f"{text!r} is not a pattern: {error}")


def _lowered(chosen: Any) -> Any:
    return ALL_LINEAR if isinstance(chosen, str) and chosen.lower() == ALL_LINEAR else chosen


def _listed(names: str | Sequence[str] | None) -> Sequence[str]:
    return [names] if isinstance(names, str) else names or ()


def _matches(wanted: str | Sequence[str], module: str) -> bool:
    """Match a module: a text is a pattern of the whole name, a list has names or their ends."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in wanted)


def _matching(patterns: Mapping[str, Any], module: str) -> list[Any]:
    """Return the values of the patterns that match the end of a name, in their order."""
    found = patterns.items()
    return [value for one, value in found if re.match(rf"(.*\.)?({one})$", module)]
