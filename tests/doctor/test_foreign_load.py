"""What counts as the load of other programs."""

import resource
import subprocess
import sys
from collections import namedtuple

import psutil
import pytest

from rootlace.runtime.doctor.report import ForeignLoad

BUSY = "import time\nwhile time.process_time() < 0.3: pass"


def ended_children() -> float:
    """As the system tells it: CPU seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.skipif(sys.platform != "linux", reason="needs the times of processes that have ended")
def test_processes_that_have_ended_are_own_ones() -> None:
    load, before = ForeignLoad(), ended_children()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    took = ended_children() - before
    assert took >= 0.3
    assert load.own_seconds() >= took - 0.05  # psutil reads ticks of the clock


def test_what_guests_take_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = namedtuple("times", "user nice system idle iowait guest guest_nice")
    now = times(user=5.0, nice=3.0, system=2.0, idle=50.0, iowait=7.0, guest=4.0, guest_nice=1.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: now)
    assert ForeignLoad._machine() == 5 + 3 + 2
