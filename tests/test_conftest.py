"""What `conftest.py` does to the process that tests run in."""

import signal

import pytest

from tests.conftest import heed_interrupts


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
