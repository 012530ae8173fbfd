"""What came of a load: spreads of times, rates, errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, NamedTuple

from rootlace.cli.bench.sending import Timed


class Spread(NamedTuple):
    """Of some times, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ranked = sorted(values)
        return cls(fmean(ranked), *(_quantile(ranked, share) for share in (0.5, 0.9, 0.99, 1.0)))


@dataclass(frozen=True)
class Figures:
    """`spreads` are empty where every request failed."""

    timed: list[Timed]
    spreads: dict[str, Spread]
    rates: dict[str, float]
    errors: dict[str, int]
    asked: dict[str, Any]
    """What was asked of which server, and when."""

    @classmethod
    def of(cls, timed: list[Timed], asked: dict[str, Any] | None = None) -> Figures:
        good = [one for one in timed if not one.error]
        spreads: dict[str, Spread] = {}
        if good:
            spreads["first token, ms"] = Spread.of([one.first for one in good])
            several = [one.between for one in good if one.output_tokens > 1]
            if several:
                spreads["between tokens, ms"] = Spread.of(several)
            spreads["whole answer, ms"] = Spread.of([one.whole for one in good])
        begun = min((one.sent for one in timed), default=0.0)
        seconds = max(max((one.ended for one in timed), default=0.0) - begun, 1e-9)
        prompts = sum(one.prompt_tokens for one in good)
        outputs = sum(one.output_tokens for one in good)
        rates = {
            "requests": float(len(good)),
            "seconds": seconds,
            "requests per second": len(good) / seconds,
            "prompt tokens per second": prompts / seconds,
            "output tokens per second": outputs / seconds,
            "cached prompt tokens, %": 100
            * sum(one.cached_tokens for one in good)
            / max(prompts, 1),
        }
        return cls(
            timed, spreads, rates, dict(Counter(o.error for o in timed if o.error)), asked or {}
        )

    def terms(self) -> str:
        """What was asked, in a line, but for model and server."""
        names = [name for name in self.asked if name not in ("model", "url")]
        return ", ".join(f"{name} {self.asked[name]}" for name in names)

    def as_json(self) -> dict[str, Any]:
        """Everything, times in seconds."""
        return {
            "asked": self.asked,
            "rates": self.rates,
            "spreads": {
                name.removesuffix(", ms"): spread._asdict() for name, spread in self.spreads.items()
            },
            "errors": self.errors,
            "requests": [asdict(one) for one in self.timed],
        }


def _quantile(ranked: Sequence[float], share: float) -> float:
    """By the nearest rank."""
    return ranked[min(max(round(share * len(ranked) + 0.5) - 1, 0), len(ranked) - 1)]
