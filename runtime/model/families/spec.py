"""What a decoder computes: sizes, parts, and what its weights are called.

A field with a default is a feature, and its default means that the model does not have it: a
decoder that has never heard of a feature may run every model without it and refuses the others
(`support`). So a new feature is a new field with a default, and nothing else has to know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Literal

import msgspec
from msgspec.structs import FieldInfo, fields, replace

# Support ------------------------------------------------------------------------------------------
#
# Which specs a decoder can compute: a decoder lists what it knows, the rest is refused by name.


Support = Mapping[str, Collection[str]]
"""By a field's path in the spec ("attention.scale"): the values a decoder knows beside the default,
of a part of the spec the name of its type; none: whatever value the field has. A field that is not
here is known at its default only."""


def known(fields: str) -> Support:
    """Read a table of fields with any value (`path`) or with some (`path=one|another`)."""
    pairs = (field.partition("=") for field in fields.split())
    return {path: values.split("|") if values else () for path, _, values in pairs}


def why_not(spec: Any, support: Support, prefix: str = "") -> str | None:
    """The first field whose value is not supported, in words; None if there is none."""
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
    """The norms of the layers and the one before the head: RMSNorm, or LayerNorm ("layer"), with a
    `bias` or without. `placement` in each residual branch: "before" attention or MLP, "after" it,
    or "around" it, which is both; "once": one norm before attention and MLP, which are `parallel`.
    `offset` is added to the weights that a checkpoint has."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    placement: Placement = "before"
    offset: float = 0.0
    bias: bool = False


class Latent(msgspec.Struct, frozen=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): what is cached of a token is one
    vector, `rank` numbers from which the keys and values of all heads follow, and the rotated
    numbers behind them that all heads' keys have in common. A head's key has `plain` numbers before
    those, its value `values`. With a `query_rank`, queries are made of so many numbers. These and
    the `rank` numbers are normed by RMSNorm with `eps`."""

    rank: int
    plain: int
    values: int
    query_rank: int | None
    eps: float


class Attention(msgspec.Struct, frozen=True):
    """Grouped-query attention. Scores are `scale` times q . k, then, with a `soft_cap` c > 0,
    c * tanh(score / c).

    `windows[i]` is layer i's sliding window (a token sees itself and the `window - 1` tokens before
    it), None for full attention. Before they are rotated, queries and keys are normed by RMSNorm:
    with `head_norm` each head, with `joint_norm` all heads of a token together; with `own_norms`
    by LayerNorm, each head with weights of its own. With `sinks` each head of queries has a number
    s of its own in the softmax, as if one key more had the score s, and a value of zero. With
    `latent` there is one head of keys, of `head_dim` numbers, and values are a part of it. With
    `growth` (b, n) the queries at position p are multiplied by
    1 + b * ln(1 + floor(p / n)).
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
        """Whether the weights of `joint_norm` or `own_norms` are as many as all heads' numbers."""
        return self.joint_norm or self.own_norms

    @property
    def cached(self) -> int:
        """How many vectors of a token each head of keys keeps: its key, and mostly its value."""
        return 1 if self.latent else 2


class Mlp(msgspec.Struct, frozen=True):
    """down(activation(gate(x)) * up(x)), or if it is not `gated` down(activation(up(x))), with
    `inner_size` numbers in between."""

    inner_size: int
    activation: Activation
    gated: bool
    bias: bool = False


class Experts(msgspec.Struct, frozen=True):
    """A mixture of experts in place of the MLP of the layers `layers`: of `count` gated MLPs with
    `inner_size` numbers in between, each token has the `chosen` that a router scores best. Their
    outputs are added up, each times its share. Shares are the softmax of all scores, or the
    sigmoid of each; those of the chosen are divided by their sum if `normalised`, and multiplied
    by `factor`.

    Who is chosen: experts are in `groups`, of which those `chosen_groups` count that have the
    largest sum of their `best_of_group` best shares. With `correction` each expert has a number
    that is added to its share in this alone.

    With a `shared_size` there is a further MLP of that inner size which all tokens have; with
    `shared_gate` its output is multiplied by the sigmoid of a product of its own. The activation is
    that of `ModelSpec.mlp`, unless there is a `clamp` (a, c): of the gate g and what it gates, u,

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
    `rope_parameters` ("rope_theta" among them). The first `rotated` numbers of a head are rotated,
    None: all; each with the one half of them further on, or with its neighbour if `neighbours`.
    Nothing is rotated in the layers `unrotated_layers`. With a `local_theta`, layers with a window
    have the `kind` "default" with this `rope_theta`."""

    kind: str
    parameters: Mapping[str, Any]
    rotated: int | None = None
    neighbours: bool = False
    unrotated_layers: tuple[int, ...] = ()
    local_theta: float = 0.0


class WeightNames(msgspec.Struct, frozen=True):
    """The modules of a checkpoint; their tensors are `<module>.weight` and `<module>.bias`.

    Of layers with experts, `router`, `expert_gate_up` and `expert_down` (with the expert's index in
    them), `shared_gate_up`, `shared_down` and `shared_gate` are among the `parts`.

    `parts` are a layer's: our name (a field of `LayerWeights`) -> the modules, behind `layer` (with
    the layer's index in it), whose rows are joined to make it. A checkpoint that has already joined
    them names one. `qkv_by_group`: these rows are joined group by group, each of which is a key's
    head behind the heads of queries that attend to it, and the value's. Tensors with one of the
    endings `buffers` are no weights. `others` are further names that a checkpoint may have.
    `positions`: the table of learned positions. With `transposed`, the layers' matrices have a row
    for each input. Where heads have norms of their own, one module has those of all of them, or
    there is one for each, with the head's index in its name. With `stacks`, a module has a matrix
    or a vector for each expert of a layer. Where these are "alternating", gate and up are one
    module, whose rows alternate; its tensors are `<module>` and `<module>_bias`, and where they are
    not quantised a matrix has a row for each input. In place of `kv_up` there may be `k_up` and
    `v_up`, each with a matrix for each head; that of keys then has a row for each number of a
    latent. `further_layers`: so many behind the last one are for other ends. What begins as one of
    `apart` is of other models in the checkpoint.
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
        """These names, with further parts or other ones, each of one module or of several."""
        new = {name: (one,) if isinstance(one, str) else one for name, one in parts.items()}
        return replace(self, parts={**self.parts, **new})


class TransformersModules(msgspec.Struct, frozen=True):
    """Layers, embedding and head that are transformers' own modules, of the class `architecture`,
    with `numbers` parameters. A head has keys of `key_size` numbers and values of `value_size`; the
    cache has room for the larger. `norm`, `mlp`, `rope` and `names` of the spec then say nothing,
    and the scale and cap of attention are what each layer says."""

    architecture: str
    numbers: int
    key_size: int
    value_size: int


class ModelSpec(msgspec.Struct, frozen=True):
    """A decoder. `max_context` is the most positions it was made for.

    Features besides those of its parts: what the embedding is multiplied by, what each part's
    output is multiplied by before it is added to the residual stream, and what is done to logits,
    in this order: multiplied, then capped as attention's scores are. `rounded_multiplier`: that of
    the embedding is rounded to the model's type first. `parallel`: the MLP reads the residual
    stream as attention found it, and both outputs are added to that. `learned_positions`: a row
    for each of so many positions is added to the embedding; in the checkpoint it stands behind
    `skipped_positions` others. `labels`: the head gives so many scores of a text instead of logits
    of tokens; 0: there is no head. `transformers`: its modules compute the layers.
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
        """How many outputs the head has."""
        return self.vocab_size if self.labels is None else self.labels
