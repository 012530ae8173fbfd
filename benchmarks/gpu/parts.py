"""The parts of the GPU benchmark, each of which can be measured in a process of its own.

Not in `__main__`: a process that is spawned could not import them from there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.setting import Findings, Setting, describe

PARTS = {
    # module:function under `benchmarks.gpu`, and its share of the time
    "ceilings": ("ceilings:measure", 30),
    "decode_attention": ("attention:measure_decode", 50),
    "extend_attention": ("attention:measure_extend", 50),
    "tree_attention": ("attention:measure_tree", 55),
    "products": ("products:measure", 30),
    "decode_step": ("decode_step:measure", 150),
    "idle": ("idle:measure", 120),
    "constrained": ("constrained:measure", 80),
    "pointwise": ("pointwise:measure", 30),
}


def limit_of(coming: Sequence[str], left: float) -> float:
    """Seconds that the first of the parts to come may take of those that are left: its share. So no
    part takes time from another, and what one leaves is for those after it."""
    shares = [PARTS[name][1] for name in coming]
    return max(left, 0.0) * shares[0] / sum(shares)


def run_part(
    name: str, arguments: argparse.Namespace, ceilings: dict[str, float], into: Path | None = None
) -> dict[str, Any]:
    """Measure a part in this process; what it raises is recorded."""
    device = torch.device(arguments.device)
    setting = Setting(device, arguments.smoke, arguments.quick, ceilings)
    findings = Findings(into)
    module, _, function = PARTS[name][0].partition(":")
    start = time.monotonic()
    try:
        measure = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        with torch.no_grad():
            measure(setting, findings)
    except Exception as error:
        findings.result["error"] = describe(error)
    findings.set("seconds", round(time.monotonic() - start, 2))
    setting.release()
    return findings.result


def run_part_apart(
    name: str, arguments: argparse.Namespace, ceilings: dict[str, float], limit: float
) -> dict[str, Any]:
    """Measure a part in a process of its own; what it wrote counts, however it ended."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "part.json"
        given = (name, arguments, ceilings, into)
        process = multiprocessing.get_context("spawn").Process(target=run_part, args=given)
        process.start()
        process.join(limit)
        ended = f"stopped after {limit:.0f} s" if process.is_alive() else ""
        process.kill()
        process.join()
        if process.exitcode and not ended:
            ended = f"its process ended with status {process.exitcode}"
        result: dict[str, Any] = json.loads(into.read_text()) if into.exists() else {"cases": []}
        return result | {"error": ended} if ended else result
