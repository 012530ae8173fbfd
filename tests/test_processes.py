"""Children that end with their parents."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.processes import alive
from tests.waiting import eventually

CHILD = """
import os, time
from rootlace.runtime import processes
processes.end_with_parent()
print(os.getpid(), flush=True)
time.sleep(600)
"""
SCHEDULED = """
import os, subprocess, sys
from rootlace.runtime import processes
processes.give_way()
child = "import os; from rootlace.runtime import processes; processes.compete()"
child += "; print(os.sched_getscheduler(0))"
print(os.sched_getscheduler(0), flush=True)
subprocess.run([sys.executable, "-c", child])
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
def test_a_child_that_is_stopped_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    child.send_signal(signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    eventually(lambda: not alive(child))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policies")
def test_who_gives_way_does_not_choose_for_its_children() -> None:
    done = subprocess.run([sys.executable, "-c", SCHEDULED], capture_output=True, check=True)
    before = os.sched_getscheduler(0)
    given = os.SCHED_BATCH if before == os.SCHED_OTHER else before
    assert list(map(int, done.stdout.split())) == [given, before]
