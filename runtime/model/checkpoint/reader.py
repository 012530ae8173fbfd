"""Reads weights from a checkpoint: joined, of the wanted type, where they are wanted."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from rootlace.kernels import Dense, Quantised, Weight
from rootlace.kernels.native.machine import mapped
from rootlace.kernels.reference.layers import AT_ONCE, dequantise
from rootlace.kernels.weights import columns_of, rows_of, stacked
from rootlace.runtime.model.checkpoint.files import Checkpoint
from rootlace.runtime.model.checkpoint.quantised.layouts import FLOATS, Shape
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
from rootlace.runtime.model.parallel.shard import Shard

OWN_MAPPING = 4 << 20


@dataclass(frozen=True)
class Wanted:
    """What is wanted of a part: its `rows`, by their places in the file, and its `columns` (None:
    all, as they are), and its `bias`."""

    rows: Sequence[int] | None
    columns: range | None
    bias: bool

    def of(self, start: int, count: int) -> list[int] | None:
        """The rows of the module whose `count` rows begin at `start`, by their places in it. None:
        all, as they are."""
        if self.rows is None:
            return None
        own = range(start, start + count)
        return [row - start for row in self.rows if row in own]


class Reader:
    """Places weights: converts type and device, joins what is fused."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        storage: Storage,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        """`shard`: layers have what this rank has of them."""
        self._shard = shard
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
        share: Wanted | None = None,
    ) -> torch.Tensor:
        """The named weights, stacked along their rows, in memory of their own; `dtype` None: that
        of all weights. `share`: what is wanted of them, of which alone the file is read."""
        parts = {name: self._checkpoint.tensor(name) for name in names}
        if transposed:
            parts = {name: part.t() for name, part in parts.items()}
        if share is not None:
            parts = _taken(parts, share)
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
            wanted = self._wanted(spec, name, part)
            if part.columns is not None:
                product = self._product(part, part.columns, wanted)
                if name in DENSE and isinstance(product, Quantised):
                    product = Dense(self.dense(product), product.bias)
                found[name] = product
                continue
            if name == "correction":
                found[name] = self.read(part.weights(), dtype=torch.float32)
                continue
            norm = self.norm(part.weights(), spec.norm.offset).flatten()
            found[name] = _ordered(norm, wanted.rows)
            if part.bias:
                norm_biases[name] = self.read(part.biases())
        layer = layer_of(found, norm_biases)
        if spec.experts is None or not of_experts:
            return layer
        read = functools.partial(self._expert, spec, of_experts)
        return replace(layer, experts=OnDemand(spec.experts.count, read))

    def _wanted(self, spec: ModelSpec, name: str, part: Part) -> Wanted:
        """Of a part of a layer, of which a rank has a share."""
        order = row_order(spec, name)
        if self._shard is None:
            return Wanted(order, None, bias=True)
        rows = self._shard.rows(name, sum(part.rows))
        columns = None
        if part.columns is not None:
            columns = self._shard.columns(name, part.columns)
        if order is not None and rows is not None:
            order = [order[row] for row in rows]
        return Wanted(rows if order is None else order, columns, self._shard.adds_bias(name))

    def _product(self, part: Part, columns: int, wanted: Wanted) -> Weight:
        """A part's modules, joined."""
        if all(self._storage.layout(module) is None for module in part.modules):
            return self._dense_product(part, columns, wanted)
        found, start = [], 0
        for module, rows in zip(part.modules, part.rows, strict=True):
            weight = self.module(module, rows, columns, biased=part.bias)
            found.append(self._share(weight, module, wanted, start, rows))
            start += rows
        return stacked(alike(found))

    def _dense_product(self, part: Part, columns: int, wanted: Wanted) -> Dense:
        biased = part.bias and wanted.bias
        if self._shard is None:
            bias = _ordered(self.read(part.biases()), wanted.rows) if biased else None
            matrix = self.read(part.weights(), transposed=part.transposed).view(-1, columns)
            return Dense(_ordered(matrix, wanted.rows), bias)
        matrix = self.read(part.weights(), transposed=part.transposed, share=wanted)
        width = columns if wanted.columns is None else len(wanted.columns)
        rows = replace(wanted, columns=None)
        bias = self.read(part.biases(), share=rows) if biased else None
        return Dense(matrix.view(-1, width), bias)

    def _share(
        self, weight: Dense | Quantised, module: str, wanted: Wanted, start: int, rows: int
    ) -> Dense | Quantised:
        """What is wanted of a module's weight, whose rows begin at `start` of its part."""
        if wanted.rows is not None:  # none of which is in another module than its neighbours
            own = wanted.of(start, rows)
            weight = rows_of(weight, torch.tensor(own, device=self._device))
        if wanted.columns is not None:
            try:
                weight = columns_of(weight, wanted.columns)
            except ValueError as error:
                raise self._storage.refusal(
                    f"{module} cannot be divided among the ranks of tensor_parallel: {error}"
                ) from error
        return weight if wanted.bias else replace(weight, bias=None)

    def _expert(self, spec: ModelSpec, parts: Mapping[str, Part], index: int) -> ExpertWeights:
        """One expert; `parts` are those of all experts, or of stacks of them."""

        def product(which: str) -> Weight:
            stack, own = f"experts.{which}", f"experts.{index}.{which}"
            name = stack if stack in parts else own
            part, wanted = parts[name], self._wanted(spec, name, parts[name])
            assert part.columns is not None
            if part.count is None:
                return self._product(part, part.columns, wanted)
            return self._of_stack(part, part.columns, part.count, wanted, index)

        return ExpertWeights(product("gate_up"), product("down"))

    def _of_stack(self, part: Part, columns: int, count: int, wanted: Wanted, index: int) -> Weight:
        """The weight of one expert, of modules that have a part of each one's. Behind the last
        expert they are let go of."""
        found: list[Dense | Quantised] = []
        biases, start = [*part.biases()], 0
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
                weight: Dense | Quantised = Dense(self._copied(matrix), bias)
            else:
                read = read_weight(layout, own, rows, columns)
                weight = _placed(replace(read, bias=bias), self._device)
            found.append(self._share(weight, module, wanted, start, rows))
            start += rows
            if index == count - 1:
                for name in names:
                    self._checkpoint.release(name)
        return stacked(alike(found))

    def _both_up(self, keys: Part, values: Part) -> Dense:
        """`kv_up` of latent attention, head by head of these (`WeightNames`)."""
        found, whole = [], Wanted(None, None, bias=True)
        for head in range(keys.count or 0) if self._shard is None else self._shard.heads:
            k, v = (
                self.dense(self._of_stack(part, part.columns or 0, part.count or 0, whole, head))
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


def _taken(parts: Mapping[str, torch.Tensor], wanted: Wanted) -> dict[str, torch.Tensor]:
    """What is wanted of tensors that are stacked along their rows, one of which is copied at a time
    where its rows are picked."""
    found, start = {}, 0
    for name, part in parts.items():
        rows, count = wanted.of(start, len(part)), len(part)
        start += count
        if wanted.columns is not None:
            part = part[:, wanted.columns.start : wanted.columns.stop]
        if rows is not None:
            consecutive = rows == [*range(rows[0], rows[0] + len(rows))] if rows else True
            first = rows[0] if rows else 0
            picked = part[first : first + len(rows)]
            part = picked if consecutive else part[torch.tensor(rows)]
        found[name] = part
    return found


def _ordered(rows: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    if order is None:
        return rows
    ordered = _empty((len(order), *rows.shape[1:]), rows.dtype, rows.device)
    return torch.index_select(rows, 0, torch.tensor(order, device=rows.device), out=ordered)


def _placed(weight: Quantised, device: torch.device) -> Quantised:
    parts = {field.name: getattr(weight, field.name) for field in fields(weight)}
    there = {n: part.to(device) for n, part in parts.items() if isinstance(part, torch.Tensor)}
    return replace(weight, **there)  # type: ignore[arg-type]
