"""The native kernels in tests: where there is no compiler, what needs them is skipped."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import platform

import pytest

from rootlace.kernels import KernelSet
from rootlace.kernels.native import library
from rootlace.kernels.native.build import NativeUnavailable, library_file
from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.pick_tokens import native_kernels
from rootlace.kernels.native.processor import read_processor
from tests.conftest import ROOT


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


TWIN = "-march=native -DROOTLACE_TWIN -O1 -ftree-vectorize"
