"""Decoders: what they get for a step, what they give, and which specs they can compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.model.families import spec as support
from rootlace.runtime.model.families.spec import (
    Attention,
    Experts,
    GatedMlp,
    Latent,
    Norm,
    PlainMlp,
    Rope,
    Support,
    WeightNames,
    any_value,
    kind,
    one_of,
)
from rootlace.runtime.model.sampling.automaton_table import Mask


@dataclass(frozen=True)
class AdaptedRows:
    """The rows of activations that go through one adapter, by its number: of all tokens, and of
    the wanted ones."""

    adapter: int
    tokens: torch.Tensor  # [n] int64
    wanted: torch.Tensor  # [m] int64


Groups = Sequence[tuple[int, torch.Tensor]]
"""The rows (int64) that go through each adapter, by its number."""


@dataclass(frozen=True)
class StepInput:
    """One step on the device. T tokens, M writes (T and the duplicates), N wanted tokens."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    cos: torch.Tensor  # [T, D/2], or [T, D] with those of layers with windows behind them
    sin: torch.Tensor  # the same
    write_slots: torch.Tensor  # [M] int64
    write_tokens: torch.Tensor | None  # [M] int64, None where M = T and in order
    attention: dict[int | None, Any]  # per window: what plan_attention returned
    wanted: torch.Tensor | None  # [N] int64, flat tokens whose hidden state is needed; None: all
    adapted: Sequence[AdaptedRows] = ()


class StepDecoder(Protocol):
    """Weights and how to compute with them; the KV cache is not its own."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, step: StepInput, cache: torch.Tensor) -> torch.Tensor:
        """Run all layers -> final hidden states of the wanted tokens, [N, H]. The step's keys and
        values are written to the cache [layers, 2, B, S, Nk, D]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] -> float32 [N, V], or the scores of labels."""

    def write_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden [N, H] -> out [N, V], in the model's dtype; left as it is by a model that has no
        logits of tokens."""


class Forward(Protocol):
    """A decoder with its KV cache."""

    @property
    def vocab_size(self) -> int: ...

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Copy blocks, then all layers -> hidden states of the wanted tokens [N, H]."""

    def logits(self, hidden: torch.Tensor, masks: Sequence[Mask] = ()) -> torch.Tensor:
        """hidden [N, H] -> float32 [N, V], good until the next call; of a model that scores labels
        [N, labels].

        `masks`: what each row's token is chosen from (None: all), one per row unless it is empty.
        Logits that they exclude may be anything.
        """

    def best(self, hidden: torch.Tensor, masks: Sequence[Mask] = ()) -> np.ndarray | None:
        """hidden [N, H] -> int32 [N]: what `pick_tokens` finds in `logits` at temperature 0. None
        where there is no faster way than that."""


# Support ------------------------------------------------------------------------------------------


BOTH_SUPPORT: Support = {
    **any_value("vocab_size", "hidden_size", "num_layers", "max_context", "tied_embeddings"),
    "norm": kind(Norm),
    "norm.kind": one_of("rms", "layer"),
    "norm.placement": one_of("before", "after", "around", "once"),
    **any_value("norm.eps", "norm.offset", "norm.bias"),
    "attention": kind(Attention),
    **any_value("attention.num_heads", "attention.num_kv_heads"),
    **any_value("attention.soft_cap", "attention.windows"),
    **any_value("attention.qkv_bias", "attention.output_bias"),
    **any_value("attention.head_norm", "attention.joint_norm", "attention.sinks"),
    **any_value("attention.own_norms", "attention.growth"),
    "experts": lambda value: value is None or type(value) is Experts,
    **any_value("experts.layers", "experts.count", "experts.chosen", "experts.inner_size"),
    **any_value("experts.normalised", "experts.shared_size", "experts.shared_gate"),
    **any_value("experts.router_bias", "experts.bias", "experts.clamp", "experts.factor"),
    "experts.scores": one_of("softmax", "sigmoid"),
    **any_value("experts.groups", "experts.chosen_groups", "experts.best_of_group"),
    "experts.correction": support.anything,
    "attention.latent": lambda value: value is None or type(value) is Latent,
    **any_value("attention.latent.rank", "attention.latent.plain", "attention.latent.values"),
    **any_value("attention.latent.query_rank", "attention.latent.eps"),
    "mlp": kind(GatedMlp, PlainMlp),
    "mlp.activation": one_of("silu", "gelu_tanh", "gelu", "relu"),
    **any_value("mlp.inner_size", "mlp.bias"),
    "rope": kind(Rope),
    **any_value("rope.kind", "rope.parameters", "rope.rotated", "rope.neighbours"),
    **any_value("rope.unrotated_layers", "rope.local_theta"),
    "names": kind(WeightNames),
    **any_value("names.embedding", "names.layer", "names.parts", "names.final_norm", "names.head"),
    **any_value("names.qkv_by_group", "names.buffers", "names.others"),
    **any_value("names.transposed", "names.stacks", "names.further_layers", "names.apart"),
    **any_value("embedding_multiplier", "rounded_multiplier", "residual_multiplier"),
    **any_value("logit_multiplier", "logit_soft_cap", "parallel"),
    **any_value("names.positions", "learned_positions", "skipped_positions", "labels"),
}
"""Values that both decoders compute. A new feature begins in the table of its decoder."""
