"""Children that end with their parents."""

from __future__ import annotations

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
