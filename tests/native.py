"""The native kernels in tests: where there is no compiler, what needs them is skipped."""

from __future__ import annotations

import ctypes
import functools

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


def skip_without(kernels: str) -> None:
    """Skips the test if it is for native kernels and there are none."""
    if kernels == "native":
        native_library()
