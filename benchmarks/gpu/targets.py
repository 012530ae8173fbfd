"""What the GPU path aims at, and how the figures of a run compare. The aims are for an H200.

`benchmarks/results/README.md` says what each target is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.common import aim
from benchmarks.gpu.attention import LONG, MANY_ROWS
from benchmarks.gpu.timing import OURS

Case = Mapping[str, Any]
Parts = Mapping[str, Mapping[str, Any]]
Wanted = Callable[[Case], bool]
Found = Callable[[Parts], float | None]
"""What a run has for a target; None where it was not measured."""


def _cases(parts: Parts, part: str, wanted: Wanted) -> list[Case]:
    cases = parts.get(part, {}).get("cases", ())
    return [case for case in cases if "error" not in case and wanted(case)]


def _lowest_share(part: str, wanted: Wanted) -> Found:
    """The lowest share of its ceiling that our kernel reaches in the cases wanted."""

    def found(parts: Parts) -> float | None:
        shares = [
            case["kernels"].get(OURS, {}).get("share") for case in _cases(parts, part, wanted)
        ]
        return min((share for share in shares if share is not None), default=None)

    return found


def _field(part: str, name: str, wanted: Wanted) -> Found:
    """What the one case wanted has in the field `name`."""
    return lambda parts: next((case.get(name) for case in _cases(parts, part, wanted)), None)


def _constrained_ratio(parts: Parts) -> float | None:
    measured = _cases(parts, "constrained", lambda case: case["shape"] == "1B")
    return parts["constrained"].get("constrained_over_unconstrained") if measured else None


def _big_decode(case: Case) -> bool:
    many = case["context"] >= LONG and case["rows"] >= MANY_ROWS
    return many and case["cache"] == "bfloat16"


def _long_extend(case: Case) -> bool:
    return case["new"] >= LONG and case["shape"] == "8B"


def _wide_tree(case: Case) -> bool:
    return (case["rows"], case["prefix"]) == (64, 8192)


def _single_row(case: Case) -> bool:
    return (case["shape"], case["rows"], case["graphs"]) == ("8B", 1, True)


def _overlapping(case: Case) -> bool:
    return bool(case["overlap"]) and case["rows"] == 64


TARGETS: dict[str, tuple[str, float, Found]] = {
    "decode_attention_share": (">=", 0.85, _lowest_share("decode_attention", _big_decode)),
    "extend_attention_share": (">=", 0.60, _lowest_share("extend_attention", _long_extend)),
    "tree_attention_speed_up": (">=", 10.0, _field("tree_attention", "speed_up", _wide_tree)),
    "decode_step_8b_over_floor": ("<=", 1.15, _field("decode_step", "over_floor", _single_row)),
    "gpu_idle_share": ("<=", 0.03, _field("idle", "idle_share", _overlapping)),
    "constrained_over_unconstrained": (">=", 0.98, _constrained_ratio),
}


def judge(parts: Parts) -> dict[str, dict[str, Any]]:
    """name -> {target, value, met}."""
    return {name: aim(found(parts), sign, bound) for name, (sign, bound, found) in TARGETS.items()}
