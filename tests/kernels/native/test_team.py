"""Threads: every task runs once and after all tasks of the round before, whoever has the cores."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

from rootlace.kernels.native.library import NativeError, NativeOutOfMemory, Team
from rootlace.kernels.native.machine import usable_cores
from tests.native import native_library
from tests.waiting import eventually


@pytest.fixture
def library() -> ctypes.CDLL:
    return native_library()


def check(library: ctypes.CDLL, team: Team, rounds: int, tasks: int, work: int) -> None:
    counts = np.zeros((rounds, tasks), np.int32)
    early = library.rl_team_try(team.handle, rounds, tasks, work, counts.ctypes.data)
    assert early == 0
    assert (counts == 1).all()


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Other programs that want a core each."""
    spin = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("tasks", [1, 2, 7, 100])
def test_tasks_run_once_and_in_rounds(library: ctypes.CDLL, threads: int, tasks: int) -> None:
    team = Team(library, threads)
    assert library.rl_team_size(team.handle) == threads
    for work in (0, 100, 3000):
        check(library, team, 50, tasks, work)


def test_rounds_without_tasks(library: ctypes.CDLL) -> None:
    counts = np.zeros(0, np.int32)
    team = Team(library, 4)
    assert library.rl_team_try(team.handle, 50, 0, 0, counts.ctypes.data) == 0


def test_regions_after_pauses_of_any_length(library: ctypes.CDLL) -> None:
    """Threads look, then sleep: regions begin in all of these states."""
    team = Team(library, 3)
    rng = np.random.default_rng(0)
    for pause in rng.uniform(0, 4e-4, 300):
        time.sleep(pause)
        check(library, team, 3, 5, 200)


def test_more_threads_than_cores_beside_busy_programs(library: ctypes.CDLL) -> None:
    cores = usable_cores()
    team = Team(library, 4 * cores)
    with busy_neighbours(cores):
        for _ in range(10):
            check(library, team, 20, 16, 2000)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_what_a_task_throws_is_raised_and_the_team_goes_on(
    library: ctypes.CDLL, threads: int
) -> None:
    team = Team(library, threads)
    for tasks, at in ((1, 0), (7, 0), (7, 6), (100, 50)):
        for _ in range(20):
            with pytest.raises(NativeOutOfMemory, match="no memory"):
                library.rl_team_fail(team.handle, tasks, at, 2**62)
            with pytest.raises(NativeError, match="thrown for a test") as raised:
                library.rl_team_fail(team.handle, tasks, at, -1)
            assert not isinstance(raised.value, MemoryError)
            check(library, team, 5, tasks, 100)
            library.rl_team_fail(team.handle, tasks, at, 1 << 20)


def test_callers_take_turns(library: ctypes.CDLL) -> None:
    team = Team(library, 2)
    faults: list[BaseException] = []

    def call() -> None:
        try:
            for _ in range(50):
                check(library, team, 5, 9, 100)
        except BaseException as fault:
            faults.append(fault)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_that_only_wait(library: ctypes.CDLL, threads: int) -> None:
    """Regions of one task run for longer than `WINDOW` of headcount.h, among other regions."""
    team = Team(library, threads)
    for _ in range(2):
        check(library, team, 100, 1, 2_500_000)
        for _ in range(20):
            check(library, team, 5, 9, 1000)


def test_teams_come_and_go(library: ctypes.CDLL) -> None:
    before = psutil.Process().num_threads()
    for _ in range(20):
        check(library, Team(library, 4), 2, 4, 10)
    # One that was joined is listed a moment longer.
    eventually(lambda: psutil.Process().num_threads() <= before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_a_child_made_by_fork_has_threads_of_its_own() -> None:
    path = native_library()._name
    script = f"""
import os
from rootlace.kernels.native.library import open_library
from rootlace.kernels.native.library import Team
from tests.kernels.native.test_team import check
library = open_library({path!r})
team = Team(library, 3)
check(library, team, 20, 9, 500)
child = os.fork()
for _ in range(20):
    check(library, team, 20, 9, 500)
if not child:
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=240, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.slow
def test_the_interpreter_ends_while_a_thread_computes() -> None:
    """And waits for nothing: what is computed here takes an hour."""
    script = f"""
import threading, time
import numpy as np
from rootlace.kernels.native.library import open_library
from rootlace.kernels.native.library import Team
library = open_library({native_library()._name!r})
def compute(team, counts):
    library.rl_team_try(team.handle, 2000, 9, 100_000_000, counts.ctypes.data)
arguments = (Team(library, 3), np.zeros((2000, 9), np.int32))
threading.Thread(target=compute, args=arguments, daemon=True).start()
while not arguments[1].any():
    time.sleep(0.001)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=240, capture_output=True)
    assert done.returncode == 0, (done.returncode, done.stderr.decode())
