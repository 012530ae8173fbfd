"""Number of threads of regions, from durations, waits and times without a core."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from rootlace.kernels.native.build import COMPILERS, SOURCES, find_compiler

PROGRAM = """
#include <cstdio>
#include "headcount.h"
int main() {
  int threads;
  if (std::scanf("%d", &threads) != 1) return 1;
  rootlace::Headcount count(threads);
  using Millis = std::chrono::duration<double, std::milli>;
  double region, waited, robbed, time = 0;
  while (std::scanf("%lf %lf %lf", &region, &waited, &robbed) == 3) {
    time += region;
    auto in = [](double ms) {
      return std::chrono::duration_cast<std::chrono::nanoseconds>(Millis(ms));
    };
    count.after(in(region), in(waited), in(robbed), in(time));
    std::printf("%d\\n", count.now());
  }
}
"""

Region = tuple[float, float, float]
"""Milliseconds: how long it lasted, and how long all its threads waited, and had no core."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next(filter(None, (find_compiler(name, ()) for name in COMPILERS)), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("headcount")
    (folder / "main.cpp").write_text(PROGRAM)
    made = folder / "main"
    command = [compiler.path, "-std=c++17", f"-I{SOURCES}", str(folder / "main.cpp"), "-o"]
    subprocess.run([*command, str(made)], check=True, timeout=120)
    return made


def counts(program: Path, threads: int, regions: Sequence[Region]) -> list[int]:
    """Threads after each of the regions."""
    text = "\n".join([str(threads), *(f"{a} {b} {c}" for a, b, c in regions)])
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


QUIET: Region = (10, 0, 0)


def lost(threads: int, share: float) -> Region:
    """Return a region in which one thread lacks a core for a share of the time, and the others
    wait."""
    return (10, 10 * share * (threads - 1), 10 * share)


def badly_divided(threads: int) -> Region:
    """Return a region in which one thread computes a long task, and the others wait."""
    return (10, 9.5 * (threads - 1), 0)


def test_all_threads_while_nobody_waits(program: Path) -> None:
    assert set(counts(program, 4, [QUIET] * 100)) == {4}


@pytest.mark.parametrize("threads", [2, 4, 16])
def test_a_lost_core_costs_a_thread_after_a_while(program: Path, threads: int) -> None:
    found = counts(program, threads, [lost(threads, 0.5)] * 20)
    assert found == [threads] * 19 + [threads - 1]


@pytest.mark.parametrize("threads", [2, 4, 16])
def test_work_that_is_badly_divided_costs_none(program: Path, threads: int) -> None:
    assert set(counts(program, threads, [badly_divided(threads)] * 200)) == {threads}


def test_a_core_that_is_lost_for_a_moment_costs_none(program: Path) -> None:
    regions = ([lost(4, 0.9)] * 3 + [QUIET] * 17) * 10
    assert set(counts(program, 4, regions)) == {4}


def test_a_core_that_is_lost_while_work_is_badly_divided(program: Path) -> None:
    """Most of the waiting has another reason than the core."""
    assert set(counts(program, 2, [(10, 9.5, 1)] * 100)) == {2}
    assert counts(program, 2, [(10, 9.5, 9)] * 20)[-1] == 1


def test_a_single_thread_stays_one(program: Path) -> None:
    assert set(counts(program, 1, [(10, 0, 9)] * 100)) == {1}


def test_threads_come_back_when_the_core_does(program: Path) -> None:
    found = counts(program, 2, [lost(2, 0.5)] * 20 + [QUIET] * 50)
    assert found[19] == 1 and found[-1] == 2
    assert found[20:].index(2) == 4  # after 50 ms


def test_breaks_grow_while_the_core_stays_lost(program: Path) -> None:
    """A thread more is tried after 50 ms, then after 100, and so on up to 1.6 s."""
    found = counts(program, 2, [lost(2, 0.5)] * 2000)
    alone = [len(run) for run in "".join(map(str, found)).split("2") if run]
    assert alone[:5] == [5, 10, 20, 40, 80] and set(alone[5:-1]) == {160}
