"""Llama shapes with random weights, made on the device: timing a step needs no checkpoint."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks.gpu.paged import BLOCK_SIZE
from benchmarks.random_models import CONFIGS
from benchmarks.random_weights import random_weights
from rootlace.kernels.arrays import numpy_dtype
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.doctor.ceilings import Elements, Row, step_work
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.sizes import rounded_bytes
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv_pool import bytes_per_number, storage_dtype

Bits = Literal["none", "int8", "int4"]


@dataclass(frozen=True)
class RandomModel:
    """A shape's configuration and weights, shared by all compared runners."""

    name: str
    config: ModelConfig
    weights: ModelWeights
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def runner(
        self, rows: int, tokens: int, *, graphs: bool = True, bits: Bits = "none"
    ) -> ModelRunner:
        """Make a runner on these weights, with room for `rows` requests of `tokens` each; `bits` of
        weights and cache."""
        blocks = (rows + 2) * (-(-tokens // BLOCK_SIZE) + 1)
        return ModelRunner.load(
            ExecutorConfig(
                model=str(self.config.path),
                dtype="float32" if self.dtype == torch.float32 else "bfloat16",
                device=str(self.device),
                cuda_graphs=graphs,
                quantize=bits,
                kv_dtype="auto" if bits == "none" else bits,
            ),
            CacheConfig(block_size=BLOCK_SIZE, num_blocks=blocks),
            max_step_tokens=8192,
            max_running=rows,
            weights_of=lambda *_: self.weights,
        )

    def step_flops(self, new: int, context: int) -> float:
        """Return FLOPs of a step that computes the last `new` of a request's `context` tokens."""
        step = step_work(self.config.spec, [Row(new, context)], Elements(0, 0))
        return step.products + step.attention

    def step_bytes(self, rows: int, context: int, bits: Bits = "none") -> int:
        """Return the least bytes of a decode step: every weight once (without an untied embedding),
        the keys and values of all contexts once, those of the new tokens."""
        spec, size = self.config.spec, self.dtype.itemsize
        step = [Row(new=1, context=context + 1)] * rows
        if bits == "none":
            return int(step_work(spec, step, Elements(size, size)).read)
        # Beside a rounded head, the embedding stays unrounded, and a few of its rows are read.
        weights = rounded_bytes(spec, size, bits) - self.weights.embedding.nbytes
        number = bytes_per_number(spec.attention, storage_dtype(bits, numpy_dtype(self.dtype)))
        return weights + int(step_work(spec, step, Elements(0, number)).read)


@contextmanager
def random_model(
    name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Iterator[RandomModel]:
    """Make the shape `name`; its folder (a `config.json`) is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="rootlace-shape-") as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(CONFIGS[name]))
        config = ModelConfig.read(path)
        with torch.inference_mode(False):
            weights = random_weights(config.spec, device, dtype)
        yield RandomModel(name, config, weights, device)
