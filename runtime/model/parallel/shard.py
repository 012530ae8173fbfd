"""Divide each layer among ranks by the model's spec (Megatron-LM, arXiv:1909.08053).

Products that make heads or an MLP's inner numbers are divided by their outputs, each rank making
its own. Products behind them are divided by their inputs, so that the ranks' results are summed:

    attention: qkv, q_up, kv_up by heads; output by the inputs that heads are
    MLP, experts: gate_up by inner numbers; down by them as inputs
    head: by rows of the vocabulary, if it has logits of tokens

Every rank has the rest: embeddings, norms, routers, gates of shared experts, a head of labels.
Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from rootlace.runtime.model.families.spec import ModelSpec

SUMMED = ("output", "down")
"""Parts of a layer that are divided by their inputs, by the last word of their names."""


class Shard(msgspec.Struct, frozen=True):
    """Share of rank `rank` of `count` in a model with this `spec`. The sizes must be divisible
    (`why_not`)."""

    spec: ModelSpec
    rank: int
    count: int

    @property
    def local_spec(self) -> ModelSpec:
        """Spec of this rank's computation: layers with its heads and its inner numbers."""
        spec, count, experts = self.spec, self.count, self.spec.experts
        if experts is not None:
            experts = replace(
                experts,
                inner_size=experts.inner_size // count,
                shared_size=experts.shared_size // count,
            )
        attention = replace(
            spec.attention,
            num_heads=spec.attention.num_heads // count,
            num_kv_heads=len(self._kv_heads()),
        )
        mlp = replace(spec.mlp, inner_size=spec.mlp.inner_size // count)
        return replace(spec, attention=attention, mlp=mlp, experts=experts)

    @property
    def heads(self) -> range:
        """Query heads of this rank."""
        return self._share(self.spec.attention.num_heads)

    def rows(self, name: str, total: int) -> list[int] | None:
        """Return this rank's rows of a part, by their places in the kernels' order (`row_order`).
        `name`: of `layer_parts`, with `total` rows. None: all."""
        attention, kind = self.spec.attention, name.rpartition(".")[2]
        if kind == "gate_up":
            half = total // 2 if self.spec.mlp.gated else total
            return [start + row for start in range(0, total, half) for row in self._share(half)]
        if kind in ("q_up", "kv_up", "sinks") or (kind == "q_norm" and attention.normed_by_head):
            return [*self._share(total)]
        if kind == "k_norm" and attention.normed_by_head:
            return [*self._keys(0)]
        if kind != "qkv":
            return None
        dim = attention.head_dim
        if attention.latent is None:
            queries = attention.num_heads * dim
            values = queries + attention.num_kv_heads * dim
            return [*self._share(queries), *self._keys(queries), *self._keys(values)]
        if attention.latent.query_rank:
            return None
        return [*self._share(total - dim), *range(total - dim, total)]

    def columns(self, name: str, total: int) -> range | None:
        """Return this rank's inputs of a part with `total` inputs. None: all."""
        return self._share(total) if name.rpartition(".")[2] in SUMMED else None

    def adds_bias(self, name: str) -> bool:
        """Tell whether this rank's outputs of a part have the bias: only rank 0's if outputs are
        summed."""
        return self.rank == 0 or name.rpartition(".")[2] not in SUMMED

    @property
    def vocabulary(self) -> range:
        """Tokens of this rank's logits: as many for each rank, fewer for the last ones."""
        each = -(-self.spec.vocab_size // self.count)
        start, end = (min(rank * each, self.spec.vocab_size) for rank in (self.rank, self.rank + 1))
        return range(start, end)

    def _share(self, total: int) -> range:
        each = total // self.count
        return range(self.rank * each, (self.rank + 1) * each)

    def _kv_heads(self) -> range:
        """Return the key heads of this rank; neighbours share one if heads are fewer than ranks."""
        heads = self.spec.attention.num_kv_heads
        if heads >= self.count:
            return self._share(heads)
        local_spec = self.rank * heads // self.count
        return range(local_spec, local_spec + 1)

    def _keys(self, start: int) -> Iterator[int]:
        """Yield the rows of this rank's heads of keys, or of values, which begin at `start`."""
        dim, heads = self.spec.attention.head_dim, self._kv_heads()
        yield from range(start + heads.start * dim, start + heads.stop * dim)


def why_not(spec: ModelSpec, count: int) -> str | None:
    """Explain why a model cannot be divided among `count` ranks; None if it can."""
    if spec.transformers is not None:
        return (
            f"transformers' modules run {spec.transformers.architecture}, and they are not divided"
        )
    if count > spec.vocab_size:
        return f"there are {spec.vocab_size} tokens for {count} ranks"
    attention, experts = spec.attention, spec.experts
    numbers = {"attention.num_heads": attention.num_heads}
    if experts is None or len(experts.layers) < spec.num_layers:
        numbers["mlp.inner_size"] = spec.mlp.inner_size
    if experts is not None:
        numbers["experts.inner_size"] = experts.inner_size
        numbers["experts.shared_size"] = experts.shared_size
    uneven = next((name for name, value in numbers.items() if value % count), None)
    if uneven is not None:
        return f"{uneven} {numbers[uneven]} is not a multiple of {count}"
    kv_heads = attention.num_kv_heads
    if kv_heads % count and count % kv_heads:
        return f"attention.num_kv_heads {kv_heads} is no multiple of {count}, nor divides it"
    return None
