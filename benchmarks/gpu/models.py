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
from rootlace.runtime.doctor.work import Elements, Row, step_work
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


_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"),
)
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_FIELDS, values, strict=True))
    for name, values in {
        # Llama 3.2 1B and Llama 3.1 8B.
        "1B": (2048, 8192, 16, 32, 8, 64, 128256, True),
        "8B": (4096, 14336, 32, 32, 8, 128, 128256, False),
        "smoke": (64, 128, 2, 4, 2, 16, 512, True),
    }.items()
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
        block_size: int = 16,
    ) -> ModelRunner:
        """A runner on these weights. `num_blocks` of KV memory."""
        return ModelRunner.load(
            ExecutorConfig(
                model=str(self.config.path),
                dtype="float32" if self.dtype == torch.float32 else "bfloat16",
                device=str(self.device),
                cuda_graphs=graphs,
            ),
            CacheConfig(block_size=block_size, num_blocks=num_blocks),
            max_step_tokens=8192,
            max_running=max_running,
            weights_of=lambda *_: self.weights,
        )

    def runner_for(self, rows: int, tokens: int, block_size: int = 16) -> ModelRunner:
        """A runner with room for `rows` requests of `tokens` each, and a little more."""
        blocks = (rows + 2) * (-(-tokens // block_size) + 1)
        return self.runner(blocks, max_running=rows, block_size=block_size)

    def step_bytes(self, rows: int, context: int) -> int:
        """The fewest bytes a decode step moves: every weight once (of an untied embedding none),
        the keys and values of all contexts once, those of the new tokens."""
        size = self.dtype.itemsize
        step = [Row(new=1, context=context + 1)] * rows
        return int(step_work(self.config.spec, step, Elements(size, size)).read)


@contextmanager
def random_model(
    name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Iterator[RandomModel]:
    """The shape `name`. Its folder (a `config.json`) is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="rootlace-shape-") as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(_COMMON | SHAPES[name]))
        config = ModelConfig.read(path)
        with torch.inference_mode(False), torch.no_grad():
            weights = _random_weights(config.spec, device, dtype)
        yield RandomModel(name, config, weights, device)


def _random_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> ModelWeights:
    """Normal, of a spread that keeps activations at unit scale; norms are one."""
    generator = torch.Generator(device).manual_seed(0)

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
