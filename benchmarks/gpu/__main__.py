"""The GPU path in figures: kernels, steps and serving beside what the device can do at most.

    python -m benchmarks.gpu --json FILE [--quick] [--only PART ...]
    python -m benchmarks.gpu --tune [KERNEL ...]

Every part runs in a process of its own, with a time limit: one that fails or hangs is recorded with
its error, and the others are measured. `--quick` takes a minute or two: less of everything, in one
process. `--tune` times the launch settings of the kernels (all, or those named) and writes this
architecture's table instead, as far as the budget reaches.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, environment, write_json

BUDGET = 540.0
"""Seconds for everything, unless told otherwise: a borrowed machine's patience."""


@dataclass(frozen=True)
class Part:
    """`module:function` under `benchmarks.gpu`, and the seconds it may take."""

    place: str
    limit: float


PARTS = {
    "ceilings": Part("ceilings:measure", 60),
    "decode_attention": Part("attention:measure_decode", 150),
    "extend_attention": Part("attention:measure_extend", 150),
    "tree_attention": Part("tree:measure", 120),
    "decode_step": Part("decode_step:measure", 150),
    "idle": Part("idle:measure", 80),
    "constrained": Part("constrained:measure", 100),
    "pointwise": Part("pointwise:measure", 100),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", default=None)
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for everything")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --smoke")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes: every line runs, the figures mean nothing"
    )
    parser.add_argument(
        "--tune", nargs="*", metavar="KERNEL", help="time launch settings, write the table"
    )
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ceilings", type=json.loads, default={}, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if found.device == "cpu" and not found.smoke:
        parser.error("--device cpu runs with --smoke only: there is nothing to measure")
    return found


# ---------------------------------------------------------------- one part


def run_part(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure `arguments.part` in this process; what it raises is recorded."""
    import torch

    from benchmarks.gpu.setting import Report, Setting, describe, release

    setting = Setting(
        torch.device(arguments.device),
        smoke=arguments.smoke,
        quick=arguments.quick,
        ceilings=arguments.ceilings,
    )
    report = Report(arguments.into, bar=not arguments.smoke and sys.stderr.isatty())
    module, _, function = PARTS[arguments.part].place.partition(":")
    start = time.monotonic()
    try:
        measure = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        with torch.no_grad():
            measure(setting, report)
    except Exception as error:
        report.result["error"] = describe(error)
    report.set("seconds", round(time.monotonic() - start, 2))
    release(setting.device)
    return report.result


def run_part_apart(
    name: str, arguments: argparse.Namespace, ceilings: dict[str, float], limit: float
) -> dict[str, Any]:
    """Measure a part in a process of its own; what it wrote counts, however it ended."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "part.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--into", str(into)]
        command += ["--device", arguments.device, "--ceilings", json.dumps(ceilings)]
        command += ["--quick"] * arguments.quick + ["--smoke"] * arguments.smoke
        ended = ""
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=limit)
            if done.returncode:
                ended = f"its process ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit:.0f} s"
        result = json.loads(into.read_text()) if into.exists() else {"cases": []}
        if ended:
            result["error"] = ended
        return result


# ---------------------------------------------------------------- all of them


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every part that was asked for (the ceilings always), until the budget is spent."""
    from benchmarks.gpu.setting import progress
    from benchmarks.gpu.targets import judge

    deadline = time.monotonic() + arguments.budget
    wanted = [p for p in PARTS if not arguments.only or p in arguments.only or p == "ceilings"]
    parts: dict[str, Any] = {}
    result = {
        "environment": environment() | {"gpu": gpu_environment(arguments.device)},
        "options": {"quick": arguments.quick, "smoke": arguments.smoke, "only": arguments.only},
        "targets": judge(parts),
        "parts": parts,
    }
    for name in progress(wanted, "gpu", shown=not arguments.smoke):
        left = deadline - time.monotonic()
        ceilings = {
            key: value for key, value in parts.get("ceilings", {}).items() if key in CEILINGS
        }
        if left < 5:
            parts[name] = {"cases": [], "error": "no time was left for it"}
        elif arguments.smoke or arguments.quick:
            settings = {**vars(arguments), "part": name, "into": None, "ceilings": ceilings}
            parts[name] = run_part(argparse.Namespace(**settings))
        else:
            limit = min(PARTS[name].limit, left)
            parts[name] = run_part_apart(name, arguments, ceilings, limit)
        result["targets"] = judge(parts)
        if arguments.json:
            write_json(arguments.json, result)
    return result


CEILINGS = ("copy_bandwidth", "matmul_rate")


def gpu_environment(device: str) -> dict[str, Any]:
    """The GPU, its driver and clocks, and the libraries' versions."""
    import torch

    from benchmarks.common import package_version

    found: dict[str, Any] = {
        "triton": package_version("triton"),
        "cuda": torch.version.cuda,
    }
    if device != "cuda":
        return found | {"name": device}
    properties = torch.cuda.get_device_properties(0)
    found |= {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
    }
    return found | nvidia_smi()


def nvidia_smi() -> dict[str, str]:
    """What the driver's tool says of the GPU that CUDA calls the first; nothing where it fails."""
    fields = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in done.stdout.split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


# ---------------------------------------------------------------- what is printed


def summary(result: dict[str, Any]) -> list[str]:
    """The targets, and what failed, a line each."""
    lines = []
    for name, found in result["targets"].items():
        value = "not measured" if found["value"] is None else f"{found['value']:.3f}"
        verdict = {None: "", True: "met", False: "MISSED"}[found["met"]]
        lines.append(f"{name:34} {found['target']:>8}  {value:>12}  {verdict}")
    for name, part in result["parts"].items():
        if "error" in part:
            lines.append(f"{name}: {part['error']}")
        for case in part.get("cases", ()):
            if "error" in case:
                what = ", ".join(f"{k} {v}" for k, v in case.items() if k != "error")
                lines.append(f"{name} ({what}): {case['error']}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """0; 1 where a part failed as a whole."""
    arguments = parse_arguments(argv)
    if arguments.part:
        return 1 if "error" in run_part(arguments) else 0
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: this torch build or machine has no CUDA", file=sys.stderr)
        return 2
    if arguments.tune is not None:
        from benchmarks.gpu import tune

        device = torch.device(arguments.device)
        return tune.main(device, arguments.smoke, arguments.tune, arguments.budget)
    result = measure_all(arguments)
    print("\n".join(summary(result)))
    return 1 if any("error" in part for part in result["parts"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
