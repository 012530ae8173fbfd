"""What a step costs, in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


class BadCost(ValueError):
    """A cost model that cannot be used; the message says which and why."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step, linear in what it does:

    `step + prefill * (prompt tokens computed) + decode * (decode rows)
    + context * (tokens of context that decode rows read)
    + pair * (pairs of a prompt token and a token it attends to)`.

    `max_step_tokens` is the budget of the engine it describes. `source` says where the figures come
    from, and whether they were measured.
    """

    step: float
    prefill: float
    decode: float = 0.0
    context: float = 0.0
    pair: float = 0.0
    max_step_tokens: int = 2048
    source: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise BadCost(f"{field.name} must be a number of seconds, not {value}")
        if self.max_step_tokens < 1 or self.step + self.prefill <= 0:
            raise BadCost("a step must take time and have room for a token")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


PRIOR = StepCost(step=2e-3, prefill=1e-4, decode=2e-4, context=1e-9, pair=1e-9)
"""What is believed of an engine while nothing is known."""


def mean_cost(costs: Sequence[StepCost]) -> StepCost:
    """Of engines that are alike, and of which each has measured its own."""
    names = ("step", "prefill", "decode", "context", "pair")
    means = {name: sum(getattr(one, name) for one in costs) / len(costs) for name in names}
    return replace(costs[0], **means)
