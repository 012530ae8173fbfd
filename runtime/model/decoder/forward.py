"""What steps on a CPU are computed with: a plan's numbers in, hidden states out, then logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from rootlace.kernels import KernelSet
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.model.decoder.interface import StepDecoder
from rootlace.runtime.model.decoder.step_input import StepInputBuilder
from rootlace.runtime.model.sampling.automaton_table import Mask


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


class ReferenceForward:
    """A decoder in torch, on any device."""

    def __init__(
        self,
        decoder: StepDecoder,
        kernels: KernelSet,
        inputs: StepInputBuilder,
        cache: torch.Tensor,
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._inputs = inputs
        self._cache = cache

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    def run(self, plan: StepPlan) -> torch.Tensor:
        if len(plan.copies):
            source, target = self._inputs.copies(plan)
            cache = self._cache.view(-1, *self._cache.shape[2:])
            self._kernels.copy_slots(cache, source, target)
        if not plan.num_tokens:
            return self._cache.new_empty((0, self._decoder.hidden_size))
        return self._decoder.forward(self._inputs.build(plan), self._cache)

    def logits(self, hidden: torch.Tensor, masks: Sequence[Mask] = ()) -> torch.Tensor:
        return self._decoder.logits(hidden)

    def best(self, hidden: torch.Tensor, masks: Sequence[Mask] = ()) -> np.ndarray | None:
        return None
