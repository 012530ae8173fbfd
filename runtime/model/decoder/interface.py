"""What a decoder gets for a step, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


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


class Ranks(Protocol):
    """The processes that a model is divided among (`parallel`). All of them call the same methods
    in the same order, with tensors of the same shapes."""

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, of the same bits on every rank."""

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """That of rank 0."""

    @property
    def count(self) -> int:
        """How many there are."""


class MeetingRanks(Ranks, Protocol):
    """Ranks that wait for each other once each has its weights."""

    def agree(self, blocks: int) -> int:
        """Meet the others; the least number of KV blocks that any of them has room for."""
