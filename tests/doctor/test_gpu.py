"""The doctor where there is a GPU, with CUDA replaced: what is measured is measured on the CPU."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from rootlace.cli.app import app
from rootlace.runtime.config import ExecutorConfig
from rootlace.runtime.doctor import ceilings, report
from rootlace.runtime.doctor.report import Gpu, Report, examine
from rootlace.runtime.model.executor import runner
from tests.tiny_model import make_tiny_model

GIB = 1 << 30
NAME = "NVIDIA Stand-in"


class Cuda:
    """What `torch.cuda` says of a GPU. `waited`: how often somebody waited for it."""

    def __init__(self) -> None:
        self.capability = (9, 0)
        self.free, self.total = 6 * GIB, 8 * GIB
        self.waited = 0

    def wait(self, *_: object) -> None:
        self.waited += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    answers: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda _: NAME,
        "get_device_capability": lambda _: found.capability,
        "mem_get_info": lambda _: (found.free, found.total),
        "empty_cache": lambda: None,
        "synchronize": found.wait,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(runner, "has_driver", lambda: True)
    for name in ("gpu_product_rate", "gpu_copy_bandwidth"):
        monkeypatch.setattr(report, name, _on_cpu(getattr(ceilings, name)))
    monkeypatch.setattr(ceilings, "GPU_SIDE", 32)
    monkeypatch.setattr(ceilings, "GPU_READ_BYTES", 1 << 16)
    monkeypatch.setattr(report, "SECONDS", 0.0)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def _on_cpu(measure: Callable[..., float]) -> Callable[..., float]:
    def measured(device: torch.device, *given: object) -> float:
        assert device == torch.device("cuda", 0)
        return measure(torch.device("cpu"), *given)

    return measured


def doctored(model: Path | str = "", **more: object) -> Report:
    return examine(ExecutorConfig(str(model), **more), lambda *_: None)


def test_what_is_there_and_what_it_does(cuda: Cuda) -> None:
    found = doctored()
    assert found.gpu == Gpu(NAME, "9.0", 8 * GIB, 6 * GIB)
    if importlib.util.find_spec("triton") is not None:
        assert found.kernels.name == "triton" and not found.kernels.why_not_better
    assert {kind: set(by) for kind, by in found.measured.product_rates.items()} == {
        "float32": {"torch"},
        "bfloat16": {"torch"},
    }
    rates = [rate for by in found.measured.product_rates.values() for rate in by.values()]
    assert min(*rates, found.measured.read_bandwidth or 0) > 0
    assert not found.not_measured
    # Kernels are launched, and computed later: each of three measurements waits for each try.
    assert cuda.waited >= 3 * (1 + ceilings.TRIES)


def test_a_model(cuda: Cuda, model: Path) -> None:
    found = doctored(model).model
    assert found is not None and found.memory.fits and found.forecast is not None
    assert found.memory.available == cuda.free
    # The cache takes what the weights leave, but for a share of the device that stays free.
    left = cuda.free - found.memory.weights
    assert 0.95 * left < found.memory.cache < left
    cuda.free = 1 << 16
    small = doctored(model).model
    assert small is not None and not small.memory.fits and small.forecast is None


def test_a_gpu_that_the_triton_kernels_are_not_for(cuda: Cuda) -> None:
    cuda.capability = (7, 5)
    kernels = doctored().kernels
    assert kernels.name == "reference"
    (reason,) = kernels.why_not_better
    assert reason.startswith("triton: its compute capability is 7.5")


def test_what_there_is_no_memory_to_measure(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(report, "gpu_copy_bandwidth", fail)
    found = doctored()
    assert found.not_measured == ("copying: CUDA out of memory. Tried to allocate 2.00 GiB",)
    assert found.measured.read_bandwidth is None


def test_tables_and_json(cuda: Cuda, model: Path) -> None:
    shown = CliRunner().invoke(app, ["doctor", str(model)])
    assert shown.exit_code == 0, shown.output
    for text in (f"{NAME}, compute capability 9.0", "8.00 GiB, of which 6.00", "copying"):
        assert text in shown.output, text
    told = CliRunner().invoke(app, ["doctor", "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["gpu"] == {
        "name": NAME,
        "capability": "9.0",
        "memory_total": 8 * GIB,
        "memory_available": 6 * GIB,
    }
