"""Targets of the GPU path, compared with a run's figures. The targets are for an H200.

`benchmarks/results/README.md` describes each target.
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
    """The worst figure (field `name`) of a part's cases that are `wanted`, against `bound`."""

    part: str
    name: str
    sign: str
    bound: float
    wanted: Callable[[Case], bool]

    def judge(self, parts: Parts) -> dict[str, Any]:
        """Return {target, value, met}."""
        cases = parts.get(self.part, {}).get("cases", ())
        found = [case.get(self.name) for case in cases if "error" not in case and self.wanted(case)]
        worst = min if self.sign == ">=" else max
        value = worst((value for value in found if value is not None), default=None)
        return aim(value, self.sign, self.bound)


def _has(**fields: Any) -> Callable[[Case], bool]:
    return lambda case: all(case.get(name) == value for name, value in fields.items())


def _big_decode(case: Case) -> bool:
    many = case["context"] >= LONG and case["rows"] >= MANY_ROWS
    return many and case["cache"] == "bfloat16"


def _long_8b(case: Case) -> bool:
    return case["new"] >= LONG and case["shape"] == "8B"


_DEVICE = {"what": "constrained", "masks": "device"}
_8B = {"shape": "8B", "graphs": True, "bits": "none"}
TARGETS = {
    "decode_step_8b_1_row_share": Target(
        "decode_step", "floor_share", ">=", 0.80, _has(**_8B, rows=1)
    ),
    "decode_step_8b_64_rows_share": Target(
        "decode_step", "floor_share", ">=", 0.80, _has(**_8B, rows=64)
    ),
    "prefill_8b_share": Target("prefill", "share", ">=", 0.55, _has(shape="8B")),
    "tree_attention_speed_up": Target(
        "tree_attention", "speed_up", ">=", 3.0, _has(rows=64, prefix=4096)
    ),
    "constrained_over_unconstrained": Target(
        "serving", "over_unconstrained", ">=", 0.97, _has(**_DEVICE, shape="1B")
    ),
    "gpu_idle_share": Target(
        "serving", "idle_share", "<=", 0.03, _has(what="idle", overlap=True, shape="1B")
    ),
    "decode_attention_share": Target("decode_attention", "share", ">=", 0.85, _big_decode),
    "extend_attention_share": Target("extend_attention", "share", ">=", 0.60, _long_8b),
}


def judge(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return name -> {target, value, met}."""
    return {name: target.judge(parts) for name, target in TARGETS.items()}
