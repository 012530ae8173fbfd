"""What the GPU path aims at, and how the figures of a run compare. The aims are for an H200."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common import aim
from benchmarks.gpu.attention import LONG, MANY_ROWS, OURS

Case = Mapping[str, Any]
Parts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Target:
    """`value(parts)` is compared with `bound`; None where it was not measured."""

    what: str
    sign: str
    bound: float
    value: Callable[[Parts], float | None]

    def judge(self, parts: Parts) -> dict[str, Any]:
        return {"what": self.what, **aim(self.value(parts), self.sign, self.bound)}


def _cases(parts: Parts, part: str, wanted: Callable[[Case], bool]) -> Iterable[Case]:
    for case in parts.get(part, {}).get("cases", ()):
        if "error" not in case and wanted(case):
            yield case


def _lowest_share(part: str, wanted: Callable[[Case], bool]) -> Callable[[Parts], float | None]:
    """The lowest share of its ceiling that our kernel reaches in the cases wanted."""

    def value(parts: Parts) -> float | None:
        found = [case["kernels"].get(OURS, {}).get("share") for case in _cases(parts, part, wanted)]
        return min((share for share in found if share is not None), default=None)

    return value


def _field(part: str, name: str, wanted: Callable[[Case], bool]) -> Callable[[Parts], float | None]:
    """What the one case wanted has in the field `name`."""
    return lambda parts: next((case.get(name) for case in _cases(parts, part, wanted)), None)


def _idle_share(parts: Parts) -> float | None:
    """Between steps where graphs are replayed, of all the time where none is."""
    case = next(iter(_cases(parts, "idle", lambda case: case["overlap"])), {})
    between: float | None = case.get("idle_share_between_steps")
    return case.get("idle_share") if between is None else between


def _constrained_ratio(parts: Parts) -> float | None:
    measured = any(_cases(parts, "constrained", lambda case: case["shape"] == "1B"))
    return parts["constrained"].get("constrained_over_unconstrained") if measured else None


TARGETS: dict[str, Target] = {
    "decode_attention_share": Target(
        "decode attention, 16 rows and more of 4k and more: share of the copy bandwidth",
        *(">=", 0.85),
        _lowest_share(
            "decode_attention",
            lambda case: (
                case["context"] >= LONG
                and case["rows"] >= MANY_ROWS
                and case["cache"] == "bfloat16"
            ),
        ),
    ),
    "extend_attention_share": Target(
        "extend attention, 4k and more, heads of 128: share of the bf16 matmul rate",
        *(">=", 0.60),
        _lowest_share(
            "extend_attention", lambda case: case["new"] >= LONG and case["shape"] == "8B"
        ),
    ),
    "tree_attention_speed_up": Target(
        "tree attention over per-row decode, 64 rows with 8k in common",
        *(">=", 10.0),
        _field(
            "tree_attention",
            "speed_up",
            lambda case: (case["rows"], case["prefix"]) == (64, 8192),
        ),
    ),
    "decode_step_8b_over_floor": Target(
        "decode step of the 8B shape, batch 1: time over that of its bytes",
        *("<=", 1.15),
        _field(
            "decode_step",
            "over_floor",
            lambda case: (case["shape"], case["rows"], case["graphs"]) == ("8B", 1, True),
        ),
    ),
    "gpu_idle_share": Target(
        "idle share of the GPU between decode steps, 1B shape, 64 rows", "<=", 0.03, _idle_share
    ),
    "constrained_over_unconstrained": Target(
        "decode tokens/s with a constraint over without, 1B shape, 64 rows",
        *(">=", 0.98),
        _constrained_ratio,
    ),
}


def judge(parts: Parts) -> dict[str, dict[str, Any]]:
    """name -> {what, target, value, met}."""
    return {name: target.judge(parts) for name, target in TARGETS.items()}
