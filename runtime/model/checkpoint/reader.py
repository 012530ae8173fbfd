"""Reads weights from a checkpoint: joined, of the wanted type, where they are wanted."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from rootlace.kernels import Dense, Quantised, Weight
from rootlace.kernels.native.memory import mapped
from rootlace.kernels.reference.linear import AT_ONCE, dequantise
from rootlace.kernels.weights import rows_of, stacked
from rootlace.runtime.model.checkpoint.expected import FLOATS, Shape
from rootlace.runtime.model.checkpoint.files import Checkpoint
from rootlace.runtime.model.checkpoint.quantised.reading import alike, read_weight
from rootlace.runtime.model.checkpoint.quantised.storage import Storage
from rootlace.runtime.model.checkpoint.weights import (
    DENSE,
    ExpertWeights,
    LayerWeights,
    OnDemand,
    Part,
    layer_of,
    layer_parts,
    row_order,
)
from rootlace.runtime.model.families.spec import ModelSpec

OWN_MAPPING = 4 << 20


class Reader:
    """Places weights: converts type and device, joins what is fused."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        storage: Storage,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._checkpoint = checkpoint
        self._storage = storage
        self._dtype = dtype
        self._device = device

    def mapped(self, name: str) -> torch.Tensor:
        """The named weight, as the file has it if that will do."""
        return self._checkpoint.tensor(name) if self.is_mapped(name) else self.read([name])

    def is_mapped(self, name: str) -> bool:
        """Whether the file has the named weight as it is wanted."""
        found = self._checkpoint.tensor(name)
        return found.dtype == self._dtype and found.device == self._device

    def norm(self, names: Iterable[str], offset: float) -> torch.Tensor:
        """The weights of a norm, with what is added to them. On a CPU the sum stays float32, as
        transformers multiplies by it: bfloat16 would lose most digits of a small weight."""
        if not offset:
            return self.read(names)
        summed = self.read(names, dtype=torch.float32).add_(offset)
        return summed if self._device.type == "cpu" else summed.to(self._dtype)

    def read(
        self,
        names: Iterable[str],
        *,
        transposed: bool = False,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The named weights, stacked along their rows, in memory of their own; `dtype` None: that
        of all weights."""
        parts = {name: self._checkpoint.tensor(name) for name in names}
        if transposed:
            parts = {name: part.t() for name, part in parts.items()}
        rows = sum(len(part) for part in parts.values())
        shape = (rows, *next(iter(parts.values())).shape[1:])
        whole = _empty(shape, dtype or self._dtype, self._device)
        start = 0
        for name, part in parts.items():
            whole[start : start + len(part)].copy_(part)
            start += len(part)
            self._checkpoint.release(name)
        return whole

    def layer(self, spec: ModelSpec, index: int) -> LayerWeights:
        found: dict[str, Any] = {}
        norm_biases = {}
        parts = layer_parts(spec, index)
        of_experts = {name: parts.pop(name) for name in [*parts] if name.startswith("experts.")}
        if "k_up" in parts:
            found["kv_up"] = self._both_up(parts.pop("k_up"), parts.pop("v_up"))
        for name, part in parts.items():
            order = row_order(spec, name)
            if part.columns is not None:
                product = self._product(part, part.columns, order)
                if name in DENSE and isinstance(product, Quantised):
                    product = Dense(self.dense(product), product.bias)
                found[name] = product
                continue
            if name == "correction":
                found[name] = self.read(part.weights(), dtype=torch.float32)
                continue
            found[name] = _ordered(self.norm(part.weights(), spec.norm.offset), order)
            if part.bias:
                norm_biases[name] = self.read(part.biases())
        layer = layer_of(found, norm_biases)
        if spec.experts is None or not of_experts:
            return layer
        read = functools.partial(self._expert, spec, of_experts)
        return replace(layer, experts=OnDemand(spec.experts.count, read))

    def _product(self, part: Part, columns: int, order: list[int] | None) -> Weight:
        """A part's modules, joined."""
        if all(self._storage.layout(module) is None for module in part.modules):
            bias = _ordered(self.read(part.biases()), order) if part.bias else None
            matrix = self.read(part.weights(), transposed=part.transposed).view(-1, columns)
            return Dense(_ordered(matrix, order), bias)
        found, start = [], 0
        for module, rows in zip(part.modules, part.rows, strict=True):
            weight = self.module(module, rows, columns, biased=part.bias)
            if order is not None:  # which never takes a row to another module
                own = torch.tensor(order[start : start + rows], device=self._device) - start
                weight = rows_of(weight, own)
            found.append(weight)
            start += rows
        return stacked(alike(found))

    def _expert(self, spec: ModelSpec, parts: Mapping[str, Part], index: int) -> ExpertWeights:
        """One expert; `parts` are those of all experts, or of stacks of them."""

        def product(which: str) -> Weight:
            stack, own = f"experts.{which}", f"experts.{index}.{which}"
            name = stack if stack in parts else own
            part, order = parts[name], row_order(spec, name)
            assert part.columns is not None
            if part.count is None:
                return self._product(part, part.columns, order)
            return self._of_stack(part, part.columns, part.count, order, index)

        return ExpertWeights(product("gate_up"), product("down"))

    def _of_stack(
        self, part: Part, columns: int, count: int, order: list[int] | None, index: int
    ) -> Weight:
        """The weight of one expert, of modules that have a part of each one's. Behind the last
        expert they are let go of."""
        found: list[Dense | Quantised] = []
        biases = [*part.biases()]
        for at, (module, rows) in enumerate(zip(part.modules, part.rows, strict=True)):
            layout = self._storage.layout(module)
            names = {module if part.bare else f"{module}.weight": FLOATS}
            if layout is not None:
                needed = self._storage.needed(module, rows, columns)
                names = {name: what.types for name, what in needed.items()}
            own = {
                name.removeprefix(module): self._checkpoint.tensor(name, types)[index]
                for name, types in names.items()
            }
            bias = self._copied(self._checkpoint.tensor(biases[at])[index]) if biases else None
            if layout is None:
                (matrix,) = own.values()
                matrix = matrix.t() if part.transposed else matrix
                found.append(Dense(self._copied(matrix), bias))
            else:
                weight = read_weight(layout, own, rows, columns)
                found.append(_placed(replace(weight, bias=bias), self._device))
            if index == count - 1:
                for name in names:
                    self._checkpoint.release(name)
        if order is not None:  # of one module
            found = [rows_of(found[0], torch.tensor(order, device=self._device))]
        return stacked(alike(found))

    def _both_up(self, keys: Part, values: Part) -> Dense:
        """`kv_up` of latent attention, head by head of these (`WeightNames`)."""
        found = []
        for head in range(keys.count or 0):
            k, v = (
                self.dense(self._of_stack(part, part.columns or 0, part.count or 0, None, head))
                for part in (keys, values)
            )
            found += [k.t(), v]
        return Dense(torch.cat(found))

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return _empty(tuple(tensor.shape), self._dtype, self._device).copy_(tensor)

    def module(self, module: str, rows: int, columns: int, *, biased: bool) -> Dense | Quantised:
        """A module's weight [rows, columns] as it is stored, and its bias."""
        bias = self.read([f"{module}.bias"]) if biased else None
        layout = self._storage.layout(module)
        if layout is None:
            return Dense(self.read([f"{module}.weight"]), bias)
        names = self._storage.possible(module, rows, columns)
        names |= self._storage.needed(module, rows, columns)
        stored = {
            name.removeprefix(module): self._checkpoint.tensor(name, what.types)
            for name, what in names.items()
        }
        if not biased and ".bias" in stored and bool(stored[".bias"].any()):
            raise self._storage.refusal(
                f"{module}.bias is not zero, and the architecture does not have it"
            )
        try:
            weight = read_weight(layout, stored, rows, columns)
        except ValueError as error:
            raise self._storage.refusal(f"{module}{error}") from error
        for name in names:
            self._checkpoint.release(name)
        return _placed(replace(weight, bias=bias), self._device)

    def dense(self, weight: Weight) -> torch.Tensor:
        """The numbers that a weight stands for, some at a time: that takes little memory."""
        if isinstance(weight, Dense):
            return weight.matrix
        assert isinstance(weight, Quantised)
        rows, columns = weight.shape
        whole = _empty((rows, columns), self._dtype, self._device)
        for some in torch.arange(rows, device=self._device).split(max(1, AT_ONCE // columns)):
            part = rows_of(weight, some)
            assert isinstance(part, Quantised)
            whole[some[0] : some[-1] + 1].copy_(dequantise(part))
        return whole


def _empty(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a weight. A large one is a mapping of its own, which goes back to the system at
    once when the weight is dropped: the allocator would keep much of it."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < OWN_MAPPING:
        return torch.empty(shape, dtype=dtype, device=device)
    return mapped(size).view(dtype).view(shape)


def _ordered(rows: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    if order is None:
        return rows
    ordered = _empty(tuple(rows.shape), rows.dtype, rows.device)
    return torch.index_select(rows, 0, torch.tensor(order, device=rows.device), out=ordered)


def _placed(weight: Quantised, device: torch.device) -> Quantised:
    parts = {field.name: getattr(weight, field.name) for field in fields(weight)}
    there = {n: part.to(device) for n, part in parts.items() if isinstance(part, torch.Tensor)}
    return replace(weight, **there)  # type: ignore[arg-type]
