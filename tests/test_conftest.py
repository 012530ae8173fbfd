"""What `conftest.py` does to the process that tests run in."""

import os
import signal
from pathlib import Path

import pytest

from tests import conftest
from tests.conftest import has_room, heed_interrupts, share


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (signal.SIG_IGN, signal.default_int_handler),
        (signal.SIG_DFL, signal.SIG_DFL),
    ],
)
def test_interrupts_are_not_ignored(before: signal.Handlers, after: object) -> None:
    own = signal.signal(signal.SIGINT, before)
    try:
        heed_interrupts()
        assert signal.getsignal(signal.SIGINT) is after
    finally:
        signal.signal(signal.SIGINT, own)


def test_every_core_is_that_of_one_worker() -> None:
    cores = {2, 3, 5, 7, 11}
    shares = [share(cores, worker, 3) for worker in range(3)]
    assert sorted(core for one in shares for core in one) == sorted(cores)
    assert [share(cores, worker, 6) for worker in range(6)] == [cores] * 6


def test_temporary_files_lie_in_main_memory_only_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "ROOM", 0)
    monkeypatch.setattr(os, "ST_NOEXEC", 0)
    assert has_room(tmp_path) and not has_room(tmp_path / "absent")
    monkeypatch.setattr(os, "ST_NOEXEC", -1)  # any flag
    flags = os.statvfs(tmp_path).f_flag
    assert has_room(tmp_path) == (flags == 0)
    monkeypatch.setattr(os, "ST_NOEXEC", 0)
    monkeypatch.setattr(conftest, "ROOM", 1 << 62)
    assert not has_room(tmp_path)
