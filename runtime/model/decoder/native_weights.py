"""A model as the native kernels read it, packed layer by layer."""

from __future__ import annotations

import ctypes

import torch

from rootlace.kernels import Dense, Weight
from rootlace.kernels.native import library as native
from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.linear import Arena, PackedLinear
from rootlace.runtime.model.checkpoint.weights import LayerWeights, ModelWeights
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.wire.errors import UnsupportedModel

KINDS = frozenset({"dense"})
"""The kinds of weights that the native kernels multiply by."""


class NativeWeights:
    """The `RlModel` of a checkpoint, and the memory that it points to.

    Products read packed weights. The embedding is read by row and stays as it is: the checkpoint's
    mapped file where that has the type, of which the rows that are used take memory.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        team: Team,
        spec: ModelSpec,
        weights: ModelWeights,
    ) -> None:
        """Each layer is asked for once, in order, so that one which is read from a file then need
        not be in memory beside the packed ones.

        Raises `UnsupportedModel` for weights that are not dense."""
        self._library = library
        self._team = team
        self._arena = Arena()
        self._held: list[object] = []
        bfloat16 = weights.embedding.dtype == torch.bfloat16
        self._type = native.BFLOAT16 if bfloat16 else native.FLOAT32
        head = self._linear(weights.head)
        weights.release()
        attention, count = spec.attention, spec.num_layers
        layers = (native.Layer * count)()
        for to, layer, window in zip(layers, weights.layers, attention.windows, strict=True):
            self._fill(to, layer, window)
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
            embedding=self._address(weights.embedding),
            final_norm=self._address(weights.final_norm),
            layers=layers,
            head=head,
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
