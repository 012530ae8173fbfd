"""A device's sampler in plain torch: greedy and temperature can be captured, the rest is the host's
sampler, which waits."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.contracts.plan import SampleRow
from rootlace.runtime.model.executor.sources import resolved
from rootlace.runtime.model.sampling.mask_tables import MaskTables
from rootlace.runtime.model.sampling.sampler import sample
from rootlace.runtime.model.sampling.uniform import uniforms


@dataclass(frozen=True)
class FakePlan:
    rows: Sequence[SampleRow]
    kind: Hashable | None
    arrays: dict[str, np.ndarray]


class FakeSampler:
    def __init__(self, vocab_size: int) -> None:
        self._masks = MaskTables(vocab_size, "cpu")

    def plan(self, rows: Sequence[SampleRow], count: int) -> FakePlan:
        temperature = np.zeros(count, np.float32)
        uniform = np.zeros(count, np.float64)
        for index, row in enumerate(rows):
            temperature[index] = row.params.temperature
            uniform[index] = uniforms([row.params.seed or 0], [row.position])[0]
        kind = "plain" if all(_is_plain(row) for row in rows) else None
        return FakePlan(rows, kind, {"temperature": temperature, "uniform": uniform})

    def plan_like(self, plan: FakePlan, count: int) -> FakePlan:
        assert plan.kind == "plain"
        return self.plan([], count)

    def run(
        self,
        plan: FakePlan,
        logits: torch.Tensor,
        arrays: dict[str, torch.Tensor],
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> None:
        if plan.kind is None:
            rows = resolved(plan.rows, tokens.numpy().copy())
            found = torch.from_numpy(sample(logits[: len(rows)], rows, REFERENCE, self._masks))
            count = len(rows)
        else:
            count = len(logits)
            temperature = arrays["temperature"].double().unsqueeze(1)
            below = logits.double() - logits.double().amax(1, keepdim=True)
            cumulative = (below / temperature.clamp(min=1e-9)).exp().cumsum(1)
            target = arrays["uniform"].unsqueeze(1) * cumulative[:, -1:]
            drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
            found = torch.where(arrays["temperature"] > 0, drawn, logits.argmax(1)).int()
        tokens[:count].copy_(found)
        scores = torch.log_softmax(logits[:count], 1)
        chosen = found.long().clamp(min=0).unsqueeze(1)
        logprobs[:count].copy_(scores.gather(1, chosen).squeeze(1))


def _is_plain(row: SampleRow) -> bool:
    params = row.params
    return (
        row.mask is None
        and row.automaton is None
        and not row.banned
        and not params.logit_bias
        and (params.top_k, params.top_p, params.min_p) == (-1, 1.0, 0.0)
        and (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        == (1.0, 0.0, 0.0)
    )
