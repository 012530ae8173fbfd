"""The native kernels in tests: where there is no compiler, what needs them is skipped."""

import ctypes
import fcntl
import functools
import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.interface import HostSampling, KernelSet
from rootlace.kernels.native import library
from rootlace.kernels.native.build import NativeUnavailable, library_file, read_processor
from rootlace.kernels.native.library import Team
from rootlace.kernels.native.sampling import native_sampling
from rootlace.kernels.reference import REFERENCE
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


def native_host_sampling(threads: int = 2) -> HostSampling:
    """What samples in C++; skips the test if there can be none."""
    found = native_library()
    return native_sampling(found, Team(found, threads))


def of_tensors(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that takes tensors, and gives some."""

    def call(*given: Any) -> Any:
        found = run(*given)
        if isinstance(found, tuple):
            return tuple(map(torch.as_tensor, found))
        return torch.as_tensor(found)

    return call


def native_kernel_set(threads: int = 2) -> KernelSet:
    """The same for tensors, among the reference's kernels."""
    host = native_host_sampling(threads)
    return replace(
        REFERENCE,
        name="native",
        edit_logits=of_tensors(host.edit_logits),
        pick_tokens=of_tensors(host.pick_tokens),
        score_tokens=of_tensors(host.score_tokens),
    )


NATIVE = "-march=native"
"""This machine's processor: the library that users have here."""
TWIN = "-march=native -DROOTLACE_TWIN -O1 -ftree-vectorize"
"""Has the tile unit emulated, on any processor. Only tests run it: -O1 compiles faster than -O3, to
the same bits."""
PLAIN = "-march=x86-64 -Og"
"""Without vectors; that the optimiser is right is shown on the other kinds."""
TARGETS = (
    NATIVE,
    *(pytest.param(t, marks=pytest.mark.slow) for t in ("-march=x86-64-v3", PLAIN, TWIN)),
)
"""Kinds of processor that kernels are compiled for; `make check` takes this machine's."""


def skip_without(kernels: str) -> None:
    """Skips the test if it is for native kernels and there are none."""
    if kernels == "native":
        native_library()


@functools.cache
def library_for(target: str) -> ctypes.CDLL:
    """The library for a target (flags, as those in `TARGETS`), from the cache if it is there;
    skips the test if it cannot be made, or does not run on this processor."""
    skip_where_it_cannot_run(target)
    if target == NATIVE:
        return native_library()
    (ROOT / "build").mkdir(exist_ok=True)
    # Of several workers that need it, one compiles.
    with (ROOT / "build" / "native.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with library_file(target=target.split()) as path:
                return library.open_library(str(path))
        except library.InstructionsRefused as refused:
            pytest.skip(str(refused))
        except NativeUnavailable as error:
            if "no C++ compiler" in str(error):
                pytest.skip(str(error))
            raise


def with_tile_unit() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """A library that uses this processor's tile unit, and one that emulates it and is the same
    otherwise; skips the test where there is none."""
    unit = library_for(NATIVE)
    if unit.rl_instructions() != b"amx":
        pytest.skip("this processor has no tile unit")
    return unit, library_for(TWIN)


def skip_where_it_cannot_run(target: str) -> None:
    if "x86" in target and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("for another architecture")
    lacks = {" ".join(one.target): one.name for one in read_processor().lacks}
    if target in lacks:
        pytest.skip(f"this processor has no {lacks[target]}, or does not say so")
