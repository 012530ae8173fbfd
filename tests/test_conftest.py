"""What `conftest.py` does to the process that tests run in."""

import signal

import pytest

from tests.conftest import heed_interrupts, share


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
