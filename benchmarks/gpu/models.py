"""Llama shapes with random weights, made on the device: no checkpoint is needed to time a step."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rootlace.kernels import Dense
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.weights import LayerWeights, ModelWeights, layer_parts
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.families.spec import ModelSpec

CONTEXT = 32768
_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": CONTEXT,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    # Llama 3.2 1B and Llama 3.1 8B.
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "smoke": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class RandomModel:
    """A shape's configuration and weights, shared by everything that is compared on it."""

    name: str
    config: ModelConfig
    weights: ModelWeights
    device: torch.device

    @property
    def raw(self) -> dict[str, Any]:
        """The model's `config.json`."""
        return _COMMON | SHAPES[self.name]

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def runner(
        self,
        num_blocks: int,
        *,
        graphs: bool = True,
        max_running: int = 256,
        kv_dtype: Any = "auto",
        block_size: int = 16,
    ) -> ModelRunner:
        """A runner on these weights. `num_blocks` of KV memory."""
        return ModelRunner.load(
            ExecutorConfig(
                model=str(self.config.path),
                dtype="float32" if self.dtype == torch.float32 else "bfloat16",
                device=str(self.device),
                kv_dtype=kv_dtype,
                cuda_graphs=graphs,
            ),
            CacheConfig(block_size=block_size, num_blocks=num_blocks),
            max_step_tokens=8192,
            max_running=max_running,
            weights_of=lambda *_: self.weights,
        )

    def step_bytes(self, rows: int, context: int, kv_itemsize: int = 2) -> int:
        """The fewest bytes a decode step moves: every weight once (of an untied embedding only the
        rows' own), the keys and values of all contexts once, those of the new tokens."""
        spec, weights = self.config.spec, self.weights
        total = weights.num_bytes()
        if not spec.tied_embeddings:
            total -= weights.embedding.nbytes
            total += rows * spec.hidden_size * weights.embedding.element_size()
        attention = spec.attention
        token = 2 * spec.num_layers * attention.num_kv_heads * attention.head_dim * kv_itemsize
        return total + rows * (context + 1) * token


@contextmanager
def random_model(
    name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Iterator[RandomModel]:
    """The shape `name`. Its folder (a `config.json`) is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="rootlace-shape-") as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(_COMMON | SHAPES[name]))
        config = ModelConfig.read(path)
        with torch.inference_mode(False), torch.no_grad():
            weights = _random_weights(config.spec, device, dtype, seed)
        yield RandomModel(name, config, weights, device)


def _random_weights(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int
) -> ModelWeights:
    """Normal, of a spread that keeps activations at unit scale; norms are one."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, spread: float | None = None) -> torch.Tensor:
        weight = torch.empty((rows, columns), dtype=dtype, device=device)
        return weight.normal_(0.0, spread or columns**-0.5, generator=generator)

    def layer(index: int) -> LayerWeights:
        found: dict[str, Any] = {}
        for name, part in layer_parts(spec, index).items():
            rows = sum(part.rows)
            if part.columns is None:
                found[name] = torch.ones(rows, dtype=dtype, device=device)
            else:
                found[name] = Dense(normal(rows, part.columns))
        return LayerWeights(**found)

    layers = tuple(layer(index) for index in range(spec.num_layers))
    embedding = normal(spec.vocab_size, spec.hidden_size, 0.05)
    head = embedding
    if not spec.tied_embeddings:
        head = normal(spec.vocab_size, spec.hidden_size, 0.05)
    final_norm = torch.ones(spec.hidden_size, dtype=dtype, device=device)
    return ModelWeights(embedding, layers, final_norm, Dense(head))
