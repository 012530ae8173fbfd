"""A model as the native kernels read it: weights packed, one after the other freed."""

from __future__ import annotations

import ctypes

import torch

from rootlace.kernels.native import library as native
from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.linear import Arena, PackedLinear
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import Progress
from rootlace.runtime.model.checkpoint.weights import LayerWeights, ModelWeights


class NativeWeights:
    """The `RlModel` of a checkpoint, and the memory that it points to.

    Products read packed weights; the embedding is read by row and stays as it is (tied to the head,
    it is there twice).
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        team: Team,
        config: ModelConfig,
        weights: list[ModelWeights],
        progress: Progress | None = None,
    ) -> None:
        """`weights` holds one model's and is emptied, so that each layer is freed once it is
        packed if nobody else has it. `progress(what, fraction)` is called per layer."""
        self._library = library
        self._team = team
        self._arena = Arena()
        self._held: list[object] = []
        model = weights.pop()
        self._type = native.BFLOAT16 if model.head.dtype == torch.bfloat16 else native.FLOAT32
        embedding, final_norm, head = model.embedding, model.final_norm, model.head
        waiting = list(reversed(model.layers))
        del model
        layers = (native.Layer * config.num_layers)()
        for index, window in enumerate(config.windows):
            self._fill(layers[index], waiting.pop(), window)
            if progress is not None:
                done = (index + 1) / config.num_layers
                progress(f"packing layer {index + 1} of {config.num_layers}", done)
        self._held.append(layers)
        self.model = native.Model(
            dtype=self._type,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            num_layers=config.num_layers,
            vocab=config.vocab_size,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            embedding=self._address(embedding),
            final_norm=self._address(final_norm),
            layers=layers,
            head=self._linear(head, None),
        )
        """Cache and rotations are still to be set."""

    def _fill(self, to: native.Layer, layer: LayerWeights, window: int | None) -> None:
        to.input_norm = self._address(layer.input_norm)
        to.q_norm = self._address(layer.q_norm)
        to.k_norm = self._address(layer.k_norm)
        to.post_norm = self._address(layer.post_norm)
        to.qkv = self._linear(layer.qkv, layer.qkv_bias)
        to.output = self._linear(layer.output, layer.output_bias)
        to.gate_up = self._linear(layer.gate_up, layer.gate_up_bias, gated=True)
        to.down = self._linear(layer.down, layer.down_bias)
        to.window = window or 0

    def _linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False
    ) -> native.Linear:
        packed = PackedLinear(
            self._library, self._team, weight, bias, gated=gated, arena=self._arena
        )
        self._held.append(packed)
        return packed.structure

    def _address(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()
