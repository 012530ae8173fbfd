"""Measurements of the GPU path: kernels, steps and serving, beside the device's ceilings.

    python -m benchmarks.gpu --json FILE [--quick] [--only PART ...]
    python -m benchmarks.gpu --tune [KERNEL ...]

Every part has its share of the budget and is written when it ends. A part that fails or hangs is
recorded with its error, and the others are measured. `--quick` measures less of everything, in a
minute or two. `--tune` times the launch settings of the kernels (all, or those named) and writes
this architecture's table instead, as far as the budget reaches.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from typing import Any

from benchmarks.common import Report, new_parser
from benchmarks.gpu.parts import LEAST_SECONDS, NO_TIME, PARTS, run_part, run_parts_apart

BUDGET = 200.0
"""Seconds for everything, unless told otherwise: a borrowed machine's patience."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser("gpu", __doc__)
    option = parser.add_argument
    option("--quick", action="store_true", help="fewer cases and repetitions")
    option("--only", nargs="+", choices=list(PARTS), metavar="PART", default=None)
    option("--budget", type=float, default=BUDGET, help="seconds for everything")
    option("--device", default="cuda", help="cuda, or cpu with --smoke")
    option(
        "--smoke", action="store_true", help="tiny sizes: every line runs, the figures mean nothing"
    )
    option("--tune", nargs="*", metavar="KERNEL", help="time launch settings, write the table")
    found = parser.parse_args(arguments)
    if found.device == "cpu" and not found.smoke:
        parser.error("--device cpu runs with --smoke only: there is nothing to measure")
    return found


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every requested part, and always the ceilings, within the budget."""
    from benchmarks.gpu.targets import judge

    parts: dict[str, Any] = {}
    report = Report("gpu", arguments, "triton")
    report.found |= {"gpu": gpu_environment(arguments.device), "parts": parts}
    wanted = [name for name in PARTS if name in ("ceilings", *(arguments.only or PARTS))]

    def tell(name: str, found: dict[str, Any]) -> None:
        print(f"gpu: {name}: {found.get('error', 'done')}", file=sys.stderr, flush=True)
        parts[name] = found
        report.found["targets"] = judge(parts)
        report.write()

    if not arguments.smoke:
        run_parts_apart(wanted, arguments, arguments.budget, tell)
        return report.found
    deadline = time.monotonic() + arguments.budget
    for name in wanted:
        late = deadline - time.monotonic() < LEAST_SECONDS
        tell(name, {"cases": [], "error": NO_TIME} if late else run_part(name, arguments, {}))
    return report.found


def gpu_environment(device: str) -> dict[str, Any]:
    """Return the GPU, its driver and clocks, and the libraries' versions."""
    import torch

    found: dict[str, Any] = {"cuda": torch.version.cuda}
    if device != "cuda":
        return found | {"name": device}
    of = torch.cuda.get_device_properties(0)
    found |= {"name": of.name, "capability": f"{of.major}.{of.minor}"}
    found |= {"multiprocessors": of.multi_processor_count, "memory_gib": of.total_memory / 2**30}
    found["l2_mib"] = of.L2_cache_size / 2**20
    # Only the driver's tool knows these facts about CUDA's first GPU.
    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv", "--id=0"]
    if shutil.which("nvidia-smi"):
        done = subprocess.run(command, text=True, capture_output=True)
        found["nvidia_smi"] = done.stdout.splitlines()
    return found


def summary(result: dict[str, Any]) -> list[str]:
    """Print the targets and the failures, a line each."""
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
    """Return 0, or 1 if a part failed as a whole."""
    arguments = parse_arguments(argv)
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: this torch build or machine has no CUDA", file=sys.stderr)
        return 2
    if arguments.tune is not None:
        if arguments.device == "cpu":
            os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
        from benchmarks.gpu import tune

        device = torch.device(arguments.device)
        return tune.main(device, arguments.smoke, arguments.tune, arguments.budget)
    result = measure_all(arguments)
    print("\n".join(summary(result)))
    return 1 if any("error" in part for part in result["parts"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
