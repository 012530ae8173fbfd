"""A model as the native kernels read it, packed (and freed) layer by layer."""

from __future__ import annotations

import ctypes

import torch

from rootlace.kernels import Dense, Weight
from rootlace.kernels.native import library as native
from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.linear import Arena, PackedLinear
from rootlace.runtime.model.checkpoint.loader import Progress
from rootlace.runtime.model.checkpoint.weights import LayerWeights, ModelWeights
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.wire.errors import UnsupportedModel


class NativeWeights:
    """The `RlModel` of a checkpoint, and the memory that it points to.

    Products read packed weights; the embedding is read by row and stays as it is (tied to the head,
    it is there twice).
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        team: Team,
        spec: ModelSpec,
        weights: list[ModelWeights],
        progress: Progress | None = None,
    ) -> None:
        """`weights` holds one model's and is emptied, so that each layer is freed once it is
        packed if nobody else has it. `progress(what, fraction)` is called per layer.

        Raises `UnsupportedModel` for weights that are not dense."""
        self._library = library
        self._team = team
        self._arena = Arena()
        self._held: list[object] = []
        model = weights.pop()
        self._type = native.BFLOAT16 if model.embedding.dtype == torch.bfloat16 else native.FLOAT32
        embedding, final_norm, head = model.embedding, model.final_norm, model.head
        waiting = list(reversed(model.layers))
        del model
        attention, count = spec.attention, spec.num_layers
        layers = (native.Layer * count)()
        for index, window in enumerate(attention.windows):
            self._fill(layers[index], waiting.pop(), window)
            if progress is not None:
                progress(f"packing layer {index + 1} of {count}", (index + 1) / count)
        self._held.append(layers)
        self.model = native.Model(
            dtype=self._type,
            hidden=spec.hidden_size,
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            inner=spec.mlp.inner_size,
            num_layers=count,
            vocab=spec.vocab_size,
            eps=spec.norm.eps,
            scale=attention.scale,
            embedding=self._address(embedding),
            final_norm=self._address(final_norm),
            layers=layers,
            head=self._linear(head),
        )
        """Cache and rotations are still to be set."""

    def _fill(self, to: native.Layer, layer: LayerWeights, window: int | None) -> None:
        to.input_norm = self._address(layer.input_norm)
        to.q_norm = self._address(layer.q_norm)
        to.k_norm = self._address(layer.k_norm)
        to.post_norm = self._address(layer.post_norm)
        to.qkv = self._linear(layer.qkv)
        to.output = self._linear(layer.output)
        to.gate_up = self._linear(layer.gate_up, gated=True)
        to.down = self._linear(layer.down)
        to.window = window or 0

    def _linear(self, weight: Weight, gated: bool = False) -> native.Linear:
        if not isinstance(weight, Dense):
            raise UnsupportedModel(f"the native kernels have no products of {weight.kind}")
        packed = PackedLinear(
            self._library, self._team, weight.matrix, weight.bias, gated=gated, arena=self._arena
        )
        self._held.append(packed)
        return packed.structure

    def _address(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._held.append(tensor)
        return tensor.data_ptr()
