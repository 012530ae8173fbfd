"""Define the decoders' interface: a step's input and output, and the supported specs.
`StepInputBuilder` turns a plan's numbers, which are not checked, into the device tensors of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import numpy as np

from rootlace.kernels.interface import AttentionBatch, KernelSet
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.model.automaton_table import Mask
from rootlace.runtime.model.families import spec as support
from rootlace.runtime.model.families.spec import ModelSpec, Support, known

if TYPE_CHECKING:
    import torch

    from rootlace.runtime.model.decoder.rope import RotaryEmbedding


# Decoders -----------------------------------------------------------------------------------------


class AdaptedRows(msgspec.Struct, frozen=True):
    """Rows of activations that go through the adapter of this number: among all tokens, and among
    the wanted tokens."""

    adapter: int
    tokens: torch.Tensor  # [n] int64
    wanted: torch.Tensor  # [m] int64


Groups: TypeAlias = "Sequence[tuple[int, torch.Tensor]]"
"""Rows (int64) that go through each adapter, by the adapter's number."""


class StepInput(msgspec.Struct, frozen=True):
    """Tensors of one step on the device. T tokens, M writes (T and duplicates), N wanted tokens."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    cos: torch.Tensor  # [T, D/2], or [T, D]: windowed layers' rotations behind
    sin: torch.Tensor  # as cos
    write_slots: torch.Tensor  # [M] int64
    write_tokens: torch.Tensor | None  # [M] int64, None where M = T and in order
    attention: dict[int | None, Any]  # by window, from plan_attention
    wanted: torch.Tensor | None  # [N] int64, flat tokens whose hidden state is needed; None: all
    adapted: Sequence[AdaptedRows] = ()


class StepDecoder(Protocol):
    """Decoder with weights; the caller owns the KV cache."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, step: StepInput, cache: torch.Tensor) -> torch.Tensor:
        """Run all layers and return the final hidden states of the wanted tokens, [N, H]. Writes
        the step's keys and values to the cache [layers, 2, B, S, Nk, D]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden [N, H] to logits, float32 [N, V], or to scores of labels."""

    def write_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Write the logits of hidden [N, H] to out [N, V], in the model's dtype. A model without
        logits of tokens leaves `out` unchanged."""


Hidden: TypeAlias = Any
"""Hidden states [N, H] in a decoder's own type, which supports indexing of rows and `len`."""


class Forward(Protocol):
    """Decoder with its KV cache."""

    @property
    def vocab_size(self) -> int: ...

    def run(self, plan: StepPlan) -> Hidden:
        """Copy blocks, run all layers and return the hidden states of the wanted tokens [N, H]."""

    def logits(self, hidden: Hidden, masks: Sequence[Mask] = ()) -> np.ndarray:
        """Map hidden [N, H] to logits, float32 [N, V], valid until the next call; or to labels'
        scores [N, labels].

        `masks`: the allowed tokens of each row (None: all), one mask per row, or no masks at all.
        Logits of excluded tokens are unspecified.
        """

    def vectors(self, hidden: Hidden) -> np.ndarray:
        """Return hidden [N, H] as float32."""

    def best(self, hidden: Hidden, masks: Sequence[Mask] = ()) -> np.ndarray | None:
        """Return the tokens of hidden [N, H], int32 [N], that `pick_tokens` picks from `logits` at
        temperature 0; None if no faster way exists."""


# Support ------------------------------------------------------------------------------------------


BOTH_SUPPORT = known("""
    vocab_size hidden_size num_layers max_context tied_embeddings labels parallel
    embedding_multiplier rounded_multiplier residual_multiplier logit_multiplier logit_soft_cap
    learned_positions skipped_positions

    norm=Norm norm.kind=rms|layer norm.placement=before|after|around|once
    norm.eps norm.offset norm.bias

    attention=Attention attention.num_heads attention.num_kv_heads attention.head_dim
    attention.scale attention.soft_cap attention.windows attention.sinks attention.growth
    attention.qkv_bias attention.output_bias
    attention.head_norm attention.joint_norm attention.own_norms
    attention.latent=Latent attention.latent.rank attention.latent.plain attention.latent.values
    attention.latent.query_rank attention.latent.eps

    mlp=Mlp mlp.activation=silu|gelu_tanh|gelu|relu mlp.inner_size mlp.gated mlp.bias

    experts=Experts experts.layers experts.count experts.chosen experts.inner_size
    experts.normalised experts.shared_size experts.shared_gate
    experts.router_bias experts.bias experts.clamp experts.factor experts.scores=softmax|sigmoid
    experts.groups experts.chosen_groups experts.best_of_group experts.correction

    rope=Rope rope.kind rope.parameters rope.rotated rope.neighbours rope.unrotated_layers
    rope.local_theta

    names=WeightNames names.embedding names.layer names.parts names.final_norm names.head
    names.qkv_by_group names.buffers names.others names.positions
    names.transposed names.stacks names.further_layers names.apart
""")
"""Values that both decoders compute. A new feature begins in the table of its decoder."""
SUPPORT: Support = {**BOTH_SUPPORT}
"""Values that the decoder in torch, with its loader and rotations, computes."""


GATED = ("silu", "gelu_tanh")
PLAIN = ("relu", "gelu", "gelu_tanh")


def why_not(spec: ModelSpec) -> str | None:
    """Explain why the decoder in torch cannot run a model; None if it can."""
    return support.why_not(spec, SUPPORT) or _unfit(spec)


def _unfit(spec: ModelSpec) -> str | None:
    """Name spec values that the decoder supports singly, but not together."""
    placement, activation = spec.norm.placement, spec.mlp.activation
    if (placement == "once") != spec.parallel and (placement != "before"):
        return f"norm.placement {placement!r} is not known with parallel {spec.parallel}"
    if spec.norm.bias and spec.norm.kind != "layer":
        return f"norm.bias is not known with norm.kind {spec.norm.kind!r}"
    if activation not in (GATED if spec.mlp.gated else PLAIN):
        return f"mlp.activation {activation!r} is not known with mlp.gated {spec.mlp.gated}"
    if spec.experts is not None and not spec.mlp.gated:
        return "experts without gates are not known"
    if spec.attention.growth and spec.attention.latent:
        return "attention.growth is not known with attention.latent"
    return None


_ROW, _BACK = attrgetter("row"), attrgetter("back")
NOT_FED = -1
"""Mark of a token that does not come from the step before."""


class StepInputBuilder(msgspec.Struct, frozen=True, dict=True):
    """Builder of a step's input: computes once per step everything that layers share."""

    spec: ModelSpec
    kernels: KernelSet
    rotary: RotaryEmbedding
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def windows(self) -> list[int | None]:
        """List the distinct windows of layers; None stands for full attention."""
        return sorted(set(self.spec.attention.windows), key=lambda window: window or 0)

    def build(self, plan: StepPlan) -> StepInput:
        """Upload arrays in one transfer, and plan attention for each distinct sliding window."""
        arrays = self.arrays(plan)
        tensors = dict(zip(arrays, upload(list(arrays.values()), self.device), strict=True))
        batch = self.attention_batch(plan)
        attention = {window: self.kernels.plan_attention(batch, window) for window in self.windows}
        return self.on_device(plan, tensors, attention, tensors["token_ids"])

    def arrays(self, plan: StepPlan) -> dict[str, np.ndarray]:
        """Return the arrays of a step, int64, by the names that `on_device` reads."""
        arrays = {
            "token_ids": plan.token_ids.astype(np.int64),
            "positions": plan.positions.astype(np.int64),
            "slots": np.concatenate((plan.slots, plan.duplicate_slots)),
            "wanted": wanted_tokens(plan),
        }
        if len(plan.duplicate_tokens):
            tokens = (np.arange(plan.num_tokens), plan.duplicate_tokens)
            arrays["write_tokens"] = np.concatenate(tokens)
        of_token = adapter_of_tokens(plan) if len(plan.adapters) else np.empty(0, np.int32)
        for n in sorted(set(of_token.tolist()) - {-1}):
            arrays[f"adapter {n}"] = np.flatnonzero(of_token == n)
            arrays[f"adapter {n} wanted"] = np.flatnonzero(of_token[arrays["wanted"]] == n)
        return arrays

    def on_device(
        self,
        plan: StepPlan,
        tensors: Mapping[str, torch.Tensor],
        attention: dict[int | None, Any],
        token_ids: torch.Tensor,
    ) -> StepInput:
        """Build the decoder's input from a step's `arrays` on the device. Without "wanted", hidden
        states of all tokens are wanted."""
        positions = tensors["positions"]
        cos, sin = self.rotary(positions)
        return StepInput(
            token_ids=token_ids,
            positions=positions,
            cos=cos,
            sin=sin,
            write_slots=tensors["slots"],
            write_tokens=tensors.get("write_tokens"),
            attention=attention,
            wanted=tensors.get("wanted"),
            adapted=[
                AdaptedRows(n, tensors[f"adapter {n}"], tensors[f"adapter {n} wanted"])
                for n in sorted(set(plan.adapters.tolist()) - {-1})
            ],
        )

    def attention_batch(self, plan: StepPlan) -> AttentionBatch:
        attention = self.spec.attention
        return AttentionBatch(
            row_start=plan.row_start,
            context_len=plan.context_len,
            block_tables=plan.block_tables,
            block_size=self.block_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            dtype=self.dtype,
            device=self.device,
        )


def copied_slots(plan: StepPlan, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the (source, target) slots of the plan's block copies, int64 each."""
    source, target, rows = plan.copies.astype(np.int64).T
    # Row i of copy c, for all c and all i < rows[c], flattened.
    which = np.repeat(np.arange(len(rows)), rows)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(rows) - rows, rows)
    return source[which] * block_size + offset, target[which] * block_size + offset


def adapter_of_tokens(plan: StepPlan) -> np.ndarray:
    """Return the adapter of each token, int32 [T]; -1: none."""
    return np.repeat(plan.adapters, np.diff(plan.row_start))


def wanted_tokens(plan: StepPlan) -> np.ndarray:
    """Return the flat tokens whose hidden states are needed, int64: tokens before samples, then
    scored ranges, then pooled ranges."""
    count = len(plan.samples)
    rows = np.fromiter(map(_ROW, plan.samples), np.int64, count)
    back = np.fromiter(map(_BACK, plan.samples), np.int64, count)
    wanted = [plan.row_start[rows + 1] - 1 - back]
    for score in plan.prompt_scores:
        wanted.append(np.arange(score.flat_start, score.flat_start + len(score.targets)))
    for row in plan.pooled:
        wanted.append(np.arange(row.flat_start, row.flat_start + row.count))
    return np.concatenate(wanted)


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Upload arrays in a single transfer; return one int64 device tensor per array."""
    import torch  # only here: the native decoder needs none

    joined = torch.from_numpy(np.concatenate([np.asarray(one, dtype=np.int64) for one in arrays]))
    if device.type == "cuda":
        joined = joined.pin_memory()
    return list(joined.to(device, non_blocking=True).split([len(one) for one in arrays]))
