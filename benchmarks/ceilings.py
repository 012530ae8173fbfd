"""The machine's ceilings: the rate of a large matrix product, and of reading memory."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def measure(threads: int, dtype: str, seconds: float) -> dict[str, Any]:
    """Measure {"gemm_rate" flop/s, "gemm_rates" by library, "read_bandwidth" bytes/s}."""
    import torch

    from rootlace.kernels.native.build import NativeUnavailable
    from rootlace.kernels.native.library import load
    from rootlace.runtime.doctor.ceilings import READ_BYTES, product_rates, read_bandwidth

    try:
        library = load()
    except NativeUnavailable:  # there is no compiler
        library = None
    rates = product_rates(getattr(torch, dtype), threads, seconds, library)
    bandwidth = read_bandwidth(threads, seconds, READ_BYTES, library)
    rate = max(rates.values())
    return {"gemm_rate": rate, "gemm_rates": rates, "read_bandwidth": bandwidth}


def measure_apart(threads: int, dtype: str, seconds: float) -> dict[str, Any]:
    """Run `measure` in a separate process, so that no library's threads stay in this one."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(measure, threads, dtype, seconds).result()
