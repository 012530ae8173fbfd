"""Cores and their quota, as reported by systems of several kinds."""

import os
from pathlib import Path

import pytest

from rootlace.kernels.native.machine import Core, read_cores, usable_cores


def system(root: Path, files: dict[str, str]) -> Path:
    """A folder that looks like a system's root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def siblings(*groups: str) -> dict[str, str]:
    """Hardware threads that share a core, such as "0-1" or "0,4"."""
    found = {}
    for group in groups:
        threads = group.split(",")
        if "-" in group:
            first, last = map(int, group.split("-"))
            threads = [str(thread) for thread in range(first, last + 1)]
        for thread in threads:
            found[f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"] = group
    return found


def test_two_hardware_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    root = system(tmp_path, siblings("0,2", "1,3"))
    found = read_cores(root, allowed=[0, 1, 2, 3])
    assert found.all == (Core((0, 2)), Core((1, 3)))
    assert found.quota is None and found.usable == 2


def test_only_threads_that_the_process_may_run_on_count(tmp_path: Path) -> None:
    root = system(tmp_path, siblings("0-1", "2-3", "4-5"))
    found = read_cores(root, allowed=[3, 4, 5])
    assert found.all == (Core((3,)), Core((4, 5)))


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    found = read_cores(tmp_path, allowed=[0, 1, 2])
    assert found.all == (Core((0,)), Core((1,)), Core((2,)))
    assert found.quota is None and found.usable == 3


@pytest.mark.parametrize(
    ("quota", "usable"), [("50000", 1), ("120000", 1), ("150000", 1), ("200000", 2), ("900000", 4)]
)
@pytest.mark.parametrize("version", [1, 2])
def test_quotas(tmp_path: Path, quota: str, usable: int, version: int) -> None:
    if version == 2:
        files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": f"{quota} 100000"}
    else:
        group = "sys/fs/cgroup/cpu,cpuacct/box"
        files = {
            "proc/self/cgroup": "4:cpu,cpuacct:/box\n2:cpuset:/\n0::/",
            f"{group}/cpu.cfs_quota_us": quota,
            f"{group}/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        }
    found = read_cores(system(tmp_path, files), allowed=range(4))
    assert found.quota == int(quota) / 100000
    assert found.usable == usable


def test_no_quota(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}
    assert read_cores(system(tmp_path, files), allowed=range(4)).quota is None


def test_the_tightest_of_the_groups_around_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/middle/inner",
        "sys/fs/cgroup/outer/cpu.max": "300000 100000",
        "sys/fs/cgroup/outer/middle/cpu.max": "50000 20000",
        "sys/fs/cgroup/outer/middle/inner/cpu.max": "max 100000",
    }
    assert read_cores(system(tmp_path, files), allowed=range(8)).quota == 2.5


@pytest.mark.parametrize("path", ["/docker/4f2a/app", "/../../app"])
def test_a_container_is_told_the_hosts_path(tmp_path: Path, path: str) -> None:
    files = {"proc/self/cgroup": f"0::{path}", "sys/fs/cgroup/cpu.max": "100000 100000"}
    assert read_cores(system(tmp_path, files), allowed=range(8)).quota == 1


def test_small_cores_of_intels_hybrids(tmp_path: Path) -> None:
    files = siblings("0-1", "2-3", "4", "5") | {"sys/devices/cpu_atom/cpus": "4-5"}
    found = read_cores(system(tmp_path, files), allowed=range(6))
    assert [core.small for core in found.all] == [False, False, True, True]
    assert found.usable == 4


def test_small_cores_by_their_capacity(tmp_path: Path) -> None:
    capacities = ["446", "446", "1024", "1024"]
    files = {f"sys/devices/system/cpu/cpu{i}/cpu_capacity": c for i, c in enumerate(capacities)}
    found = read_cores(system(tmp_path, files), allowed=range(4))
    assert [core.small for core in found.all] == [True, True, False, False]


def test_nodes(tmp_path: Path) -> None:
    files = siblings("0,4", "1,5", "2,6", "3,7") | {
        "sys/devices/system/node/online": "0-1",
        "sys/devices/system/node/node0/cpulist": "0-1,4-5",
        "sys/devices/system/node/node1/cpulist": "2-3,6-7",
    }
    found = read_cores(system(tmp_path, files), allowed=range(8))
    assert [(core.threads, core.node) for core in found.all] == [
        *(((0, 4), 0), ((1, 5), 0)),
        *(((2, 6), 1), ((3, 7), 1)),
    ]


def test_files_that_say_something_else(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "nonsense\n0\n1:cpu",
        "sys/fs/cgroup/cpu.max": "a lot",
        "sys/devices/system/node/online": "all-of them",
        "sys/devices/system/cpu/cpu0/cpu_capacity": "?",
    }
    assert read_cores(system(tmp_path, files), allowed=[0]).all == (Core((0,)),)


def test_this_machine() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
