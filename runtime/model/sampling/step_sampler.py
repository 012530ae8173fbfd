"""What the executor of a device asks of a sampler: host work first, then launches that never wait.

The sampled tokens stay on the device: rows may say that the token before theirs is one of them
(`SampleRow.source`), and the next step's input is gathered from them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch

from rootlace.runtime.contracts.plan import SampleRow


class SamplingPlan(Protocol):
    """Host work of sampling the rows of one step."""

    @property
    def kind(self) -> Hashable | None:
        """Plans of one kind, and for one number of rows, are launched alike on arrays of equal
        shapes: what was captured for one serves the others. None: not to be captured."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """What is read on the device, by name."""


P = TypeVar("P", bound=SamplingPlan)


class StepSampler(Protocol[P]):
    """Samples one token per row."""

    def plan(self, rows: Sequence[SampleRow], count: int) -> P:
        """For `count` rows, of which those behind the given ones are empty."""

    def plan_like(self, plan: P, count: int) -> P:
        """For `count` empty rows, launched as `plan` is, which is of a kind."""

    def run(
        self,
        plan: P,
        logits: torch.Tensor,
        arrays: dict[str, torch.Tensor],
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> None:
        """logits [count, V], not changed -> the first `count` of tokens int32 (-1: the row has no
        distribution) and, where a row asks for it, of logprobs float32.

        Before, `tokens` holds what the step before found: `SampleRow.source` is an index into it.
        """
