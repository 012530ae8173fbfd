"""A model of transformers run without weights, to see what its layers ask of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from rootlace.runtime.model.families.given import names
from rootlace.runtime.model.foreign.attention import Call, Unattended, attending, window_of
from rootlace.runtime.model.foreign.head import Head

TOKENS = 7
"""Of the text that is tried. No other size of a model is likely to be this."""
HARMLESS = names(
    "dropout position_ids position_embeddings cache_position use_cache output_attentions "
    "output_hidden_states output_router_logits return_dict logits_to_keep is_causal "
    "past_key_values sliding_window"
)
"""Keywords of attention that say nothing, or that are looked at here."""


@dataclass(frozen=True)
class Asked:
    """What a layer asks of attention, without its numbers."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    scale: float
    soft_cap: float
    window: int | None
    sinks: bool


class Recorder:
    """Attends to nothing, and remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def __call__(self, call: Call) -> torch.Tensor:
        tokens, heads, size = call.queries.shape
        if tokens != TOKENS or len(call.keys) != TOKENS or len(call.values) != TOKENS:
            raise Unattended("it attends to other tokens than those of the text")
        if call.keys.shape[2] != size:
            raise Unattended("its queries and keys have unlike sizes")
        if getattr(call.layer, "is_causal", True) is False or call.others.get("is_causal") is False:
            raise Unattended("its attention is not causal")
        unknown = sorted(k for k, v in call.others.items() if v is not None and k not in HARMLESS)
        if unknown:
            raise Unattended(f"its attention takes {', '.join(unknown)}")
        window = window_of(call)
        if call.others.get("sliding_window") not in (None, window):
            raise Unattended("its attention has another window than its mask")
        if call.scale is not None and not isinstance(call.scale, (int, float)):
            raise Unattended("its scale is no constant")
        scale = size**-0.5 if call.scale is None else float(call.scale)
        kv_heads, value_size = call.values.shape[1:]
        self.asked.append(
            Asked(
                heads,
                kv_heads,
                size,
                value_size,
                scale,
                float(call.soft_cap),
                window,
                call.sinks is not None,
            )
        )
        return call.queries.new_empty((tokens, heads, value_size))


class _NothingFound(TorchDispatchMode):
    """On the device `meta` there are no numbers. Code that asks for one gets 0, and code that looks
    for those that are not 0 finds none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func is torch.ops.aten._local_scalar_dense.default:
                return 0
            if func is torch.ops.aten.nonzero.default:
                return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Recorded:
    """What the layers of a model asked for, and its sizes; `numbers`: how many parameters."""

    asked: list[Asked]
    hidden_size: int
    vocab_size: int
    numbers: int


def record(model: PreTrainedModel) -> Recorded:
    """Try out a model on the device `meta`. Raises `Unattended`."""
    recorder = Recorder()
    numbers = sum(part.numel() for part in model.parameters())
    tokens = torch.zeros((1, TOKENS), dtype=torch.int64, device="meta")
    base = model.base_model
    try:
        with torch.no_grad(), _NothingFound(), attending(recorder):
            hidden = base(
                input_ids=tokens,
                position_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
            ).last_hidden_state[0]
            logits = Head(model)(hidden)
    except Unattended:
        raise
    except Exception as error:
        raise Unattended(f"its modules cannot be tried out: {first_line(error)}") from error
    if not recorder.asked:
        raise Unattended("its layers do not ask for attention")
    return Recorded(recorder.asked, hidden.shape[1], logits.shape[1], numbers)


def first_line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
