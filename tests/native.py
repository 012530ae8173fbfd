"""The native kernels in tests: where there is no compiler, what needs them is skipped."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from rootlace.kernels import KernelSet
from rootlace.kernels.native import library
from rootlace.kernels.native.build import FLAGS, SOURCES, NativeUnavailable, find_compiler
from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.pick_tokens import native_kernels


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


def native_kernel_set(threads: int = 2) -> KernelSet:
    """What samples in C++; skips the test if there can be none."""
    found = native_library()
    return native_kernels(found, Team(found, threads))


TWIN = "-DROOTLACE_TWIN"
"""Has the tile unit emulated, on any processor."""
TARGETS = (
    "-march=native",
    *(pytest.param(t, marks=pytest.mark.slow) for t in ("-march=x86-64-v3", "-march=x86-64", TWIN)),
)
"""Kinds of processor that kernels are compiled for; `make check` takes this machine's."""


def skip_without(kernels: str) -> None:
    """Skips the test if it is for native kernels and there are none."""
    if kernels == "native":
        native_library()


def compiled(
    folder: Path, target: str, sources: Sequence[str], functions: Sequence[str]
) -> ctypes.CDLL:
    """A library for a target (flags, as those in `TARGETS`) of those files and those functions
    alone; skips the test if it cannot be made, or does not run on this processor."""
    _skip_where_it_cannot_run(target)
    flags = tuple(target.split())
    compiler = find_compiler("g++", flags) or find_compiler("c++", flags)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    path = folder / "kernels.so"
    files = [str(SOURCES / f"{name}.cpp") for name in (*sources, "prepare")]
    command = [compiler.path, *FLAGS, *flags, "-shared", *files, "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[:2000]
    found = ctypes.CDLL(str(path))
    if refused := found.rl_prepare():
        pytest.skip(os.strerror(refused))
    for name in (*functions, "rl_instructions"):
        function = getattr(found, name)
        function.restype, function.argtypes = library.FUNCTIONS[name]
    return found


def with_tile_unit(
    folder: Path, sources: Sequence[str], functions: Sequence[str]
) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """A library that uses this processor's tile unit, and one that emulates it and is the same
    otherwise; skips the test where there is none."""
    for name in ("unit", "twin"):
        (folder / name).mkdir()
    unit = compiled(folder / "unit", "-march=native", sources, functions)
    if unit.rl_instructions() != b"amx":
        pytest.skip("this processor has no tile unit")
    return unit, compiled(folder / "twin", f"-march=native {TWIN}", sources, functions)


def _skip_where_it_cannot_run(target: str) -> None:
    if "x86" in target and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("for another architecture")
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if target == "-march=x86-64-v3" and not {"avx2", "bmi2", "fma"} <= set(flags.split()):
        pytest.skip("this processor has no AVX2, or does not say so")
