"""What the machine can do at most: the rate of a big matrix product, and of reading memory.

    python -m benchmarks.peers.ceilings [--threads N] [--dtype bfloat16] [--seconds S]

prints one JSON object. It runs in a process of its own, so that no library's threads stay behind in
the one that measures. Best of many: noise only slows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.common import ROOT


def measure(threads: int, dtype: str, seconds: float) -> dict[str, Any]:
    """{"gemm_rate" flop/s, "gemm_by", "gemm_rates", "read_bandwidth" bytes/s}."""
    import torch

    from rootlace.kernels.native.build import NativeUnavailable
    from rootlace.kernels.native.library import load
    from rootlace.runtime.doctor.ceilings import READ_BYTES, product_rates, read_bandwidth

    try:
        library = load()
    except NativeUnavailable:  # there is no compiler
        library = None
    rates = product_rates(getattr(torch, dtype), threads, seconds, library)
    by = max(rates, key=lambda name: rates[name])
    return {
        "threads": threads,
        "dtype": dtype,
        "gemm_rate": rates[by],
        "gemm_by": by,
        "gemm_rates": rates,
        "read_bandwidth": read_bandwidth(threads, seconds, READ_BYTES),
    }


def measure_apart(threads: int, dtype: str, seconds: float) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.peers.ceilings", "--threads", str(threads)]
    command += ["--dtype", dtype, "--seconds", str(seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def best_of(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The highest of several results of `measure`, each number by itself."""
    rates: dict[str, float] = {}
    for one in measured:
        for name, rate in one["gemm_rates"].items():
            rates[name] = max(rate, rates.get(name, 0.0))
    by = max(rates, key=lambda name: rates[name])
    return {
        **measured[0],
        "gemm_rate": rates[by],
        "gemm_by": by,
        "gemm_rates": rates,
        "read_bandwidth": max(one["read_bandwidth"] for one in measured),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.threads, arguments.dtype, arguments.seconds)))


if __name__ == "__main__":
    main()
