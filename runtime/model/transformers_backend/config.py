"""Make a spec of a model folder that transformers can run: its layers run without weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from rootlace.runtime.model.families.config_reader import names
from rootlace.runtime.model.families.spec import (
    Attention,
    Mlp,
    ModelSpec,
    Norm,
    Rope,
    TransformersModules,
    WeightNames,
)
from rootlace.wire.errors import UnsupportedModel

# Attention ----------------------------------------------------------------------------------------
#
# Implement transformers' `AttentionInterface` and `AttentionMaskInterface`.
#
# Both interfaces take one function for all models. The attention of a forward pass is found
# in a context variable, which is set for that pass alone: not all layers hand keywords on to
# attention.


ATTENTION = "rootlace"
"""Name of the attention implementation in transformers."""
RECORDED = "rootlace_recorded"
"""Name of the same implementation, with masks that state their window."""


class Call(msgspec.Struct, frozen=True):
    """Call of one layer's attention: queries [T, Nq, D], keys [T, Nk, D] and values [T, Nk, Dv] of
    all tokens of a step. `others`: all further arguments of the layer."""

    layer: torch.nn.Module
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    scale: float | None
    soft_cap: float
    sinks: torch.Tensor | None
    others: dict[str, Any]


Attends = Callable[[Call], torch.Tensor]
"""Function from a call to [T, Nq, Dv], called once for each layer, in the layers' order."""


_attending: ContextVar[Attends] = ContextVar("attending")


class UnsupportedAttention(Exception):
    """Error of an attention that cannot be computed; the text has the reason."""


@contextmanager
def attending(attends: Attends) -> Iterator[None]:
    """Return a context whose forward passes get their layers' attention from `attends`."""
    token = _attending.set(attends)
    try:
        yield
    finally:
        _attending.reset(token)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Map query [1, Nq, T, D], key and value [1, Nk, T, D] to [1, T, Nq, D] and no weights."""
    call = Call(
        layer=module,
        queries=query[0].transpose(0, 1),
        keys=key[0].transpose(0, 1),
        values=value[0].transpose(0, 1),
        mask=attention_mask,
        scale=scaling,
        soft_cap=softcap or 0.0,
        sinks=s_aux,
        others=others,
    )
    return _attending.get()(call).unsqueeze(0), None


POSITIONS = (0, 1, 7, 4095, 4096, 70001, (1 << 20) + 3)
"""Positions at which masks are probed for allowed tokens. A window larger than the last one counts
as none."""


def _mask(
    q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], **others: Any
) -> torch.Tensor:
    """Return an empty mask of the right shape, with its `window`."""
    found = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    found.window = _window(mask_function)  # type: ignore[attr-defined]
    return found


def window_of(call: Call) -> int | None:
    """Return the window of a recorded call; None: full attention. Raises `UnsupportedAttention`."""
    if call.mask is None:
        raise UnsupportedAttention("it makes masks of its own, or none")
    if not hasattr(call.mask, "window"):
        raise UnsupportedAttention("it changes its masks")
    found: int | None = call.mask.window
    return found


def _window(mask_function: Callable[..., torch.Tensor]) -> int | None:
    """Return the number of tokens that each token sees, itself included; None: all before it."""
    zero, seen = torch.tensor(0), []
    for position in POSITIONS:
        keys = torch.arange(position + 2)
        try:
            allowed = mask_function(zero, zero, torch.tensor(position), keys)
        except Exception as error:
            raise UnsupportedAttention("its masks depend on more than positions") from error
        allowed = allowed.broadcast_to(keys.shape)
        if bool(allowed[-1]):
            raise UnsupportedAttention("its attention is not causal")
        count = int(allowed.sum())
        if not bool(allowed[position + 1 - count : position + 1].all()):
            raise UnsupportedAttention(
                "it attends to other tokens than those before, or in a window"
            )
        seen.append(count)
    window = max(seen)
    if seen != [min(window, position + 1) for position in POSITIONS]:
        raise UnsupportedAttention(
            "it attends in chunks, or in windows that differ from token to token"
        )
    return None if window == POSITIONS[-1] + 1 else window


AttentionInterface.register(ATTENTION, _attend)
AttentionInterface.register(RECORDED, _attend)
AttentionMaskInterface.register(RECORDED, _mask)


# Head ---------------------------------------------------------------------------------------------
#
# Run the head of a transformers model without its layers.


class Head:
    """Head of a transformers model: computes logits of hidden states by the model's own code, which
    gets the states in place of its layers' output. Takes the layers away from the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = _FixedHidden()
        setattr(model, model.base_model_prefix, self._layers)
        self._model = model

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden [N, H] to [N, V]."""
        self._layers.hidden = hidden.unsqueeze(0)
        logits: torch.Tensor = self._model(
            inputs_embeds=self._layers.hidden, use_cache=False
        ).logits
        return logits[0]


class _Output:
    """Output of a model's layers: hidden states, by any name that the model uses."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _FixedHidden(torch.nn.Module):
    hidden: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self.hidden)


# Recording ----------------------------------------------------------------------------------------


TOKENS = 7
"""Length of the trial text in tokens: a number that is no other size of a model."""
HARMLESS = names(
    "dropout position_ids position_embeddings cache_position use_cache output_attentions "
    "output_hidden_states output_router_logits return_dict logits_to_keep is_causal "
    "past_key_values sliding_window"
)
"""Keywords of attention that change nothing, or that are checked elsewhere in this module."""


class LayerAttention(msgspec.Struct, frozen=True):
    """Attention that a layer asks for: sizes and options, no numbers."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    scale: float
    soft_cap: float
    window: int | None
    sinks: bool


def layer_attention(call: Call) -> LayerAttention:
    """Return the attention of a trial layer. Raises `UnsupportedAttention`."""
    tokens, heads, size = call.queries.shape
    if tokens != TOKENS or len(call.keys) != TOKENS or len(call.values) != TOKENS:
        raise UnsupportedAttention("it attends to other tokens than those of the text")
    if call.keys.shape[2] != size:
        raise UnsupportedAttention("its queries and keys have unlike sizes")
    if getattr(call.layer, "is_causal", True) is False or call.others.get("is_causal") is False:
        raise UnsupportedAttention("its attention is not causal")
    unknown = sorted(k for k, v in call.others.items() if v is not None and k not in HARMLESS)
    if unknown:
        raise UnsupportedAttention(f"its attention takes {', '.join(unknown)}")
    window = window_of(call)
    if call.others.get("sliding_window") not in (None, window):
        raise UnsupportedAttention("its attention has another window than its mask")
    if call.scale is not None and not isinstance(call.scale, (int, float)):
        raise UnsupportedAttention("its scale is no constant")
    scale = size**-0.5 if call.scale is None else float(call.scale)
    sizes = (heads, call.values.shape[1], size, call.values.shape[2])
    return LayerAttention(*sizes, scale, float(call.soft_cap), window, call.sinks is not None)


class _NothingFound(TorchDispatchMode):
    """Mode for the device `meta`, which has no numbers: code that reads a number gets 0, and code
    that looks for nonzero numbers finds none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func is torch.ops.aten._local_scalar_dense.default:
                return 0
            if func is torch.ops.aten.nonzero.default:
                return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        return func(*args, **kwargs)


def record(model: PreTrainedModel) -> tuple[list[LayerAttention], int, int]:
    """Run a model on the device `meta`; return the attention of its layers, its hidden size and its
    vocabulary size. Raises `UnsupportedAttention`."""
    layers: list[LayerAttention] = []

    def attend(call: Call) -> torch.Tensor:
        layers.append(layer_attention(call))
        return call.queries.new_empty((TOKENS, layers[-1].heads, layers[-1].value_size))

    tokens = torch.zeros((1, TOKENS), dtype=torch.int64, device="meta")
    base = model.base_model
    try:
        with torch.no_grad(), _NothingFound(), attending(attend):
            hidden = base(
                input_ids=tokens,
                position_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
            ).last_hidden_state[0]
            logits = Head(model)(hidden)
    except UnsupportedAttention:
        raise
    except Exception as error:
        why = first_line(error)
        if isinstance(error, NotImplementedError) and "meta tensor" in why:
            why = "they choose what to compute by numbers that only an input gives"
        raise UnsupportedAttention(f"its modules cannot be tried out: {why}") from error
    if not layers:
        raise UnsupportedAttention("its layers do not ask for attention")
    return layers, hidden.shape[1], logits.shape[1]


def first_line(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# Reading ------------------------------------------------------------------------------------------
#
# Read a model folder that transformers can run, and make its spec.


def read_config(folder: Path) -> PreTrainedConfig:
    """Read the configuration by its own `model_type`: the modules' configuration class has other
    names of keys, and other defaults."""
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def read_model(
    folder: Path, architecture: str
) -> tuple[ModelSpec, int | None, int | list[int] | None]:
    """Read a model that transformers can run; return its spec, and the tokens that begin and end a
    text. Raises `UnsupportedModel`, with the reason, if layers need unsupported attention."""
    file = folder / "config.json"
    try:
        kind = getattr(transformers, architecture)
        config = read_config(folder)
        # Some configurations share another's modules.
        if (
            not isinstance(config, kind.config_class)
            and MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is not kind
        ):
            raise UnsupportedModel(
                f"{file}: architectures: model_type {config.model_type!r} is not that of "
                f"{architecture}"
            )
        # In bfloat16 more models can be tried out without numbers.
        with torch.device("meta"):
            model = kind._from_config(config, attn_implementation=RECORDED, dtype=torch.bfloat16)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{file}: {architecture}: transformers {transformers.__version__} cannot read it: "
            f"{first_line(error)}"
        ) from error
    text = config.get_text_config()
    try:
        spec = _spec(architecture, text, model)
    except UnsupportedAttention as error:
        raise UnsupportedModel(f"{file}: {architecture}: {error}") from error
    begin, end = (getattr(text, f"{name}_token_id", None) for name in ("bos", "eos"))
    return spec, begin, end


def _spec(architecture: str, config: PreTrainedConfig, model: PreTrainedModel) -> ModelSpec:
    numbers = sum(part.numel() for part in model.parameters())
    layers, hidden_size, vocab_size = record(model)
    if len(layers) < config.num_hidden_layers:
        raise UnsupportedAttention("it has layers without attention")
    first, size = layers[0], max(layers[0].key_size, layers[0].value_size)
    if len({(one.heads, one.kv_heads, one.key_size, one.value_size) for one in layers}) > 1:
        raise UnsupportedAttention("its layers have heads of unlike numbers or sizes")
    if first.heads % first.kv_heads or size % 2:
        raise UnsupportedAttention(
            f"{first.heads} heads of {size} numbers over {first.kv_heads} of keys"
        )
    attention = Attention(
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        head_dim=size,
        scale=first.scale,
        windows=tuple(one.window for one in layers),
        soft_cap=first.soft_cap,
        sinks=any(one.sinks for one in layers),
    )
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=len(layers),
        max_context=_context(config),
        norm=Norm(0.0),
        attention=attention,
        mlp=Mlp(0, "gelu", gated=False),
        rope=Rope("default", {"rope_theta": 1e4}, unrotated_layers=tuple(range(len(layers)))),
        names=WeightNames("", "", {}, "", ""),
        tied_embeddings=bool(config.tie_word_embeddings),
        transformers=TransformersModules(architecture, numbers, first.key_size, first.value_size),
    )


def _context(config: PreTrainedConfig) -> int:
    """Return the most positions. With `longrope` they end where the second of its two sets of
    factors begins: a step's longest text would choose the set for all texts."""
    longest: Any = getattr(config, "max_position_embeddings", None)
    if type(longest) is not int or longest < 1:
        raise UnsupportedAttention("config.json has no max_position_embeddings")
    parameters = getattr(config, "rope_parameters", None) or {}
    for found in (parameters, *parameters.values()):
        if isinstance(found, dict) and found.get("rope_type") == "longrope":
            longest = min(longest, found.get("original_max_position_embeddings") or longest)
    return longest
