"""What activations are multiplied by: a matrix as it is, or one of small integers with scales.

`KernelSet.linear` multiplies by a `Weight`, whatever kind it is, and `KernelSet.weights` names the
kinds that it can. A new scheme is a new `Scheme`, and its kernels beside the reference's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Dense:
    """x W^T + bias, with W [outputs, inputs] in the activations' type."""

    matrix: torch.Tensor
    bias: torch.Tensor | None = None  # [outputs]

    @property
    def kind(self) -> str:
        return "dense"


@dataclass(frozen=True)
class Scheme:
    """Symmetric integers of `bits`: a weight is its integer times the scale of its group, `group`
    consecutive inputs of one output (None: all of them)."""

    bits: Literal[4, 8]
    group: int | None = None

    @property
    def largest(self) -> int:
        """The integers are -largest ... largest."""
        return (1 << (self.bits - 1)) - 1


@dataclass(frozen=True)
class Quantised:
    """Integers and scales of a W [outputs, inputs], by a `scheme`.

    values: int8 [outputs, inputs]; of four bits uint8 [outputs, inputs / 2], input 2i in the lower
    half of byte i, each half as two's complement. scales: [outputs, groups].
    """

    scheme: Scheme
    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None  # [outputs]

    @property
    def kind(self) -> str:
        return f"int{self.scheme.bits}"


Weight = Dense | Quantised


def tensors(weight: Weight) -> list[torch.Tensor]:
    """What a weight keeps in memory."""
    return [value for value in vars(weight).values() if isinstance(value, torch.Tensor)]


def unknown_kind(weights: Iterable[Weight], known: Iterable[str]) -> str | None:
    """The first kind of weights that is not among `known`; None if all are."""
    kinds = frozenset(known)
    return next((weight.kind for weight in weights if weight.kind not in kinds), None)
