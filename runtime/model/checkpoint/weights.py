"""Define the decoder's weights, and the checkpoint's tensors of each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import msgspec
import numpy as np
from msgspec.structs import replace

from rootlace.runtime.model.families.spec import Attention, Experts, Latent, ModelSpec

if TYPE_CHECKING:
    import torch

    from rootlace.kernels.weights import Dense, Weight

PRODUCTS = ("qkv", "q_up", "kv_up", "output", "gate_up", "down", "router", "shared_gate")
"""Fields of `LayerWeights` that are multiplied by, besides those of experts."""

EXACT = ("kv_up", "router", "shared_gate")
"""Products that `--quantize` leaves as they are: the router and the gate decide how much each
expert counts; no quantised product uses `kv_up`."""

DENSE = ("kv_up", "k_up", "v_up")
"""Products that become dense when read: steps read their numbers, and no product uses their codes.
"""


Item = TypeVar("Item")


class ExpertWeights(msgspec.Struct, frozen=True):
    """MLP of one expert. Shapes: H hidden, I inner."""

    gate_up: Weight  # [2I, H]
    down: Weight  # [H, I]


class LayerWeights(msgspec.Struct, frozen=True, weakref=True):
    """Weights of one decoder layer. Shapes: H hidden, Q = Nq * D, K = Nk * D, I inner, E experts.
    In a layer with experts, `gate_up` and `down` are the MLP that all tokens share."""

    qkv: Weight  # [Q + 2K, H]
    output: Weight  # [H, Q]
    gate_up: Weight | None = None  # [2I, H]; of an MLP without a gate [I, H]
    down: Weight | None = None  # [H, I]
    q_up: Weight | None = None  # of latent attention, [Nq * a head's query, query rank]
    kv_up: Dense | None = None  # [Nq * (plain + values), rank]
    router: Weight | None = None  # [E, H]
    shared_gate: Weight | None = None  # [1, H]
    experts: Sequence[ExpertWeights] = ()
    input_norm: torch.Tensor | None = None  # [H], before attention
    attention_out_norm: torch.Tensor | None = None  # [H], after it
    post_norm: torch.Tensor | None = None  # [H], before the MLP
    mlp_out_norm: torch.Tensor | None = None  # [H], after it
    q_norm: torch.Tensor | None = None  # [D], or of all heads [Q]
    k_norm: torch.Tensor | None = None  # [D], or of all heads [K]
    sinks: torch.Tensor | None = None  # [Nq]
    correction: torch.Tensor | None = None  # float32 [E]
    norm_biases: Mapping[str, torch.Tensor] = msgspec.field(default_factory=dict)
    """Biases [H] by the field of their norm."""

    def norm(self, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return weight and bias of the residual stream's norm in a field; None: missing."""
        return getattr(self, name), self.norm_biases.get(name)

    def part(self, name: str) -> Any:
        """Return a weight or a norm, by its name among `layer_parts`."""
        if not name.startswith("experts."):
            return getattr(self, name)
        _, expert, field = name.split(".")
        return getattr(self.experts[int(expert)], field)

    def products(self) -> Iterator[Weight]:
        """Iterate over the weights of this layer's products."""
        found = (getattr(self, name) for name in PRODUCTS)
        yield from (weight for weight in found if weight is not None)
        for expert in self.experts:
            yield from (expert.gate_up, expert.down)

    def with_products(self, change: Callable[[Weight], Weight]) -> LayerWeights:
        """Return the layer with changed weights, except those in `EXACT`."""
        changed: dict[str, Any] = {
            name: change(weight)
            for name in PRODUCTS
            if name not in EXACT and (weight := getattr(self, name)) is not None
        }

        def expert(index: int) -> ExpertWeights:
            one = self.experts[index]
            return ExpertWeights(change(one.gate_up), change(one.down))

        return replace(self, **changed, experts=OnDemand(len(self.experts), expert))


class OnDemand(Sequence[Item]):
    """Sequence of layers or experts that reads an item at each access."""

    def __init__(self, count: int, read: Callable[[int], Item]) -> None:
        self._count = count
        self._read = read

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._read(index % self._count)


def _nothing() -> None:
    pass


class Blocks(NamedTuple):
    """Tensor of a GGUF file: its type, and its bytes, uint8 [rows, blocks, bytes of a block]."""

    type: str
    data: np.ndarray


class ModelWeights(msgspec.Struct, frozen=True):
    """Weights of a whole decoder. Shapes: V tokens of the vocabulary, H hidden."""

    embedding: torch.Tensor  # [V, H]
    layers: Sequence[LayerWeights]
    final_norm: torch.Tensor  # [H]
    head: Weight | None  # [V or labels, H]; of the embedding itself where they are tied
    final_norm_bias: torch.Tensor | None = None  # [H]
    positions: torch.Tensor | None = None  # [learned positions, H]
    embedding_stored: str | None = None
    """Tensor of a checkpoint that `embedding` maps; None: `embedding` has memory of its own."""
    embedding_blocks: Blocks | None = None
    """Embedding as a GGUF file stores it. A reader that looks rows up in the blocks can drop
    `embedding`."""
    head_is_embedding: bool = False
    """Whether the head has the codes of the embedding."""
    release: Callable[[], None] = _nothing
    """Function that releases the memory of a mapped head, once the caller has a copy."""

    def resident(self) -> ModelWeights:
        """Return the weights with all layers in memory, rather than read at each access."""
        layers = tuple(replace(layer, experts=tuple(layer.experts)) for layer in self.layers)
        return replace(self, layers=layers)

    def products(self) -> Iterator[Weight]:
        """Iterate over the weights of all products."""
        for layer in self.layers:
            yield from layer.products()
        if self.head is not None:
            yield self.head


class Part(msgspec.Struct, frozen=True):
    """Checkpoint's form of a field of `LayerWeights`: `modules` of `rows` rows each, joined.
    `columns` None: a vector. `transposed`: stored with the columns as rows. `count`: number of
    experts or heads stacked in a module. `bare`: tensors have the module's name, without ".weight".
    `heads`: rows of the matrix that stores a vector."""

    modules: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int | None
    bias: bool
    transposed: bool = False
    count: int | None = None
    bare: bool = False
    heads: int | None = None

    @property
    def numbers(self) -> int:
        """Number of weights of the product."""
        return sum(self.rows) * (self.columns or 0) * (self.count or 1)

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the weight's tensors."""
        width = () if self.columns is None else (self.columns,)
        turn, ending = -1 if self.transposed else 1, "" if self.bare else ".weight"
        if self.heads is not None:
            return {f"{self.modules[0]}{ending}": (self.heads, self.rows[0] // self.heads)}
        return {
            module + ending: self.shape_in_stack((rows, *width)[::turn])
            for module, rows in zip(self.modules, self.rows, strict=True)
        }

    def biases(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the bias's tensors; none without a bias."""
        if not self.bias:
            return {}
        ending = "_bias" if self.bare else ".bias"
        return {
            module + ending: self.shape_in_stack((rows,))
            for module, rows in zip(self.modules, self.rows, strict=True)
        }

    def shape_in_stack(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a stored tensor: a stack of `count` such shapes if `count` is set."""
        return shape if self.count is None else (self.count, *shape)


def layer_parts(spec: ModelSpec, index: int) -> dict[str, Part]:
    """Return the parts of a layer by the fields of `LayerWeights`. Expert i has `experts.i.gate_up`
    and `experts.i.down`, a stack `experts.gate_up` and `experts.down`."""
    hidden, inner, attention = spec.hidden_size, spec.mlp.inner_size, spec.attention
    q = attention.num_heads * attention.head_dim
    kv = attention.num_kv_heads * attention.head_dim
    up = (inner, inner) if spec.mlp.gated else (inner,)
    prefix, transposed = spec.names.layer.format(index), spec.names.transposed

    def part(
        name: str,
        rows: tuple[int, ...],
        columns: int | None = None,
        bias: bool = False,
        expert: int = 0,
    ) -> Part:
        modules = tuple(prefix + module.format(expert) for module in spec.names.parts[name])
        rows = rows if len(modules) > 1 else (sum(rows),)
        return Part(modules, rows, columns, bias, transposed and columns is not None)

    parts = {}
    if attention.latent is None:
        parts["qkv"] = part("qkv", (q, kv, kv), hidden, attention.qkv_bias)
        parts["output"] = part("output", (hidden,), q, attention.output_bias)
    else:
        halved = "k_up" in spec.names.parts
        parts |= _latent_parts(attention, attention.latent, hidden, halved, part)
    if spec.experts is not None and index in spec.experts.layers:
        parts |= _expert_parts(spec.experts, spec.names.stacks, hidden, part)
    else:
        parts["gate_up"] = part("gate_up", up, hidden, spec.mlp.bias)
        parts["down"] = part("down", (hidden,), inner, spec.mlp.bias)
    norms = {
        "before": ("input_norm", "post_norm"),
        "after": ("attention_out_norm", "mlp_out_norm"),
        "around": ("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm"),
        "once": ("input_norm",),
    }
    parts |= {
        name: part(name, (hidden,), bias=spec.norm.bias) for name in norms[spec.norm.placement]
    }
    if attention.head_norm:
        parts |= {name: part(name, (attention.head_dim,)) for name in ("q_norm", "k_norm")}
    if attention.sinks:
        parts["sinks"] = replace(part("sinks", (attention.num_heads,)), bare=True)
    if attention.joint_norm:
        parts |= {"q_norm": part("q_norm", (q,)), "k_norm": part("k_norm", (kv,))}
    if attention.own_norms:
        parts["q_norm"] = _norms_of_heads(spec, prefix, "q_norm", attention.num_heads)
        parts["k_norm"] = _norms_of_heads(spec, prefix, "k_norm", attention.num_kv_heads)
    return parts


def _norms_of_heads(spec: ModelSpec, prefix: str, name: str, heads: int) -> Part:
    (module,) = spec.names.parts[name]
    dim = spec.attention.head_dim
    if "{}" not in module:
        return Part((prefix + module,), (heads * dim,), None, bias=False, heads=heads)
    modules = tuple(prefix + module.format(head) for head in range(heads))
    return Part(modules, (dim,) * heads, None, bias=False)


def _latent_parts(
    attention: Attention, latent: Latent, hidden: int, halved: bool, part: Callable[..., Part]
) -> Iterator[tuple[str, Part]]:
    """Yield the parts of latent attention. `halved`: with `k_up` and `v_up` (`WeightNames`)."""
    heads, rank, bias = attention.num_heads, latent.rank, attention.qkv_bias
    queries = heads * (latent.plain + attention.head_dim - rank)
    if latent.query_rank:
        yield "q_norm", part("q_norm", (latent.query_rank,))
        yield "q_up", part("q_up", (queries,), latent.query_rank)
    yield "qkv", part("qkv", (latent.query_rank or queries, attention.head_dim), hidden, bias)
    yield "k_norm", part("k_norm", (rank,))
    if halved:
        yield "k_up", replace(part("k_up", (rank,), latent.plain), count=heads)
        yield "v_up", replace(part("v_up", (latent.values,), rank), count=heads)
    else:
        yield "kv_up", part("kv_up", (heads * (latent.plain + latent.values),), rank)
    yield "output", part("output", (hidden,), heads * latent.values, attention.output_bias)


def _expert_parts(
    experts: Experts, stacks: str, hidden: int, part: Callable[..., Part]
) -> Iterator[tuple[str, Part]]:
    """Yield the parts of a mixture of experts, which replaces the MLP."""
    inner, shared, bias = experts.inner_size, experts.shared_size, experts.bias
    yield "router", part("router", (experts.count,), hidden, experts.router_bias)
    if experts.correction:
        yield "correction", replace(part("correction", (experts.count,)), bare=True)
    for expert in range(1 if stacks else experts.count):
        gate_up = part("expert_gate_up", (inner, inner), hidden, bias, expert)
        down = part("expert_down", (hidden,), inner, bias, expert)
        prefix = f"experts.{expert}."
        if stacks:
            prefix, bare = "experts.", stacks == "alternating"
            gate_up, down = (
                replace(one, count=experts.count, bare=bare, transposed=bare)
                for one in (gate_up, down)
            )
        yield prefix + "gate_up", gate_up
        yield prefix + "down", down
    if shared:
        yield "gate_up", part("shared_gate_up", (shared, shared), hidden)
        yield "down", part("shared_down", (hidden,), shared)
    if experts.shared_gate:
        yield "shared_gate", part("shared_gate", (1,), hidden)


def row_order(spec: ModelSpec, name: str) -> list[int] | None:
    """Return a part's rows in the kernels' order, by their places in the file; None: as stored.

    Kernels rotate number i of a head with number i + D / 2. Checkpoints that rotate only the first
    r numbers pair i with i + r / 2; checkpoints that rotate neighbours, 2i with 2i + 1. Queries and
    keys are then reordered alike, which changes no score. Rows joined group by group
    (`WeightNames.qkv_by_group`) and alternating rows (`WeightNames.stacks`) are sorted, too.
    """
    if name == "experts.gate_up" and spec.names.stacks == "alternating":
        count = 2 * spec.experts.inner_size if spec.experts else 0
        return [*range(0, count, 2), *range(1, count, 2)]
    if spec.attention.latent is not None:
        return _latent_order(spec, spec.attention.latent, name)
    order = _turned(spec, name)
    if name != "qkv" or not spec.names.qkv_by_group:
        return order
    rows = _ungrouped(spec)
    return rows if order is None else [rows[row] for row in order]


def _latent_order(spec: ModelSpec, latent: Latent, name: str) -> list[int] | None:
    """Return the `row_order` of latent attention, where the last numbers are rotated."""
    attention = spec.attention
    rotated = attention.head_dim - latent.rank
    if not spec.rope.neighbours or name not in ("qkv", "q_up"):
        return None

    def turned(start: int, plain: int) -> list[int]:
        """Return the rows of `plain` numbers and the rotated ones behind them."""
        end = start + plain + rotated
        first = start + plain
        return [*range(start, first), *range(first, end, 2), *range(first + 1, end, 2)]

    width = latent.plain + rotated
    queries = [
        row for head in range(attention.num_heads) for row in turned(head * width, latent.plain)
    ]
    if name == "q_up":
        return queries
    if latent.query_rank:
        queries = [*range(latent.query_rank)]
    return [*queries, *turned(len(queries), latent.rank)]


def _ungrouped(spec: ModelSpec) -> list[int]:
    """Return the rows of all queries, keys and values, by their places in groups."""
    heads, kv_heads, dim = (
        spec.attention.num_heads,
        spec.attention.num_kv_heads,
        spec.attention.head_dim,
    )
    queries = heads // kv_heads
    groups = [group * (queries + 2) for group in range(kv_heads)]
    found = [first + head for first in groups for head in range(queries)]
    found += [first + queries for first in groups] + [first + queries + 1 for first in groups]
    return [head * dim + row for head in found for row in range(dim)]


def _turned(spec: ModelSpec, name: str) -> list[int] | None:
    """Return the `row_order` of parts that are rotated."""
    attention, rope = spec.attention, spec.rope
    plain = rope.rotated is None and not rope.neighbours
    if plain or name not in ("qkv", "q_norm", "k_norm"):
        return None
    dim = attention.head_dim
    rotated = rope.rotated or dim
    middle = (rotated + dim) // 2
    pairs = (range(0, rotated, 2), range(1, rotated, 2))
    if not rope.neighbours:
        pairs = (range(rotated // 2), range(rotated // 2, rotated))
    head = [*pairs[0], *range(rotated, middle), *pairs[1], *range(middle, dim)]
    heads = {"q_norm": attention.num_heads, "k_norm": attention.num_kv_heads}
    turned = heads.get(name, sum(heads.values()))
    if name != "qkv" and not attention.normed_by_head:
        turned = 1
    rows = [start * dim + row for start in range(turned) for row in head]
    values = attention.num_kv_heads * dim if name == "qkv" else 0
    return [*rows, *range(len(rows), len(rows) + values)]
