"""What the machine can do at most: the rate of a big matrix product, and of reading memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any


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
    bandwidth = read_bandwidth(threads, seconds, READ_BYTES, None)
    return {"threads": threads, "dtype": dtype, **_highest(rates), "read_bandwidth": bandwidth}


def _highest(rates: dict[str, float]) -> dict[str, Any]:
    by = max(rates, key=lambda name: rates[name])
    return {"gemm_rate": rates[by], "gemm_by": by, "gemm_rates": rates}


def measure_apart(threads: int, dtype: str, seconds: float) -> dict[str, Any]:
    """`measure` in a process of its own: no library's threads stay behind in this one."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(measure, threads, dtype, seconds).result()


def best_of(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The highest of several results of `measure`, each number by itself."""
    rates: dict[str, float] = {}
    for one in measured:
        for name, rate in one["gemm_rates"].items():
            rates[name] = max(rate, rates.get(name, 0.0))
    bandwidth = max(one["read_bandwidth"] for one in measured)
    return {**measured[0], **_highest(rates), "read_bandwidth": bandwidth}
