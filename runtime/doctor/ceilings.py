"""The most that a machine can do: the rate of a big matrix product, the rate of reading memory.

Best of many tries: noise only slows.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.linear import Epilogue, PackedLinear

SIDE = 2048
"""Of the square product."""
GPU_SIDE = 8192
READ_BYTES = 256 << 20
"""More than caches hold, as a rule."""
GPU_READ_BYTES = 1 << 30
TRIES = 2
"""At least; the first one, which maps memory and wakes threads, does not count."""


@dataclass(frozen=True)
class Ceilings:
    """FLOP/s of a product, bytes/s of reading."""

    product_rate: float
    read_bandwidth: float


def best_seconds(work: Callable[[], object], seconds: float) -> float:
    """Of one call, among those of so many seconds and at least `TRIES`."""
    work()
    best, tries, end = float("inf"), 0, time.perf_counter() + seconds
    while tries < TRIES or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        tries += 1
    return best


def product_rates(
    dtype: torch.dtype, threads: int, seconds: float, library: ctypes.CDLL | None
) -> dict[str, float]:
    """FLOP/s of a square product on a CPU: "torch" (oneDNN, as a rule) and, with a `library`,
    "native". Leaves torch with that many threads."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        x, weight = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
        flops = 2.0 * SIDE**3
        rates = {"torch": flops / best_seconds(lambda: x @ weight.T, seconds)}
        if library is not None:
            packed = PackedLinear(library, Team(library, threads), weight)
            out = torch.empty_like(x)
            work = lambda: packed.multiply(Epilogue.STORE, x, out)  # noqa: E731
            rates["native"] = flops / best_seconds(work, seconds)
    return rates


def read_bandwidth(threads: int, seconds: float, size: int) -> float:
    """Bytes/s of reading the same `size` bytes of main memory again and again: as few as a cache
    holds come from there. Leaves torch with that many threads."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        memory = torch.ones(max(size // 4, 1))
        return memory.nbytes / best_seconds(memory.sum, seconds)


def gpu_ceilings(device: torch.device, dtype: torch.dtype, seconds: float) -> Ceilings:
    """Of a GPU, by torch's product and by a copy, which reads and writes as many bytes."""

    def timed(work: Callable[[], object]) -> float:
        def run() -> None:
            work()
            torch.cuda.synchronize(device)

        return best_seconds(run, seconds)

    with torch.inference_mode():
        x, weight = (torch.randn(GPU_SIDE, GPU_SIDE, device=device).to(dtype) for _ in range(2))
        product = timed(lambda: x @ weight.T)
        source = torch.zeros(GPU_READ_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = timed(lambda: target.copy_(source))
    return Ceilings(2.0 * GPU_SIDE**3 / product, 2 * GPU_READ_BYTES / copy)
