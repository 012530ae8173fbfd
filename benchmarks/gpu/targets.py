"""What the GPU path aims at, and how the figures of a run compare. The aims are for an H200.

`benchmarks/results/README.md` says what each target is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common import aim
from benchmarks.gpu.attention import LONG, MANY_ROWS

Case = Mapping[str, Any]
Parts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Target:
    """The worst figure (the field `name`) of a part's cases that are `wanted`, against `bound`."""

    part: str
    name: str
    sign: str
    bound: float
    wanted: Callable[[Case], bool]

    def judge(self, parts: Parts) -> dict[str, Any]:
        """{target, value, met}."""
        cases = parts.get(self.part, {}).get("cases", ())
        found = [case.get(self.name) for case in cases if "error" not in case and self.wanted(case)]
        worst = min if self.sign == ">=" else max
        value = worst((value for value in found if value is not None), default=None)
        return aim(value, self.sign, self.bound)


def _has(**fields: Any) -> Callable[[Case], bool]:
    return lambda case: all(case[name] == value for name, value in fields.items())


def _big_decode(case: Case) -> bool:
    many = case["context"] >= LONG and case["rows"] >= MANY_ROWS
    return many and case["cache"] == "bfloat16"


def _long_8b(case: Case) -> bool:
    return case["new"] >= LONG and case["shape"] == "8B"


_WIDE = _has(rows=64, prefix=8192)
_SINGLE_ROW = _has(shape="8B", rows=1, graphs=True, bits="none")
_OVERLAP = _has(rows=64, overlap=True)
TARGETS = {
    "decode_attention_share": Target("decode_attention", "share", ">=", 0.85, _big_decode),
    "extend_attention_share": Target("extend_attention", "share", ">=", 0.60, _long_8b),
    "tree_attention_speed_up": Target("tree_attention", "speed_up", ">=", 10.0, _WIDE),
    "decode_step_8b_over_floor": Target("decode_step", "over_floor", "<=", 1.15, _SINGLE_ROW),
    "gpu_idle_share": Target("idle", "idle_share", "<=", 0.03, _OVERLAP),
    "constrained_over_unconstrained": Target(
        "constrained", "over_unconstrained", ">=", 0.98, _has(shape="1B")
    ),
}


def judge(parts: Parts) -> dict[str, dict[str, Any]]:
    """name -> {target, value, met}."""
    return {name: target.judge(parts) for name, target in TARGETS.items()}
