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
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import ROOT

SIDE = 2048
"""Of the square product."""
READ_BYTES = 256 << 20


def best_seconds(work: Callable[[], object], seconds: float) -> float:
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def measure(threads: int, dtype: str, seconds: float) -> dict[str, Any]:
    """{"gemm_rate" flop/s, "gemm_by", "gemm_rates", "read_bandwidth" bytes/s}."""
    import torch

    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    with torch.inference_mode():
        x, weight = torch.randn(SIDE, SIDE).to(kind), torch.randn(SIDE, SIDE).to(kind)
        flops = 2.0 * SIDE**3
        rates = {"torch": flops / best_seconds(lambda: x @ weight.T, seconds)}
        native = _native_product(x, weight, threads)
        if native is not None:
            rates["native"] = flops / best_seconds(native, seconds)
        memory = torch.ones(READ_BYTES // 4)
        bandwidth = READ_BYTES / best_seconds(lambda: memory.sum(), seconds)
    by = max(rates, key=lambda name: rates[name])
    return {
        "threads": threads,
        "dtype": dtype,
        "gemm_rate": rates[by],
        "gemm_by": by,
        "gemm_rates": rates,
        "read_bandwidth": bandwidth,
    }


def _native_product(x: Any, weight: Any, threads: int) -> Callable[[], object] | None:
    """Our own kernel for the same product; None where there is no compiler."""
    from rootlace.kernels.native import library as native
    from rootlace.kernels.native.build import NativeUnavailable
    from rootlace.kernels.native.handles import Team
    from rootlace.kernels.native.linear import Epilogue, PackedLinear

    try:
        library = native.load()
    except NativeUnavailable:
        return None
    packed = PackedLinear(library, Team(library, threads), weight)
    out = x.new_empty(len(x), len(weight))
    return lambda: packed.multiply(Epilogue.STORE, x, out)


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
