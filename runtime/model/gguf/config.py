"""Make a `config.json` of a GGUF file's metadata. So a family is defined once, and a model that its
function refuses is refused for GGUF, too."""

from __future__ import annotations

import logging
import math
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import replace

from rootlace.runtime.model.checkpoint.quantised.layouts import Quantisation
from rootlace.runtime.model.families.config_reader import (
    COUNT,
    NOT_NEGATIVE,
    NUMBER,
    SIZE,
    TEXT,
    ConfigReader,
)
from rootlace.runtime.model.families.spec import ModelSpec, WeightNames
from rootlace.runtime.model.gguf.architectures import (
    ARCHITECTURES,
    Architecture,
    Metadata,
    as_written,
)
from rootlace.runtime.model.gguf.file import GgufFile, Tensor, check_types, quantisation_of
from rootlace.runtime.model.gguf.tokenizer import (
    TEMPLATE,
    Vocabulary,
    chat_templates,
    tokenizer_json,
)
from rootlace.runtime.model.gguf.tokenizer_cache import TokenizerCache, TokenizerFacts
from rootlace.wire.errors import UnsupportedModel
from rootlace.wire.sampling import PARAMETERS

log = logging.getLogger(__name__)

EMBEDDING, HEAD = "token_embd", "output"
_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors of factors for rotations: `_rope_scaling` reads or refuses them."""
_PARTS = {
    "input_norm": ("attn_norm",),
    "attention_out_norm": ("post_attention_norm",),
    "post_norm": ("ffn_norm",),
    "mlp_out_norm": ("post_ffw_norm",),
    "q_norm": ("attn_q_norm",),
    "k_norm": ("attn_k_norm",),
    "output": ("attn_output",),
    "sinks": ("attn_sinks.weight",),
    "down": ("ffn_down",),
    "router": ("ffn_gate_inp",),
    "expert_gate_up": ("ffn_gate_exps", "ffn_up_exps"),
    "expert_down": ("ffn_down_exps",),
    "shared_gate_up": ("ffn_gate_shexp", "ffn_up_shexp"),
    "shared_down": ("ffn_down_shexp",),
    "shared_gate": ("ffn_gate_inp_shexp",),
}

_LATENT_PARTS = {
    "q_norm": ("attn_q_a_norm",),
    "q_up": ("attn_q_b",),
    "k_norm": ("attn_kv_a_norm",),
    "kv_up": ("attn_kv_b",),
    "correction": ("exp_probs_b.bias",),
}


def architecture_of(file: GgufFile) -> Architecture:
    """Return the architecture. Raises `UnsupportedModel` for no model or an unknown one."""
    metadata, path = file.metadata, file.path
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(f"{path}: general.type is {kind!r}: the file is no whole model")
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise UnsupportedModel(f"{path}: general.architecture is missing")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(
            f"{path}: general.architecture {name!r} is not supported (supported: {known})"
        )
    return ARCHITECTURES[name]


def read_config(file: GgufFile) -> dict[str, Any]:
    """Return the keys of a `config.json`, except tokens. Raises `UnsupportedModel` for an unknown
    key of the architecture, or a wrong value."""
    architecture = architecture_of(file)
    metadata = Metadata(file, str(file.metadata["general.architecture"]))
    heads = metadata.size("attention.head_count")
    hidden = metadata.size("embedding_length")
    head_dim = metadata.size("attention.key_length", hidden // heads)
    if not architecture.latent:
        metadata.only("attention.value_length", head_dim)
    keys: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "dtype": _dtype(file),
        "vocab_size": _embedding(file).shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.size("context_length"),
        "tie_word_embeddings": f"{HEAD}.weight" not in file.tensors,
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
    }
    rotated = metadata.get("rope.dimension_count", SIZE, head_dim)
    if rotated != head_dim:
        # A little more: a product with head_dim must not be less than `rotated`.
        keys["partial_rotary_factor"] = math.nextafter(rotated / head_dim, 1.0)
    scaling = _rope_scaling(metadata, keys["max_position_embeddings"])
    if scaling:
        keys["rope_scaling"] = scaling
    layer_norm = architecture.layer_norm_key
    kind = "layer_norm_epsilon" if layer_norm else "layer_norm_rms_epsilon"
    keys[layer_norm or "rms_norm_eps"] = metadata.number(f"attention.{kind}")
    architecture.add_keys(metadata, keys)
    metadata.finish()
    return {architecture.keys.get(key, key): value for key, value in keys.items()}


def adapted(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Adapt a model's spec to the file's names and order of rows."""
    architecture = architecture_of(file)
    rope, norm = spec.rope, spec.norm
    if architecture.neighbours:
        rope = replace(rope, neighbours=True)
    if architecture.shifted_norms:
        norm = replace(norm, offset=0.0)
    return replace(spec, names=_names(file, architecture), rope=rope, norm=norm)


def _names(file: GgufFile, architecture: Architecture) -> WeightNames:
    """Name the tensors; parts that the first layer joins are joined in all layers."""

    def joined(one: str, *several: str) -> tuple[str, ...]:
        return several if f"blk.0.{several[0]}.weight" in file.tensors else (one,)

    parts = {
        **_PARTS,
        "qkv": joined("attn_qkv", "attn_q", "attn_k", "attn_v"),
        "gate_up": joined("ffn_up", "ffn_gate", "ffn_up"),
        **architecture.parts,
    }
    if architecture.latent:
        queries = joined("attn_q", "attn_q_a")
        parts |= _LATENT_PARTS | {"qkv": (*queries, "attn_kv_a_mqa")}
        if "blk.0.attn_k_b.weight" in file.tensors:
            parts |= {"k_up": ("attn_k_b",), "v_up": ("attn_v_b",)}
    if "blk.0.attn_norm_2.weight" in file.tensors:
        # Falcon's later form: the second norm is the one before attention.
        parts |= {"input_norm": ("attn_norm_2",), "post_norm": ("attn_norm",)}
    factors = tuple(name for name in (_FREQUENCIES, _LONG, _SHORT) if name in file.tensors)
    return WeightNames(
        EMBEDDING,
        "blk.{}.",
        parts,
        "output_norm",
        HEAD,
        buffers=factors,
        positions="position_embd",
        stacks="apart",
    )


def _embedding(file: GgufFile) -> Tensor:
    name = f"{EMBEDDING}.weight"
    if name not in file.tensors:
        raise UnsupportedModel(f"{file.path}: weights are missing: {name}")
    return file.tensors[name]


def _dtype(file: GgufFile) -> str:
    """Return the dtype to compute in, the file's for activations: float32, or bfloat16 if the
    embedding is stored so."""
    return "bfloat16" if _embedding(file).type.name == "BF16" else "float32"


def _rope_scaling(metadata: Metadata, context: int) -> dict[str, Any] | None:
    """Return `rope_scaling`; None if positions are not scaled."""
    factors, long, short = map(metadata.floats, (_FREQUENCIES, _LONG, _SHORT))
    # The first files of Phi-3 state no type.
    default = "linear" if long is None and short is None else "longrope"
    kind = metadata.get("rope.scaling.type", TEXT, default)
    # The old name of the factor.
    factor = metadata.number("rope.scale_linear", 0.0)
    factor = metadata.number("rope.scaling.factor", factor)
    original = metadata.get("rope.scaling.original_context_length", COUNT, 0) or None
    if kind == "longrope":
        if long is None or short is None or factors is not None:
            metadata.refuse("rope.scaling.type", f"it takes {_LONG} and {_SHORT}, and no other")
        if factor not in (0.0, 1.0):
            metadata.refuse("rope.scaling.factor", "longrope has factors of its own")
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original or context,
        }
    if long is not None or short is not None:
        metadata.refuse("rope.scaling.type", f"{_LONG} and {_SHORT} are for longrope")
    if factors is not None:
        # Llama 3.1's angles, already divided: the same as long factors for texts of any length.
        if kind not in ("none", "linear") or factor not in (0.0, 1.0):
            metadata.refuse("rope.scaling.type", "the file has rope_freqs.weight, too")
        parameters = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {"rope_type": "longrope", **parameters, "original_max_position_embeddings": context}
    if kind == "linear":
        return None if factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(metadata, factor, original)
    if kind != "none":
        metadata.refuse("rope.scaling.type", "only none, linear, yarn and longrope are supported")
    return None


def _yarn(metadata: Metadata, factor: float, original: int | None) -> dict[str, Any]:
    metadata.only("rope.scaling.attn_factor", 1.0)
    metadata.only("rope.scaling.yarn_ext_factor", 1.0)
    # The converter writes a config.json's value, but llama.cpp computes this value instead.
    grown = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    stated = metadata.get("rope.scaling.yarn_attn_factor", NUMBER, grown)
    if not math.isclose(stated, grown, rel_tol=1e-6):
        metadata.refuse("rope.scaling.yarn_attn_factor", f"only {grown:.8g} is supported")
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    betas = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
    return found | {name: metadata.get(key, NOT_NEGATIVE, None) for name, key in betas.items()}


# Source -------------------------------------------------------------------------------------------
#
# Offer a GGUF file as a model: its one file replaces several files of a folder.


_SAMPLING = "general.sampling."
"""Beginning of the keys of recommended sampling settings (read by llama.cpp since 2025-11)."""

MIXES = {14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M"}
"""Names of mixed files by `general.file_type`."""


class About(msgspec.Struct, frozen=True):
    """Facts in a model's files. `numbers`: number of weights, None if unknown. `stored`: the type
    of most weights, or the name of a mix of types. `stated`: short values by their keys, as in a
    GGUF file; most keys begin with `architecture`."""

    format: str
    architecture: str
    numbers: int | None
    stored: str
    stated: dict[str, bool | int | float | str]


class GgufSource(msgspec.Struct, frozen=True, dict=True, weakref=True):
    """GGUF file with the methods of `checkpoint.source.FolderSource`."""

    file: GgufFile

    @classmethod
    def read(cls, path: Path) -> GgufSource:
        """Return the source of a file, shared with the other users of the file. Raises
        `UnsupportedModel` for a damaged file, or for no known kind of model."""
        file = GgufFile.read(path)
        known = _READ.get(id(file))
        if known is None:
            architecture_of(file)
            known = _READ[id(file)] = cls(file)
        return known

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def config_file(self) -> Path:
        return self.file.path

    def config(self) -> dict[str, Any]:
        check_types(self.file)
        return read_config(self.file) | {"bos_token_id": self._facts.bos}

    def eos_token_id(self) -> list[int]:
        return list(self._facts.ends)

    def generation_config(self) -> tuple[str, dict[str, Any]]:
        names = {about.gguf: name for name, about in PARAMETERS.items() if about.gguf}
        found = {
            key.removeprefix(_SAMPLING): as_written(value)
            for key, value in self.file.metadata.items()
            if key.startswith(_SAMPLING)
        }
        return self.path.name, {names.get(key, key): value for key, value in found.items()}

    def quantisation(self, config: ConfigReader) -> Quantisation | None:
        return quantisation_of(self.file)

    def adapted(self, spec: ModelSpec) -> ModelSpec:
        return adapted(self.file, spec)

    def tokenizer_json(self) -> str:
        """Return `tokenizer.json`, and log the vocabulary's remarks: a server calls this once."""
        for remark in self._facts.remarks:
            log.warning("%s: %s", self.path, remark)
        found = self._cache.json()
        if found is None:
            found = tokenizer_json(self._vocabulary)
            self._cache.keep(self._facts, found)
        return found

    def tokenizer_config(self) -> dict[str, Any]:
        return self._facts.config

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

    def release_texts(self) -> None:
        self.__dict__.pop("_vocabulary", None)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.read(self.file)

    @cached_property
    def _cache(self) -> TokenizerCache:
        return TokenizerCache(self.file.metadata)

    @cached_property
    def _facts(self) -> TokenizerFacts:
        return self._cache.facts() or TokenizerFacts.of(self._vocabulary)


_READ: WeakValueDictionary[int, GgufSource] = WeakValueDictionary()
"""Sources by the `id` of their files, which live as long."""
