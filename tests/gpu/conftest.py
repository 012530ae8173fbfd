"""Where the tests of this folder run: on a GPU, with real shapes; they are skipped without one.

`pytest tests/gpu --on-cpu` runs them on the CPU, with the reference kernels and small shapes. That
says nothing about a GPU; it says that the tests themselves are right. `--on-cpu=triton` takes the
Triton kernels, interpreted, where kernels are tested by themselves.

A fault of a kernel (an illegal address, say) ends the GPU's context for the whole process. One of
several processes ends then and is replaced; the test that it was given next is lost. Alone, what
follows is skipped. Else every later test would fail at once, and take the tests of sound processes.

With `--gpu-seconds` the first case of every test runs before the second case of any, so that most
faults are found early; what has not begun by then is skipped. `--gpu-report FILE` gets a line of
JSON for each test as it ends.
"""

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.setting import has_faulted
from rootlace.kernels.dispatch import kernels_for
from rootlace.kernels.interface import KernelSet

NO_TIME = "no time was left for it"
NO_GPU = "no sound GPU was left for it after"
FILES = ("pointwise", "attention", "sampling", "products", "constrained", "model", "runtime")
"""Kernels before what is made of them: a fault of a kernel explains those behind it."""

MOST_CASES = 3
EVERY = 5
"""Of a test with more cases than `MOST_CASES` the first and every fifth after it run on the CPU:
that says whether the tests are right, and a GPU runs them all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-seconds", type=float, help="begin no test of tests/gpu after so long")
    parser.addoption("--gpu-report", type=Path, help="a line of JSON for each test of tests/gpu")


class Clock:
    """Skips what would begin too late or after a fault, and writes down what ended.

    `among_others`: whether this process is one of several and is replaced when it ends."""

    def __init__(
        self, seconds: float | None, report: Path | None, among_others: bool = False
    ) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds
        self._report = report
        self._among_others = among_others
        self._faulted_in = ""
        if report is not None:
            report.write_text("")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._faulted_in and self._among_others:
            os._exit(1)
        if self._faulted_in:
            pytest.skip(f"{NO_GPU} {self._faulted_in}")
        if self._ends is not None and time.monotonic() >= self._ends:
            pytest.skip(NO_TIME)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and has_faulted():
            self._faulted_in = report.nodeid
        if self._report is None or (report.when != "call" and report.passed):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if reason or report.failed:
            line["why"] = str(reason or report.longreprtext[-4000:])
        with self._report.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    # Of several processes the one that starts the others hears of every test.
    among_others = hasattr(config, "workerinput")
    report = None if among_others else config.getoption("--gpu-report", None)
    config.pluginmanager.register(
        Clock(config.getoption("--gpu-seconds", None), report, among_others)
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gpu-seconds", None) is not None:
        seen_cases: Counter[str] = Counter()
        places = {}
        for item in items:
            kind = item.path.stem.removeprefix("test_")
            rank = FILES.index(kind) if kind in FILES else len(FILES)
            places[item] = (seen_cases[test_of(item)], rank)
            seen_cases[test_of(item)] += 1
        items.sort(key=places.__getitem__)
    if config.getoption("--on-cpu") is None:
        return
    own = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    counts = Counter(test_of(item) for item in own)
    seen: Counter[str] = Counter()
    left_out = []
    for item in own:
        test = test_of(item)
        if counts[test] > MOST_CASES and seen[test] % EVERY:
            left_out.append(item)
        seen[test] += 1
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def test_of(item: pytest.Item) -> str:
    """The test that an item is a case of."""
    return item.nodeid.split("[")[0]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.config.getoption("--on-cpu"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU with CUDA (--on-cpu runs this on the CPU)")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def real(device: torch.device) -> bool:
    """Whether shapes are those of real models."""
    return device.type == "cuda"


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest, device: torch.device, real: bool) -> KernelSet:
    """The device's own; on a GPU they must not be the reference."""
    if request.config.getoption("--on-cpu") == "triton":
        from rootlace.kernels.triton import TRITON

        return TRITON
    found = kernels_for(device)
    assert found.name == ("triton" if real else "reference")
    return found
