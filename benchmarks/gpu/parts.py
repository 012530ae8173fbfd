"""The parts of the GPU benchmark, measured in a process beside the command's.

    command ─ spawns ─▶ ceilings ─ decode_step ─ prefill ─ ...        each writes NAME.json
       └── a part that exceeds its limit: kill, and spawn ─▶ the parts after it

One process for all of them, as importing torch and setting CUDA up takes as long as a small part.
Not in `__main__`: a process that is spawned could not import the parts from there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.setting import Findings, Setting, describe, has_faulted

PARTS = {
    # module:function under `benchmarks.gpu`, and its share of the time; decisive parts come first
    "ceilings": ("ceilings:measure", 10),
    "decode_step": ("decode_step:measure", 45),
    "prefill": ("decode_step:measure_prefill", 20),
    "tree_attention": ("attention:measure_tree", 20),
    "serving": ("serving:measure", 75),
    "transformers": ("serving:measure_transformers", 30),
    "decode_attention": ("attention:measure_decode", 15),
    "extend_attention": ("attention:measure_extend", 15),
    "products": ("products:measure", 10),
    "pointwise": ("pointwise:measure", 10),
}
CEILINGS = ("copy_bandwidth", "matmul_rate")
START_SECONDS = 20.0
"""What a new process may take, beyond its first part's limit, to begin."""
LEAST_SECONDS = 5.0
"""With less left nothing is begun."""
NO_TIME = "no time was left for it"
POLL_SECONDS = 0.1


def limit_of(coming: Sequence[str], left: float) -> float:
    """Return the share in seconds of the first remaining part. A part takes no time from another,
    and unused time goes to later parts."""
    shares = [PARTS[name][1] for name in coming]
    return max(left, 0.0) * shares[0] / sum(shares)


def run_part(
    name: str, arguments: argparse.Namespace, ceilings: dict[str, float], into: Path | None = None
) -> dict[str, Any]:
    """Measure a part in this process; record its error if it raises."""
    device = torch.device(arguments.device)
    setting = Setting(device, arguments.smoke, arguments.quick, ceilings)
    findings = Findings(into)
    findings.set("begun", time.time())
    module, _, function = PARTS[name][0].partition(":")
    start = time.monotonic()
    try:
        measure = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        with torch.no_grad():
            measure(setting, findings)
    except Exception as error:
        findings.result["error"] = describe(error)
    setting.release()
    findings.set("seconds", round(time.monotonic() - start, 2))
    return findings.result


def run_parts(
    names: Sequence[str], arguments: argparse.Namespace, ceilings: dict[str, float], folder: Path
) -> None:
    """Measure parts in this process, one after the other, until the device has faulted."""
    for name in names:
        found = run_part(name, arguments, ceilings, folder / f"{name}.json")
        ceilings = ceilings | {key: found[key] for key in CEILINGS if key in found}
        if has_faulted():
            sys.exit(1)


def run_parts_apart(
    names: Sequence[str],
    arguments: argparse.Namespace,
    budget: float,
    tell: Callable[[str, dict[str, Any]], None],
) -> None:
    """Measure parts in other processes; `tell` gets each part's findings, however it ended."""
    deadline = time.monotonic() + budget
    left, ceilings = list(names), dict[str, float]()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while left:
            process = context.Process(target=run_parts, args=(left, arguments, ceilings, folder))
            process.start()
            told, ended = 0, ""
            part: dict[str, Any]
            while left and not ended:
                begun = time.monotonic()
                grace = 0.0 if told else START_SECONDS
                limit = limit_of(left, deadline - begun)
                if deadline - begun < LEAST_SECONDS:
                    part, ended = {}, NO_TIME
                else:
                    part, ended = _watch(process, folder / f"{left[0]}.json", limit, grace)
                if ended and not part and told and ended != NO_TIME and not process.is_alive():
                    break  # it ended behind the previous part, so another process measures the rest
                part = {"cases": [], **part} | ({"error": ended} if ended else {})
                part.pop("begun", None)
                ceilings |= {key: part[key] for key in CEILINGS if key in part}
                tell(left.pop(0), part)
                told += 1
            if not left and not ended:
                process.join(START_SECONDS)
            process.kill()
            process.join()


def _watch(
    process: multiprocessing.process.BaseProcess, into: Path, limit: float, grace: float
) -> tuple[dict[str, Any], str]:
    """Return a part's findings, and why it was stopped ("": it ended). `grace`: seconds beyond
    `limit` until it begins."""
    started = time.monotonic()
    while True:
        alive = process.is_alive()  # asked first, because it may end in between
        found = _read(into)
        if "seconds" in found:
            return found, ""
        if not alive:
            process.join()
            return found, f"its process ended with status {process.exitcode}"
        spent = time.monotonic() - started
        if spent > limit + (0.0 if found else grace):
            process.kill()
            return found, f"stopped after {spent:.0f} s"
        time.sleep(POLL_SECONDS)


def _read(path: Path) -> dict[str, Any]:
    """Return the findings written so far; empty before the part begins, or within a write."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return found
