"""What stands behind transformers' `AttentionInterface` and `AttentionMaskInterface` for us.

What they are given is a function, one for all models. Whoever attends in a forward pass is found in
a context variable, which is set for that pass alone: not all layers hand keywords on to attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION = "rootlace"
"""The name of the implementation, to transformers."""
RECORDED = "rootlace_recorded"
"""The same, with masks that say which window they have."""


@dataclass(frozen=True)
class Call:
    """One layer's attention: queries [T, Nq, D], keys [T, Nk, D] and values [T, Nk, Dv] of all
    tokens of a step. `others` is everything else that the layer says."""

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
"""A call -> [T, Nq, Dv]. It is asked once for each layer, in their order."""


_attending: ContextVar[Attends] = ContextVar("attending")


class Unattended(Exception):
    """Why attention cannot be computed as a layer asks for it."""


@contextmanager
def attending(attends: Attends) -> Iterator[None]:
    """Forward passes in here have their layers' attention from `attends`."""
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
    """query [1, Nq, T, D], key and value [1, Nk, T, D] -> [1, T, Nq, D] and no weights."""
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
"""Where masks are asked which tokens they allow. A window that is larger than the last one is
taken for none."""


def _mask(
    q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], **others: Any
) -> torch.Tensor:
    """Nothing in the shape of a mask, with the `window` that it says."""
    found = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    found.window = _window(mask_function)  # type: ignore[attr-defined]
    return found


def window_of(call: Call) -> int | None:
    """The window of a recorded call; None: full attention. Raises `Unattended`."""
    if call.mask is None:
        raise Unattended("it makes masks of its own, or none")
    if not hasattr(call.mask, "window"):
        raise Unattended("it changes its masks")
    found: int | None = call.mask.window
    return found


def _window(mask_function: Callable[..., torch.Tensor]) -> int | None:
    """How many tokens each one sees, itself among them; None: all before it."""
    zero, seen = torch.tensor(0), []
    for position in POSITIONS:
        keys = torch.arange(position + 2)
        try:
            allowed = mask_function(zero, zero, torch.tensor(position), keys)
        except Exception as error:
            raise Unattended("its masks depend on more than positions") from error
        allowed = allowed.broadcast_to(keys.shape)
        if bool(allowed[-1]):
            raise Unattended("its attention is not causal")
        count = int(allowed.sum())
        if not bool(allowed[position + 1 - count : position + 1].all()):
            raise Unattended("it attends to other tokens than those before, or in a window")
        seen.append(count)
    window = max(seen)
    if seen != [min(window, position + 1) for position in POSITIONS]:
        raise Unattended("it attends in chunks, or in windows that differ from token to token")
    return None if window == POSITIONS[-1] + 1 else window


AttentionInterface.register(ATTENTION, _attend)
AttentionInterface.register(RECORDED, _attend)
AttentionMaskInterface.register(RECORDED, _mask)
