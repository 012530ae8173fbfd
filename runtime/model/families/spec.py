"""Specify a decoder's computation: sizes, parts and names of weights.

A field with a default is a feature; the default means that the model lacks the feature. A decoder
that does not know a feature may run all models without it and refuses the others (`support`). So a
new feature is a new field with a default, and no other code has to know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Literal

import msgspec
from msgspec.structs import FieldInfo, fields, replace

# Support ------------------------------------------------------------------------------------------
#
# Check the specs of a decoder: it lists supported values, and refuses the rest by name.


Support = Mapping[str, Collection[str]]
"""Values that a decoder supports beside the default, by a field's path in the spec
("attention.scale"). A part of the spec is named by its type; an empty collection allows any value.
A field that is missing here is supported at its default only."""


def known(fields: str) -> Support:
    """Read a table of fields with any value (`path`) or with some (`path=one|another`)."""
    pairs = (field.partition("=") for field in fields.split())
    return {path: values.split("|") if values else () for path, _, values in pairs}


def why_not(spec: Any, support: Support, prefix: str = "") -> str | None:
    """Name the first field whose value is not supported, in words; None if all are supported."""
    for part in _fields(spec.__class__):
        path, value = prefix + part.name, getattr(spec, part.name)
        is_part = isinstance(value, msgspec.Struct)
        name = type(value).__name__ if is_part else value
        if part.default is msgspec.NODEFAULT or value != part.default:
            if path not in support:
                return f"{path} {_shown(value)} is not known"
            if support[path] and name not in support[path]:
                return f"{path} {_shown(value)} is not supported"
        if is_part:
            found = why_not(value, support, f"{path}.")
            if found is not None:
                return found
    return None


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[FieldInfo, ...]:
    """List a struct's fields. Evaluating the annotations takes 0.1 ms each time."""
    return fields(kind)


def _shown(value: object) -> str:
    return type(value).__name__ if isinstance(value, msgspec.Struct) else repr(value)


# Spec ---------------------------------------------------------------------------------------------


Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]
"""`gelu_tanh` is the approximation by tanh, `gelu` the exact function."""
Placement = Literal["before", "after", "around", "once"]


class Norm(msgspec.Struct, frozen=True):
    """Norms of the layers and before the head: RMSNorm or LayerNorm ("layer"), with or without
    `bias`. `placement` in each residual branch: "before" attention or MLP, "after" it, or "around"
    it (both); "once": one norm before attention and MLP, which are `parallel`. `offset` is added to
    the checkpoint's weights."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    placement: Placement = "before"
    offset: float = 0.0
    bias: bool = False


class Latent(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). A token's cached vector begins
    with `rank` numbers, from which all heads' keys and values follow. Behind them are the rotated
    numbers that all heads' keys share. A head's key has `plain` numbers before the rotated ones,
    its value `values`. With a `query_rank`, queries are made of that many numbers. These numbers
    and the `rank` numbers are normed by RMSNorm with `eps`."""

    rank: int
    plain: int
    values: int
    query_rank: int | None
    eps: float


class Attention(msgspec.Struct, frozen=True):
    """Grouped-query attention. Scores are `scale` times q . k, then, with a `soft_cap` c > 0, c *
    tanh(score / c).

    `windows[i]` is layer i's sliding window (a token sees itself and the `window - 1` tokens before
    it), None for full attention. Before rotation, queries and keys are normed by RMSNorm: with
    `head_norm` each head, with `joint_norm` all heads of a token together. With `own_norms`
    LayerNorm norms each head with its own weights. With `sinks` each query head has a number s in
    the softmax, like a further key with score s and value zero. With `latent` there is one key
    head, of `head_dim` numbers, and values are a part of it. With `growth` (b, n) the queries at
    position p are multiplied by 1 + b * ln(1 + floor(p / n)).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: bool = False
    joint_norm: bool = False
    own_norms: bool = False
    soft_cap: float = 0.0
    sinks: bool = False
    latent: Latent | None = None
    growth: tuple[float, int] | None = None

    @property
    def normed_by_head(self) -> bool:
        """Whether `joint_norm` or `own_norms` has as many weights as all heads have numbers."""
        return self.joint_norm or self.own_norms

    @property
    def cached(self) -> int:
        """Number of vectors that a key head caches of a token: its key, mostly its value."""
        return 1 if self.latent else 2


class Mlp(msgspec.Struct, frozen=True):
    """MLP: down(activation(gate(x)) * up(x)), or down(activation(up(x))) if not `gated`, with
    `inner_size` numbers in between."""

    inner_size: int
    activation: Activation
    gated: bool
    bias: bool = False


class Experts(msgspec.Struct, frozen=True):
    """Mixture of experts in place of the MLP of the layers `layers`. Of `count` gated MLPs with
    `inner_size` inner numbers, each token uses the `chosen` that a router scores best. The output
    is the sum of their outputs, each times its share. Shares are the softmax of all scores, or the
    sigmoid of each. The chosen shares are divided by their sum if `normalised`, and multiplied by
    `factor`.

    The choice: experts are in `groups`, of which the `chosen_groups` count that have the largest
    sum of their `best_of_group` best shares. With `correction` each expert has a number that is
    added to its share for the choice alone.

    With a `shared_size` there is a further MLP of that inner size for all tokens; with
    `shared_gate` its output is multiplied by the sigmoid of its own product. The activation is that
    of `ModelSpec.mlp`, unless there is a `clamp` (a, c), for gate g and up u:

        g' = min(g, c),  u' = min(max(u, -c), c)
        g' * sigmoid(a * g') * (u' + 1)
    """

    layers: tuple[int, ...]
    count: int
    chosen: int
    inner_size: int
    normalised: bool = False
    router_bias: bool = False
    bias: bool = False
    clamp: tuple[float, float] | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    factor: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    best_of_group: int = 1
    correction: bool = False
    shared_size: int = 0
    shared_gate: bool = False


class Rope(msgspec.Struct, frozen=True):
    """Rotary position embedding. `kind` and `parameters` are those of transformers'
    `rope_parameters` ("rope_theta" among them). The first `rotated` numbers of a head are rotated
    (None: all), each with the number half of `rotated` further on, or with its neighbour if
    `neighbours`. The layers `unrotated_layers` rotate nothing. With a `local_theta`, layers with a
    window have the `kind` "default" with this `rope_theta`."""

    kind: str
    parameters: Mapping[str, Any]
    rotated: int | None = None
    neighbours: bool = False
    unrotated_layers: tuple[int, ...] = ()
    local_theta: float = 0.0


class WeightNames(msgspec.Struct, frozen=True):
    """Names of a checkpoint's modules; their tensors are `<module>.weight` and `<module>.bias`.

    `parts`: our name (a field of `LayerWeights`) -> modules whose rows are joined, behind `layer`
    (with the layer's index). A checkpoint with joined rows names one module. Layers with experts
    have `router`, `expert_gate_up` and `expert_down` (with the expert's index), `shared_gate_up`,
    `shared_down` and `shared_gate` among the parts. `qkv_by_group`: rows are joined group by group;
    a group is the query heads of a key head, the key head and the value head. Norms of single heads
    are one module, or one for each head, with the head's index in its name.

    `buffers`: endings of tensors that are no weights. `others`: further names that a checkpoint may
    have. `positions`: the table of learned positions. `transposed`: the layers' matrices have a row
    for each input. `stacks`: a module has a matrix or a vector for each expert of a layer. If
    "alternating", gate and up are one module with alternating rows, and tensors `<module>` and
    `<module>_bias`; matrices that are not quantised have a row for each input. `k_up` and `v_up`
    may replace `kv_up`, each with a matrix for each head; a key matrix has a row for each number of
    a latent. `further_layers`: number of layers behind the last one that are not used. `apart`:
    beginnings of the names of other models' weights in the checkpoint.
    """

    embedding: str
    layer: str
    parts: Mapping[str, tuple[str, ...]]
    final_norm: str
    head: str
    qkv_by_group: bool = False
    buffers: tuple[str, ...] = ()
    others: tuple[WeightNames, ...] = ()
    positions: str = ""
    transposed: bool = False
    stacks: Literal["", "apart", "alternating"] = ""
    further_layers: int = 0
    apart: tuple[str, ...] = ()

    def with_parts(self, **parts: str | tuple[str, ...]) -> WeightNames:
        """Return these names with further or replaced parts, each of one module or of several."""
        new = {name: (one,) if isinstance(one, str) else one for name, one in parts.items()}
        return replace(self, parts={**self.parts, **new})


class TransformersModules(msgspec.Struct, frozen=True):
    """Transformers' own modules for layers, embedding and head, of the class `architecture`, with
    `numbers` parameters. A head has keys of `key_size` numbers and values of `value_size`; the
    cache has room for the larger. `norm`, `mlp`, `rope` and `names` of the spec are then unused.
    Each layer states scale and cap of its attention."""

    architecture: str
    numbers: int
    key_size: int
    value_size: int


class ModelSpec(msgspec.Struct, frozen=True):
    """Specification of a decoder. `max_context`: the most positions it was made for.

    Further features: multipliers of the embedding, and of each part's output before the residual
    sum; logits are multiplied, then capped as attention's scores are. `rounded_multiplier`: the
    embedding's multiplier is first rounded to the model's dtype. `parallel`: the MLP reads the same
    residual stream as attention, and both outputs are added. `learned_positions`: number of rows of
    a table added to the embedding; the checkpoint's table has `skipped_positions` rows before.
    `labels`: the head gives this number of scores of a text instead of logits; 0: no head.
    `transformers`: its modules compute the layers.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    norm: Norm
    attention: Attention
    mlp: Mlp
    rope: Rope
    names: WeightNames
    tied_embeddings: bool = False
    embedding_multiplier: float = 1.0
    rounded_multiplier: bool = False
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_soft_cap: float = 0.0
    experts: Experts | None = None
    parallel: bool = False
    learned_positions: int = 0
    skipped_positions: int = 0
    labels: int | None = None
    transformers: TransformersModules | None = None

    @property
    def head_rows(self) -> int:
        """Number of outputs of the head."""
        return self.vocab_size if self.labels is None else self.labels
