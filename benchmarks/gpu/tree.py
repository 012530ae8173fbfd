"""Tree attention beside the same rows each reading its whole context for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.paged import LLAMA_8B, SMOKE, HeadShape, Paged, bound_plan, make_paged
from benchmarks.gpu.setting import Report, Setting
from benchmarks.gpu.timing import Clock
from rootlace.kernels import KernelSet

PREFIXES = (1024, 2048, 4096, 8192, 16384, 32768)
ROWS = (8, 16, 32, 64, 128, 256)
QUICK_PREFIXES, QUICK_ROWS = (1024, 8192), (8, 64)
OWN = 64
"""Tokens that each row has for itself behind the prefix."""
NEVER = 1 << 62


def measure(setting: Setting, report: Report) -> None:
    """One prefix, many rows under it. Both sides read the same memory: where the prefix fits into
    the L2 cache, per-row decode reads it from there, as it would in serving."""
    prefixes: tuple[int, ...] = PREFIXES
    counts: tuple[int, ...] = ROWS
    if setting.quick:
        prefixes, counts = QUICK_PREFIXES, QUICK_ROWS
    if setting.smoke:
        prefixes, counts = (2048,), (3,)
    clock = Clock(setting.device)
    cases = [(prefix, rows) for prefix in prefixes for rows in counts]
    for prefix, rows in report.progress(cases, "tree attention"):
        with report.attempt(prefix=prefix, rows=rows):
            shape = SMOKE if setting.smoke else LLAMA_8B
            report.add(
                {"prefix": prefix, "rows": rows, **_case(setting, clock, shape, prefix, rows)}
            )


def _case(
    setting: Setting, clock: Clock, shape: HeadShape, prefix: int, rows: int
) -> dict[str, Any]:
    lengths = [prefix + OWN - (i % 8) for i in range(rows)]
    paged = make_paged([(1, n) for n in lengths], shape, setting.device, prefix=prefix)
    kernels = setting.kernels
    calls = {
        "tree": _call(kernels, paged, bound_plan(kernels, paged.batch)),
        "per row": _call(kernels, paged, per_row_plan(kernels, paged)),
    }
    found = clock.compare(calls, setting.repeats(20), capture=setting.on_gpu)
    moved = paged.decode_bytes(shape)
    rate = moved / found["tree"].median
    return {
        "own": OWN,
        "tree_us": found["tree"].median * 1e6,
        "per_row_us": found["per row"].median * 1e6,
        "speed_up": found["per row"].median / found["tree"].median,
        "bytes": moved,
        "share": setting.share(rate, "copy_bandwidth"),
    }


def per_row_plan(kernels: KernelSet, paged: Paged) -> Any:
    """The plan of a cost rule that finds nothing worth sharing."""
    if kernels.name == "reference":
        with patch("rootlace.kernels.reference.shared_prefix.MIN_SAVED", NEVER):
            return bound_plan(kernels, paged.batch)
    from rootlace.kernels.triton.attention import AttentionRules, plan_attention
    from rootlace.kernels.triton.shared_nodes import SharingRule

    batch = paged.batch
    rules = AttentionRules(sharing=SharingRule(node_bytes=NEVER))
    # Not as one of a graph's family: that would launch the kernel for shared nodes for nothing.
    plan = plan_attention(batch, None, rules=rules)
    return plan.bind([torch.from_numpy(array).to(batch.device) for array in plan.arrays])


def _call(kernels: KernelSet, paged: Paged, plan: Any) -> Callable[[], object]:
    def call() -> object:
        return kernels.paged_attention(paged.q, paged.k_cache, paged.v_cache, plan)

    return call
