"""Which kernels a device gets, and that the CPU never imports triton."""

import importlib.metadata
import logging
import subprocess
import sys

import msgspec
import pytest
import torch

from rootlace.kernels.dispatch import OPERATIONS, kernels_for, with_reference
from rootlace.kernels.reference import REFERENCE

GPU = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A pretended H200 with triton 3.6."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.6.0+git12ab")
    return monkeypatch


def test_a_gpu_gets_triton(gpu: pytest.MonkeyPatch) -> None:
    assert kernels_for(GPU).name == "triton"


@pytest.mark.slow
def test_a_cpu_gets_the_reference_and_never_triton() -> None:
    assert kernels_for(torch.device("cpu")) is REFERENCE
    code = (
        "import sys, torch; from rootlace.kernels.dispatch import kernels_for; "
        "kernels_for(torch.device('cpu')); print('rootlace.kernels.triton' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    )
    assert output.stdout.strip() == "False"


def missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("target", "name", "value", "reason"),
    [
        (torch.version, "cuda", None, "for CUDA"),
        (torch.cuda, "get_device_capability", lambda device=None: (7, 5), "capability is 7.5"),
        (importlib.metadata, "version", lambda name: "3.5.1", "triton is 3.5.1; 3.6"),
        (importlib.metadata, "version", missing, "not installed"),
    ],
)
def test_the_reason_for_the_reference_is_logged(
    gpu: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    target: object,
    name: str,
    value: object,
    reason: str,
) -> None:
    gpu.setattr(target, name, value)
    with caplog.at_level(logging.WARNING):
        assert kernels_for(GPU) is REFERENCE
    assert reason in caplog.text


def test_a_triton_that_does_not_import(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.setitem(sys.modules, "rootlace.kernels.triton", None)
    assert kernels_for(GPU) is REFERENCE
    assert "cannot be imported" in caplog.text


def test_the_reference_computes_the_operations_asked_for_and_no_others() -> None:
    from rootlace.kernels.triton import TRITON

    assert with_reference(TRITON, ()) is TRITON
    mixed = with_reference(TRITON, ["attention", "sampling"])
    replaced = {"plan_attention", "paged_attention", "pick_tokens"}
    for name in TRITON.__struct_fields__:
        of = REFERENCE if name in replaced else TRITON
        assert getattr(mixed, name) is getattr(of, name) or name == "name"
    every = with_reference(TRITON, OPERATIONS)
    assert msgspec.structs.replace(every, name=REFERENCE.name) == REFERENCE
    with pytest.raises(ValueError, match=r"unknown operations \['magic'\].*attention"):
        with_reference(TRITON, ["magic"])
