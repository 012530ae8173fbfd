"""The native kernels in tests: where there is no compiler, what needs them is skipped."""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path

import pytest

from rootlace.kernels.native import library
from rootlace.kernels.native.build import NativeUnavailable


@functools.cache
def _loaded() -> ctypes.CDLL | str:
    try:
        return library.load()
    except NativeUnavailable as error:
        return str(error)


def native_library() -> ctypes.CDLL:
    """The library for this machine; skips the test if there can be none."""
    found = _loaded()
    if isinstance(found, str):
        if "no C++ compiler" in found:
            pytest.skip(found)
        pytest.fail(found)
    return found


TARGETS = ("-march=native", "-march=x86-64-v3", "-march=x86-64")
"""Kinds of processor that kernels are compiled for."""


def skip_where_it_cannot_run(target: str) -> None:
    """Skips the test if what is compiled for `target` does not run on this processor."""
    if "x86" in target and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("for another architecture")
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if target == "-march=x86-64-v3" and not {"avx2", "bmi2", "fma"} <= set(flags.split()):
        pytest.skip("this processor has no AVX2, or does not say so")


def skip_without(kernels: str) -> None:
    """Skips the test if it is for native kernels and there are none."""
    if kernels == "native":
        native_library()
