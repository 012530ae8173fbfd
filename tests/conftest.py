"""For every test: no luck in it, and where the shared data and the embedded model are."""

from __future__ import annotations

import gc
import os
import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if "PYTEST_XDIST_WORKER" in os.environ:
    # As many threads as workers, not as many per worker. Read where torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import pytest
import torch

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # on a machine for tests/gpu alone
    pass
else:
    # Examples are the same every time and take as long as they take, so that who changes one thing
    # is not told about another. `--hypothesis-profile random` looks for new ones.
    settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("same", settings.get_profile("random"), derandomize=True)
    settings.load_profile("same")

# What is imported and collected stays: looking for garbage in it takes a quarter of the time.
gc.disable()

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    # Read where kernels are defined, so before any is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if TYPE_CHECKING:
    from rootlace import Runtime

ROOT = Path(__file__).resolve().parents[1]

MEMORY = Path("/dev/shm")
"""Linux's folder in main memory."""
ROOM = 4 << 30
"""Bytes that must be free there: several times what a run of all tests writes."""


def has_room(folder: Path) -> bool:
    """Return whether a folder in main memory can take temporary files, libraries included."""
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return False
    system = os.statvfs(folder)
    free = min(system.f_bavail * system.f_frsize, psutil.virtual_memory().available)
    return free >= ROOM and not system.f_flag & os.ST_NOEXEC


# A file that is written again waits for the disk with ext4, and tests rewrite many.
if "TMPDIR" not in os.environ and has_room(MEMORY):
    os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

# `make check` leaves these out: real processes and sockets, interpreted kernels, whole commands.
# Elsewhere a test of more than about two seconds is marked `slow` itself.
SLOW_FOLDERS = ("clients", "e2e", "gpu", "kernels/triton", "benchmarks", "scripts")
SLOW_PATHS = tuple(ROOT / "tests" / folder for folder in SLOW_FOLDERS)

# Tests of processes, ranks and threads that share memory: they run on the cores of all workers.
CONCURRENT_PATHS = tuple(
    ROOT / "tests" / name
    for name in ("clients", "e2e", "kernels/native", "model/parallel", "engine/test_ranks.py")
)


def share(cores: set[int], worker: int, workers: int) -> set[int]:
    """Cores of one worker. All of them where there are fewer cores than workers."""
    return set(sorted(cores)[worker::workers]) if workers <= len(cores) else cores


CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
OWN_CORES = share(
    CORES,
    int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")),
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on-cpu",
        nargs="?",
        const="reference",
        choices=("reference", "triton"),
        help="run tests/gpu on the CPU, shapes small (triton: the interpreted kernels alone)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "whole_gpu: takes all of the GPU's memory; runs alone")
    config.addinivalue_line("markers", "slow: not part of `make check`")
    heed_interrupts()


def heed_interrupts() -> None:
    """A process that a shell started in the background may ignore SIGINT, and so may all that it
    starts: tests that interrupt a program would wait for it forever."""
    if (
        threading.current_thread() is threading.main_thread()  # no other may set a handler
        and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What `make check` leaves out need not be imported either: that alone takes seconds."""
    return (config.option.markexpr == "not slow" and collection_path in SLOW_PATHS) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {
        path
        for path in {item.path for item in items}
        if any(path.is_relative_to(folder) for folder in SLOW_PATHS)
    }
    for item in items:
        if item.path in slow:
            item.add_marker(pytest.mark.slow)
    # Their files take long: they come first, so that no worker is left alone with one at the end.
    items.sort(key=lambda item: item.path in slow, reverse=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Bind the worker to its own cores. Threads of a model spin while they wait for each other: on
    cores that another worker uses, too, each step takes several times as long."""
    if OWN_CORES < CORES:
        concurrent = any(item.path.is_relative_to(path) for path in CONCURRENT_PATHS)
        os.sched_setaffinity(0, CORES if concurrent else OWN_CORES)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collections of garbage in tests look at what tests made. The usual thresholds make them take
    up to a twentieth of the time."""
    gc.freeze()
    gc.set_threshold(5000, 10, 100)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Libraries complain of leaks where the interpreter's last collection does not see them."""
    gc.unfreeze()
    gc.enable()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws without a seed does not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    # `torch.manual_seed` writes the stack down for each kind of device that is not there.
    torch.default_generator.manual_seed(0)
    if ON_GPU:
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The checkpoints, tokenizers and evaluation sets that may lie beside the checkout."""
    path = ROOT.parent / "shared"
    if not (path / "data" / "README.md").exists():
        pytest.skip(f"needs the shared data beside the checkout ({path})")
    return path


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the embedded model."""
    path = ROOT / "runtime" / "assets" / "demo"
    if not (path / "model.safetensors").exists():
        pytest.skip(f"needs the embedded model ({path}); examples/demo_model/train.py makes it")
    return path


@pytest.fixture(scope="session")
def runtime(demo_model: Path) -> Iterator[Runtime]:
    """For programs and HTTP clients: in float32, for which warm and cold are the same."""
    import rootlace as rl

    with rl.Runtime(
        demo_model,
        dtype="float32",
        device="cpu",
        threads=1,
        num_blocks=1024,
        check_invariants=True,
        http_port=0,
        launch_timeout=240,
    ) as started:
        yield started
