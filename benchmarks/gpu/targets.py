"""What the GPU path aims at, and how the figures of a run compare. The aims are for an H200."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.attention import LONG, MANY_ROWS, OURS

Parts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Target:
    """`value(parts)` is compared with `bound`; None where it was not measured."""

    what: str
    bound: float
    at_least: bool
    value: Callable[[Parts], float | None]

    def judge(self, parts: Parts) -> dict[str, Any]:
        """{target, value, met}; value and met are None where there is no measurement."""
        value = self.value(parts)
        if value is not None and not math.isfinite(value):
            value = None
        met = None
        if value is not None:
            met = value >= self.bound if self.at_least else value <= self.bound
        sign = ">=" if self.at_least else "<="
        return {
            "what": self.what,
            "target": f"{sign} {self.bound:g}",
            "value": value,
            "met": met,
        }


def _cases(parts: Parts, part: str) -> list[Mapping[str, Any]]:
    return [case for case in parts.get(part, {}).get("cases", ()) if "error" not in case]


def _lowest(found: list[float | None]) -> float | None:
    known = [value for value in found if value is not None]
    return min(known) if known else None


def _ours(case: Mapping[str, Any]) -> float | None:
    share = case["kernels"].get(OURS, {}).get("share")
    return None if share is None else float(share)


def decode_share(parts: Parts) -> float | None:
    """The lowest of the long, wide cases with a bfloat16 cache."""
    return _lowest(
        [
            _ours(case)
            for case in _cases(parts, "decode_attention")
            if case["context"] >= LONG and case["rows"] >= MANY_ROWS and case["cache"] == "bfloat16"
        ]
    )


def extend_share(parts: Parts) -> float | None:
    """The lowest of the long cases with heads of 128."""
    return _lowest(
        [
            _ours(case)
            for case in _cases(parts, "extend_attention")
            if case["new"] >= LONG and case["shape"] == "8B"
        ]
    )


def tree_speed_up(parts: Parts) -> float | None:
    for case in _cases(parts, "tree_attention"):
        if (case["rows"], case["prefix"]) == (64, 8192):
            return float(case["speed_up"])
    return None


def step_over_floor(parts: Parts) -> float | None:
    for case in _cases(parts, "decode_step"):
        if (case["shape"], case["rows"], case["graphs"]) == ("8B", 1, True):
            value = case["over_floor"]
            return None if value is None else float(value)
    return None


def idle_share(parts: Parts) -> float | None:
    for case in _cases(parts, "idle"):
        if case["overlap"]:
            between = case.get("idle_share_between_steps")
            value = case.get("idle_share") if between is None else between
            return None if value is None else float(value)
    return None


def constrained_ratio(parts: Parts) -> float | None:
    if not any(case["shape"] == "1B" for case in _cases(parts, "constrained")):
        return None
    value = parts.get("constrained", {}).get("constrained_over_unconstrained")
    return None if value is None else float(value)


TARGETS: dict[str, Target] = {
    "decode_attention_share": Target(
        "decode attention, 16 rows and more of 4k and more: share of the copy bandwidth",
        0.85,
        True,
        decode_share,
    ),
    "extend_attention_share": Target(
        "extend attention, 4k and more: share of the bf16 matmul rate", 0.60, True, extend_share
    ),
    "tree_attention_speed_up": Target(
        "tree attention over per-row decode, 64 rows with 8k in common", 10.0, True, tree_speed_up
    ),
    "decode_step_8b_over_floor": Target(
        "decode step of the 8B shape, batch 1: time over that of its bytes",
        1.15,
        False,
        step_over_floor,
    ),
    "gpu_idle_share": Target(
        "idle share of the GPU between decode steps, 1B shape, 64 rows", 0.03, False, idle_share
    ),
    "constrained_over_unconstrained": Target(
        "decode tokens/s with a constraint over without, 1B shape, 64 rows",
        0.98,
        True,
        constrained_ratio,
    ),
}


def judge(parts: Parts) -> dict[str, dict[str, Any]]:
    """name -> {what, target, value, met}."""
    return {name: target.judge(parts) for name, target in TARGETS.items()}
