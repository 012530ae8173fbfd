"""Weights from safetensors files, single or sharded, fused as they are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.weights import LayerWeights, ModelWeights
from rootlace.wire.errors import UnsupportedModel

Progress = Callable[[str, float], None]
LoadWeights = Callable[[ModelConfig, torch.dtype, torch.device, Progress | None], ModelWeights]
"""What gets the weights: `load_weights`, or what makes them up."""
Shape = tuple[int, ...]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
KV_SCALES = {
    "k": ("self_attn.k_proj.k_scale", "self_attn.k_scale", "self_attn.attn.k_scale"),
    "v": ("self_attn.v_proj.v_scale", "self_attn.v_scale", "self_attn.attn.v_scale"),
}
"""What checkpoints call a layer's scales of an fp8 KV cache."""
KV_SCALE = "self_attn.kv_scale"
"""The name in old ones: one scale for keys and values."""
_DTYPES = {"F32", "F16", "BF16", "F64"}


def load_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> ModelWeights:
    """Read every weight once, memory-mapped, straight into its (fused) place in `dtype`.

    Strict: raises `UnsupportedModel` naming the file and the weights that are missing, are not
    part of the architecture, or have another shape or type. `progress(what, fraction)` is called
    per layer.
    """
    with Checkpoint(config.path) as checkpoint:
        checkpoint.expect(expected_shapes(config), _ignored(config))
        report = progress or _silent
        reader = _Reader(checkpoint, config, dtype, device)
        report("embedding", 0.0)
        embedding = reader.read("model.embed_tokens.weight")
        layers = []
        for index in range(config.num_layers):
            layers.append(reader.layer(index))
            report(f"layer {index + 1} of {config.num_layers}", (index + 1) / config.num_layers)
        return ModelWeights(
            embedding=embedding,
            layers=tuple(layers),
            final_norm=reader.read("model.norm.weight"),
            head=embedding if config.tied_embeddings else reader.read("lm_head.weight"),
        )


def checkpoint_dtype(config: ModelConfig) -> torch.dtype:
    """The type the checkpoint's weights are stored in (that of the embedding)."""
    if config.checkpoint_dtype is not None:
        return config.checkpoint_dtype
    with Checkpoint(config.path) as checkpoint:
        return checkpoint.tensor("model.embed_tokens.weight").dtype


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is a scale of the KV cache."""
    return name.endswith((*KV_SCALES["k"], *KV_SCALES["v"], KV_SCALE))


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every weight of the architecture, by its name in the checkpoint."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if config.qkv_bias:
            layer |= {
                "self_attn.q_proj.bias": (q,),
                "self_attn.k_proj.bias": (kv,),
                "self_attn.v_proj.bias": (kv,),
            }
        if config.output_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            layer["self_attn.q_norm.weight"] = (config.head_dim,)
            layer["self_attn.k_norm.weight"] = (config.head_dim,)
        if config.mlp_bias:
            layer |= {
                "mlp.gate_proj.bias": (inner,),
                "mlp.up_proj.bias": (inner,),
                "mlp.down_proj.bias": (hidden,),
            }
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


class Checkpoint:
    """The safetensors files of a model folder, opened (memory-mapped) while in the `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}

    def __enter__(self) -> Checkpoint:
        try:
            for name in self._file_names():
                self._open(name)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def expect(self, shapes: dict[str, Shape], ignored: Callable[[str], bool]) -> None:
        """Check names, shapes and types against the architecture's."""
        missing = sorted(shapes.keys() - self._file_of.keys())
        if missing:
            raise UnsupportedModel(f"{self._folder}: weights are missing: {_some(missing)}")
        extra = sorted(name for name in self._file_of.keys() - shapes.keys() if not ignored(name))
        if extra:
            raise UnsupportedModel(
                f"{self._folder}: weights that the architecture does not have: {_some(extra)}"
            )
        for name, shape in shapes.items():
            view = self._files[self._file_of[name]].get_slice(name)
            found = tuple(view.get_shape())
            where = f"{self._folder / self._file_of[name]}: {name}"
            if found != shape:
                raise UnsupportedModel(f"{where} has shape {list(found)}, expected {list(shape)}")
            if view.get_dtype() not in _DTYPES:
                raise UnsupportedModel(f"{where} has type {view.get_dtype()}, not a float type")

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether a folder has weights at all."""
        return (folder / SINGLE).exists() or (folder / INDEX).exists()

    def names(self) -> Collection[str]:
        """Every stored tensor."""
        return self._file_of.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """The stored tensor, backed by the mapped file (valid inside the `with` block)."""
        if name not in self._file_of:
            raise UnsupportedModel(f"{self._folder}: weights are missing: {name}")
        return self._files[self._file_of[name]].get_tensor(name)

    def _file_names(self) -> list[str]:
        if (self._folder / SINGLE).exists():
            return [SINGLE]
        index = self._folder / INDEX
        if not index.exists():
            raise UnsupportedModel(f"{self._folder}: neither {SINGLE} nor {INDEX} is there")
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UnsupportedModel(f"{index}: not a weight index: {error!r}") from error
        for name in names:
            # The index is data: it may not lead out of the folder.
            if not isinstance(name, str) or Path(name).name != name:
                raise UnsupportedModel(f"{index}: weight_map: bad file name {name!r}")
        return sorted(set(names))

    def _open(self, name: str) -> None:
        file = self._folder / name
        try:
            handle = self._stack.enter_context(safe_open(file, framework="pt"))
        except FileNotFoundError:
            raise UnsupportedModel(f"{file}: the file is missing") from None
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{file}: {error}") from error
        self._files[name] = handle
        for weight in handle.keys():  # noqa: SIM118  (a handle is not iterable)
            self._file_of[weight] = name


class _Reader:
    """Places weights: converts type and device, joins what is fused."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._device = device

    def read(self, *names: str) -> torch.Tensor:
        """The named weights below each other, in memory of their own."""
        parts = [self._checkpoint.tensor(name) for name in names]
        rows = sum(len(part) for part in parts)
        whole = torch.empty((rows, *parts[0].shape[1:]), dtype=self._dtype, device=self._device)
        start = 0
        for part in parts:
            whole[start : start + len(part)].copy_(part)
            start += len(part)
        return whole

    def layer(self, index: int) -> LayerWeights:
        config = self._config

        def read(*names: str) -> torch.Tensor:
            return self.read(*(f"model.layers.{index}.{name}" for name in names))

        def each(part: str, names: Iterable[str], kind: str) -> list[str]:
            return [f"{part}.{name}_proj.{kind}" for name in names]

        return LayerWeights(
            input_norm=read("input_layernorm.weight"),
            qkv=read(*each("self_attn", "qkv", "weight")),
            qkv_bias=read(*each("self_attn", "qkv", "bias")) if config.qkv_bias else None,
            q_norm=read("self_attn.q_norm.weight") if config.qk_norm else None,
            k_norm=read("self_attn.k_norm.weight") if config.qk_norm else None,
            output=read("self_attn.o_proj.weight"),
            output_bias=read("self_attn.o_proj.bias") if config.output_bias else None,
            post_norm=read("post_attention_layernorm.weight"),
            gate_up=read(*each("mlp", ("gate", "up"), "weight")),
            gate_up_bias=read(*each("mlp", ("gate", "up"), "bias")) if config.mlp_bias else None,
            down=read("mlp.down_proj.weight"),
            down_bias=read("mlp.down_proj.bias") if config.mlp_bias else None,
        )


def _ignored(config: ModelConfig) -> Callable[[str], bool]:
    """Names that say nothing about weights: what old checkpoints carry, and scales of a cache."""

    def ignored(name: str) -> bool:
        if name == "lm_head.weight":
            return config.tied_embeddings
        return name.endswith(".rotary_emb.inv_freq") or is_kv_scale(name)

    return ignored


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _silent(what: str, fraction: float) -> None:
    pass
