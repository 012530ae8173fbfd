"""Read weights from a checkpoint: join the modules of a part and convert the numbers. Layers are
read one by one, so that weights which are packed are never in memory twice."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from msgspec.structs import asdict, replace

from rootlace.kernels.arrays import as_tensor
from rootlace.kernels.native.machine import mapped
from rootlace.kernels.reference.layers import AT_ONCE, INT4, INT8, ROWS, dequantise, quantise
from rootlace.kernels.weights import (
    Dense,
    Quantised,
    Scheme,
    Weight,
    columns_of,
    parts_of,
    rows_of,
    rows_times,
    stacked,
)
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.files import (
    Checkpoint,
    OpenedCheckpoint,
    Progress,
    open_checkpoint,
)
from rootlace.runtime.model.checkpoint.quantised.layouts import FLOATS, Shape, Storage
from rootlace.runtime.model.checkpoint.quantised.reading import alike, read_weight
from rootlace.runtime.model.checkpoint.weights import (
    DENSE,
    Blocks,
    ExpertWeights,
    LayerWeights,
    ModelWeights,
    OnDemand,
    Part,
    layer_parts,
    row_order,
)
from rootlace.runtime.model.families.spec import Attention, ModelSpec
from rootlace.runtime.model.gguf.file import Ggml
from rootlace.runtime.model.parallel.shard import Shard
from rootlace.wire.errors import InvalidRequest

# Reader -------------------------------------------------------------------------------------------
#
# Read weights from a checkpoint: joined, in the wanted dtype, on the wanted device.


OWN_MAPPING = 4 << 20


class Selection(msgspec.Struct, frozen=True):
    """Selection of a part: `rows` by their places in the file, and `columns` (None: all, in the
    file's order). `bias`: whether the bias is wanted."""

    rows: Sequence[int] | None
    columns: range | None
    bias: bool

    def of(self, start: int, count: int) -> list[int] | None:
        """Return the selected rows of the module whose `count` rows begin at `start`, relative to
        the module. None: all rows, in the file's order."""
        if self.rows is None:
            return None
        here = range(start, start + count)
        return [row - start for row in self.rows if row in here]


class Reader(msgspec.Struct, frozen=True):
    """Reader of weights: converts dtype, moves to the device, joins modules. With a `shard` a layer
    has this rank's share alone."""

    checkpoint: Checkpoint
    storage: Storage
    dtype: torch.dtype
    device: torch.device
    shard: Shard | None = None

    def mapped(self, name: str) -> torch.Tensor:
        """Return the named weight: the mapped file where dtype and device fit, else a copy."""
        return self.checkpoint.tensor(name) if self.is_mapped(name) else self.read([name])

    def is_mapped(self, name: str) -> bool:
        """Tell whether the file has the named weight in the wanted dtype, on the wanted device."""
        found = self.checkpoint.tensor(name)
        return found.dtype == self.dtype and found.device == self.device

    def norm(self, names: Iterable[str], offset: float) -> torch.Tensor:
        """Read the weights of a norm and add `offset`. On a CPU the sum stays float32, as
        transformers multiplies: bfloat16 would lose most digits of a small weight."""
        if not offset:
            return self.read(names)
        summed = self.read(names, dtype=torch.float32).add_(offset)
        return summed if self.device.type == "cpu" else summed.to(self.dtype)

    def read(
        self,
        names: Iterable[str],
        *,
        transposed: bool = False,
        dtype: torch.dtype | None = None,
        share: Selection | None = None,
    ) -> torch.Tensor:
        """Read the named weights, stacked along their rows, into memory of their own. `dtype` None:
        the reader's. `share`: the selection to read; the rest of the file stays unread."""
        parts = {name: self.checkpoint.tensor(name) for name in names}
        if transposed:
            parts = {name: part.t() for name, part in parts.items()}
        if share is not None:
            parts = _taken(parts, share)
        rows = sum(len(part) for part in parts.values())
        shape = (rows, *next(iter(parts.values())).shape[1:])
        whole = _empty(shape, dtype or self.dtype, self.device)
        start = 0
        for name, part in parts.items():
            whole[start : start + len(part)].copy_(part)
            start += len(part)
            self.checkpoint.release(name)
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
        layer = LayerWeights(**found, norm_biases=norm_biases)
        if spec.experts is None or not of_experts:
            return layer
        read = functools.partial(self._expert, spec, of_experts)
        return replace(layer, experts=OnDemand(spec.experts.count, read))

    def _wanted(self, spec: ModelSpec, name: str, part: Part) -> Selection:
        """Select the rows, columns and bias of a layer's part that this rank has."""
        order = row_order(spec, name)
        if self.shard is None:
            return Selection(order, None, bias=True)
        rows = self.shard.rows(name, sum(part.rows))
        columns = None
        if part.columns is not None:
            columns = self.shard.columns(name, part.columns)
        if order is not None and rows is not None:
            order = [order[row] for row in rows]
        return Selection(rows if order is None else order, columns, self.shard.adds_bias(name))

    def _product(self, part: Part, columns: int, wanted: Selection) -> Weight:
        """Read a part's modules, joined."""
        if all(self.storage.layout(module) is None for module in part.modules):
            return self._dense_product(part, columns, wanted)
        found, start = [], 0
        for module, rows in zip(part.modules, part.rows, strict=True):
            weight = self.module(module, rows, columns, biased=part.bias)
            found.append(self._share(weight, module, wanted, start, rows))
            start += rows
        return stacked(alike(found))

    def _dense_product(self, part: Part, columns: int, wanted: Selection) -> Dense:
        biased = part.bias and wanted.bias
        if self.shard is None:
            bias = _ordered(self.read(part.biases()), wanted.rows) if biased else None
            matrix = self.read(part.weights(), transposed=part.transposed).view(-1, columns)
            return Dense(_ordered(matrix, wanted.rows), bias)
        matrix = self.read(part.weights(), transposed=part.transposed, share=wanted)
        width = columns if wanted.columns is None else len(wanted.columns)
        rows = replace(wanted, columns=None)
        bias = self.read(part.biases(), share=rows) if biased else None
        return Dense(matrix.view(-1, width), bias)

    def _share(
        self, weight: Dense | Quantised, module: str, wanted: Selection, start: int, rows: int
    ) -> Dense | Quantised:
        """Cut the selection out of a module's weight, whose rows begin at `start` of its part."""
        if wanted.rows is not None:  # neighbours are in the same module
            places = wanted.of(start, rows)
            weight = rows_of(weight, torch.tensor(places, device=self.device))
        if wanted.columns is not None:
            try:
                weight = columns_of(weight, wanted.columns)
            except ValueError as error:
                raise self.storage.refusal(
                    f"{module} cannot be divided among the ranks of tensor_parallel: {error}"
                ) from error
        return weight if wanted.bias else replace(weight, bias=None)

    def _expert(self, spec: ModelSpec, parts: Mapping[str, Part], index: int) -> ExpertWeights:
        """Read one expert. `parts`: the parts of all experts, or of stacks of experts."""

        def product(which: str) -> Weight:
            stack, single = f"experts.{which}", f"experts.{index}.{which}"
            name = stack if stack in parts else single
            part, wanted = parts[name], self._wanted(spec, name, parts[name])
            assert part.columns is not None
            if part.count is None:
                return self._product(part, part.columns, wanted)
            return self._of_stack(part, part.columns, part.count, wanted, index)

        return ExpertWeights(product("gate_up"), product("down"))

    def _of_stack(
        self, part: Part, columns: int, count: int, wanted: Selection, index: int
    ) -> Weight:
        """Read the weight of expert `index` from modules that stack all experts' matrices. Behind
        the last expert, release the stacks' memory."""
        found: list[Dense | Quantised] = []
        biases, start = [*part.biases()], 0
        for at, (module, rows) in enumerate(zip(part.modules, part.rows, strict=True)):
            layout = self.storage.layout(module)
            names = {module if part.bare else f"{module}.weight": FLOATS}
            if layout is not None:
                needed = self.storage.needed(module, rows, columns)
                names = {name: what.types for name, what in needed.items()}
            parts = {
                name.removeprefix(module): self.checkpoint.tensor(name, types)[index]
                for name, types in names.items()
            }
            bias = self._copied(self.checkpoint.tensor(biases[at])[index]) if biases else None
            if layout is None:
                (matrix,) = parts.values()
                matrix = matrix.t() if part.transposed else matrix
                weight: Dense | Quantised = Dense(self._copied(matrix), bias)
            else:
                read = read_weight(layout, parts, rows, columns)
                weight = _placed(replace(read, bias=bias), self.device)
            found.append(self._share(weight, module, wanted, start, rows))
            start += rows
            if index == count - 1:
                for name in names:
                    self.checkpoint.release(name)
        return stacked(alike(found))

    def _both_up(self, keys: Part, values: Part) -> Dense:
        """Join `kv_up` of latent attention head by head from `k_up` and `v_up` (`WeightNames`)."""
        found, whole = [], Selection(None, None, bias=True)
        for head in range(keys.count or 0) if self.shard is None else self.shard.heads:
            k, v = (
                self.dense(self._of_stack(part, part.columns or 0, part.count or 0, whole, head))
                for part in (keys, values)
            )
            found += [k.t(), v]
        return Dense(torch.cat(found))

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return _empty(tuple(tensor.shape), self.dtype, self.device).copy_(tensor)

    def module(self, module: str, rows: int, columns: int, *, biased: bool) -> Dense | Quantised:
        """Read a module's weight [rows, columns] as stored, and its bias."""
        bias = self.read([f"{module}.bias"]) if biased else None
        layout = self.storage.layout(module)
        if layout is None:
            return Dense(self.read([f"{module}.weight"]), bias)
        names = self.storage.possible(module, rows, columns)
        names |= self.storage.needed(module, rows, columns)
        stored = {
            name.removeprefix(module): self.checkpoint.tensor(name, what.types)
            for name, what in names.items()
        }
        if not biased and ".bias" in stored and bool(stored[".bias"].any()):
            raise self.storage.refusal(
                f"{module}.bias is not zero, and the architecture does not have it"
            )
        try:
            weight = read_weight(layout, stored, rows, columns)
        except ValueError as error:
            raise self.storage.refusal(f"{module}{error}") from error
        for name in names:
            self.checkpoint.release(name)
        return _placed(replace(weight, bias=bias), self.device)

    def dense(self, weight: Weight) -> torch.Tensor:
        """Return the numbers of a weight; dequantises some rows at a time to save memory."""
        if isinstance(weight, Dense):
            return weight.matrix
        assert isinstance(weight, Quantised)
        rows, columns = weight.shape
        whole = _empty((rows, columns), self.dtype, self.device)
        for some in torch.arange(rows, device=self.device).split(max(1, AT_ONCE // columns)):
            part = rows_of(weight, some)
            assert isinstance(part, Quantised)
            whole[some[0] : some[-1] + 1].copy_(dequantise(part))
        return whole


def _empty(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory for a weight. A large weight gets a mapping of its own, which returns to the
    system when the weight is dropped: the allocator would keep much of the memory."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < OWN_MAPPING:
        return torch.empty(shape, dtype=dtype, device=device)
    return as_tensor(mapped(size)).view(dtype).view(shape)


def _taken(parts: Mapping[str, torch.Tensor], wanted: Selection) -> dict[str, torch.Tensor]:
    """Cut the selection out of tensors stacked along their rows. Rows that are not consecutive are
    copied, one tensor at a time."""
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
    parts = asdict(weight).items()
    there = {name: part.to(device) for name, part in parts if isinstance(part, torch.Tensor)}
    return replace(weight, **there)


# Loader -------------------------------------------------------------------------------------------


LoadWeights = Callable[[ModelConfig, torch.dtype, torch.device, Progress | None], ModelWeights]
"""Function that returns a model's weights: `load_weights`, or in measurements a generator."""

log = logging.getLogger(__name__)


def load_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    shard: Shard | None = None,
) -> ModelWeights:
    """Return the weights in `dtype`. A layer is read at each access (see `resident`). With a
    `shard`, layers and head are this rank's share.

    A tensor that the checkpoint has in this dtype, for main memory, is the mapped file itself.
    Quantised weights stay quantised. Raises `UnsupportedModel`, naming the file and the weights
    that are missing, unknown, or of another shape or type. `progress(part, fraction)` is called per
    layer.
    """
    opened = open_checkpoint(config)
    spec, checkpoint, storage = opened.spec, opened.checkpoint, opened.storage
    embedding_module, head_module = opened.embedding, opened.head
    _log(opened)
    reader = Reader(checkpoint, storage, dtype, device, shard)
    if progress is not None:
        progress("embedding", 0.0)
    ends = (spec.vocab_size, spec.hidden_size)
    quantised = blocks = None
    layout, stored = storage.layout(embedding_module), f"{embedding_module}.weight"
    embedding_stored: str | None = None
    if layout is None:
        embedding = reader.mapped(stored)
        if reader.is_mapped(stored):
            embedding_stored = stored
    else:
        # Steps look up dense rows, also where a tied head multiplies by the codes.
        quantised = reader.module(embedding_module, *ends, biased=False)
        embedding = reader.dense(quantised)
        if isinstance(layout, Ggml):
            blocks = Blocks(layout.type, checkpoint.array(stored, frozenset({layout.type})))
    final_norm = reader.norm([f"{spec.names.final_norm}.weight"], spec.norm.offset)
    final_norm_bias = None
    if spec.norm.bias:
        final_norm_bias = reader.read([f"{spec.names.final_norm}.bias"])
    positions = None
    if spec.learned_positions:
        positions = reader.read([f"{spec.names.positions}.weight"])[spec.skipped_positions :]
    head: Dense | Quantised | None
    if spec.labels == 0:
        head = None
    elif head_module == embedding_module:
        head = quantised or Dense(embedding)
    elif storage.layout(head_module) is None:
        head = Dense(reader.mapped(f"{head_module}.weight"))
    else:
        head = reader.module(head_module, spec.head_rows, spec.hidden_size, biased=False)
    if shard is not None and spec.labels is None and head is not None:
        head = _own_head(head, shard.vocabulary)

    def release() -> None:
        # The tensors of a quantised head were released when read.
        if storage.layout(head_module) is None:
            checkpoint.release(f"{head_module}.weight")

    count = spec.num_layers

    def layer(index: int) -> LayerWeights:
        found = reader.layer(spec, index)
        if progress is not None:
            progress(f"layer {index + 1} of {count}", (index + 1) / count)
        return found

    return ModelWeights(
        embedding=embedding,
        layers=OnDemand(count, layer),
        final_norm=final_norm,
        head=head,
        final_norm_bias=final_norm_bias,
        positions=positions,
        embedding_stored=embedding_stored,
        embedding_blocks=blocks,
        head_is_embedding=quantised is not None and head is quantised,
        release=release,
    )


def _own_head(head: Dense | Quantised, rows: range) -> Dense | Quantised:
    """Return the rows of a head that make the logits of the tokens `rows`; a view if the head is
    dense."""
    if isinstance(head, Dense):
        return Dense(head.matrix[rows.start : rows.stop])
    return rows_of(head, torch.arange(rows.start, rows.stop, device=head.values.device))


def _log(opened: OpenedCheckpoint) -> None:
    storage, found = opened.storage, opened.storage.quantisation
    if found is None:
        return
    if all(what.types == FLOATS for what in opened.expected.values()):
        log.warning(
            "%s: quantization_config says %s, but all weights are dense",
            storage.folder,
            found.method,
        )
        return
    log.info("%s: quantised weights (%s)", storage.folder, found.method)
    for remark in found.remarks:
        log.info("%s: %s", storage.folder, remark)


# Rounding -----------------------------------------------------------------------------------------
#
# Round weights to few bits while reading them (`--quantize`), layer by layer.


LEAST_ROW = 2.0**-12
"""Largest magnitude of a row below which its 255th part is too coarse a scale in float16."""


def rounded(weights_of: LoadWeights, codes: Literal["int8", "int4"]) -> LoadWeights:
    """Wrap `weights_of`: round the layers' products to `codes`, and the head to int8, as every
    token's probability depends on the head. A head that scores labels stays. Beside int4 the rows
    that make values are int8: few weights, whose errors attention adds up. Raises `InvalidRequest`
    if weights are quantised already."""

    def layer(found: LayerWeights, spec: ModelSpec) -> LayerWeights:
        if codes == "int8":
            return found.with_products(lambda one: _round(one, INT8))

        def change(one: Weight) -> Weight:
            if one is not found.qkv or not isinstance(one, Dense) or spec.attention.latent:
                return _round(one, INT4)
            rows = torch.arange(one.shape[0], device=one.matrix.device)
            first = (len(rows) + found.output.shape[1]) // 2  # queries and keys, also of a rank
            parts = ((rows[:first], INT4), (rows[first:], INT8))
            return stacked([_round(rows_of(one, some), scheme) for some, scheme in parts])

        return found.with_products(change)

    def load(
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> ModelWeights:
        if config.quantisation is not None:
            raise _already(config.quantisation.method)
        weights = weights_of(config, dtype, device, progress)
        layers, head = weights.layers, weights.head
        if config.spec.labels is None:
            assert head is not None
            head = _round(head, INT8 if codes == "int8" else ROWS)
        return replace(
            weights,
            layers=OnDemand(len(layers), lambda at: layer(layers[at], config.spec)),
            head=head,
        )

    return load


def balanced(weights: ModelWeights, attention: Attention) -> ModelWeights:
    """Return the weights with channels of keys alike in size, for a cache of integers.

    Rounding has one step for a head or group of a key, and the largest channel decides the step.
    Biases of Qwen2.5's keys reach 354 beside a median of 0.7. So each pair of channels (i, i + D/2)
    that a rotation mixes is divided by a power of two s in keys, and multiplied by s in queries.
    Scores stay the same to the bit. With sizes k and q of a pair's keys and queries, s is near
    sqrt(k / q), which minimises the error of a score after the mixing of `int4`. Layers whose keys
    have neither biases nor norms stay: nothing was gained there.
    """
    layers = weights.layers
    return replace(
        weights, layers=OnDemand(len(layers), lambda at: _balance(layers[at], attention))
    )


SPREAD = 3.0
"""Standard deviations of a channel that count for its size."""


def _balance(layer: LayerWeights, attention: Attention) -> LayerWeights:
    dim, outputs = attention.head_dim, layer.qkv.shape[0]
    queries = layer.output.shape[1]  # numbers of all heads, or of a rank's
    keys = (outputs - queries) // 2
    if layer.q_norm is not None and layer.k_norm is not None:
        scale = _pair_scales(layer.q_norm.float(), layer.k_norm.float(), dim)
        q_scale = scale.repeat_interleave(len(layer.q_norm) // scale.numel(), dim=0).flatten()
        return replace(
            layer,
            q_norm=(layer.q_norm.float() * q_scale).to(layer.q_norm.dtype),
            k_norm=(layer.k_norm.float() / scale.flatten()).to(layer.k_norm.dtype),
        )
    if not attention.qkv_bias:
        return layer
    sizes = _sizes(layer)
    scale = _pair_scales(sizes[:queries], sizes[queries : queries + keys], dim)
    factors = torch.ones(outputs, device=sizes.device)
    factors[:queries] = scale.repeat_interleave(queries // keys, dim=0).flatten()
    factors[queries : queries + keys] = 1 / scale.flatten()
    return replace(layer, qkv=rows_times(layer.qkv, factors))


def _sizes(layer: LayerWeights) -> torch.Tensor:
    """Estimate the largest magnitude of each output of `qkv`, float32: its bias, and its deviation
    for inputs of the norm before attention."""
    weight, shift = layer.norm("input_norm")
    found = []
    for part in parts_of(layer.qkv):
        matrix = part.matrix.float() if isinstance(part, Dense) else dequantise(part)
        mean = torch.zeros(len(matrix), device=matrix.device) if part.bias is None else part.bias
        mean = mean if shift is None else mean + matrix @ shift.float()
        spread = (matrix if weight is None else matrix * weight).norm(dim=1)
        found.append(mean.float().abs() + SPREAD * spread)
    return torch.cat(found)


def _pair_scales(q: torch.Tensor, k: torch.Tensor, dim: int) -> torch.Tensor:
    """Return powers of two, float32 [key heads, D], from the sizes of queries and keys: float32
    [numbers of all heads], or [D] for all heads alike."""

    def pairs(sizes: torch.Tensor, heads: int) -> torch.Tensor:
        return sizes.view(heads, -1, 2, dim // 2).square().sum(2).mean(1).sqrt()

    heads = len(k) // dim
    ratio = (pairs(k, heads) / pairs(q, heads)).nan_to_num(1.0, 1.0, 1.0)
    exponents = ratio.where(ratio > 0, 1.0).log2().div(2).round().clamp(-MOST, MOST)
    return exponents.exp2().repeat(1, 2)


MOST = 12
"""Largest exponent of a factor: weights of 16 bits keep their precision."""


def _round(weight: Weight, scheme: Scheme) -> Weight:
    """Round a weight. One float32 scale for each output, in int8, is used in two cases: inputs are
    not a multiple of the group, or float16 cannot hold a row's scale."""
    if not isinstance(weight, Dense):
        raise _already(weight.kind)
    fits = weight.shape[1] % (scheme.group or 1) == 0
    if fits and scheme == INT8:
        low, high = weight.matrix.aminmax(dim=1)
        largest = torch.maximum(-low, high)
        fits = not bool(((largest > 0) & (largest < LEAST_ROW)).any())
    return quantise(weight.matrix, scheme if fits else ROWS, weight.bias)


def _already(how: str) -> InvalidRequest:
    return InvalidRequest(f"quantize: the model's weights are quantised already ({how})")
