"""Main memory of a process, as granted by machines and control groups of both versions."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rootlace.kernels.native.packed import FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.kv_pool import MainMemory, main_memory
from tests.tiny_model import make_tiny_model

MIB = 1 << 20
UNLIMITED = str((1 << 63) - 4096)
"""Value of version 1 for a group without a limit."""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=1000 * MIB, available=600 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def system(root: Path, files: dict[str, object]) -> Path:
    """A folder that looks like a system's root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def group2(name: str, limit: object, used: int) -> dict[str, object]:
    folder = f"sys/fs/cgroup/{name}"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used}


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert main_memory(tmp_path) == MainMemory(1000 * MIB, 600 * MIB)


def test_no_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/box", **group2("box", "max", 5 * MIB)}
    assert main_memory(system(tmp_path, files)) == MainMemory(1000 * MIB, 600 * MIB)


def test_the_tightest_of_the_groups_around(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner",
        **group2("outer/inner", 300 * MIB, 100 * MIB),
        **group2("outer", 400 * MIB, 350 * MIB),
    }
    assert main_memory(system(tmp_path, files)) == MainMemory(300 * MIB, 50 * MIB)


def test_a_limit_beyond_what_is_free(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/", **group2("", 900 * MIB, 100 * MIB)}
    assert main_memory(system(tmp_path, files)) == MainMemory(900 * MIB, 600 * MIB)


def test_files_that_are_not_in_use_make_room(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        **group2("", 300 * MIB, 250 * MIB),
        "sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {200 * MIB}\nactive_file 9",
    }
    assert main_memory(system(tmp_path, files)).available == 250 * MIB


def test_more_is_taken_than_the_limit_allows_now(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/", **group2("", 100 * MIB, 101 * MIB)}
    assert main_memory(system(tmp_path, files)).available == 0


def test_version_1(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "7:memory:/box\n4:cpu,cpuacct:/",
        f"{folder}/memory.limit_in_bytes": UNLIMITED,
        f"{folder}/memory.usage_in_bytes": 700 * MIB,
        f"{folder}/box/memory.limit_in_bytes": 200 * MIB,
        f"{folder}/box/memory.usage_in_bytes": 150 * MIB,
        f"{folder}/box/memory.stat": f"inactive_file 3\ntotal_inactive_file {20 * MIB}",
    }
    assert main_memory(system(tmp_path, files)) == MainMemory(200 * MIB, 70 * MIB)


def test_the_pool_is_sized_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.read(make_tiny_model(tmp_path / "model"))
    executor = ExecutorConfig(context_length=512)
    setup = ModelSetup(config, executor, CacheConfig(), FLOAT32)
    size = kv_pool.block_bytes(config, setup.cache.block_size, FLOAT32)
    monkeypatch.setattr(kv_pool, "main_memory", lambda: MainMemory(1 << 30, 40 * size))
    assert setup.choose_num_blocks() == 40 * kv_pool.CPU_SHARE
