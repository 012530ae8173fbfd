"""A disk that is full stops nobody from serving."""

import logging
import sys
from pathlib import Path

import pytest

from rootlace.runtime import processes
from rootlace.runtime.config import LogConfig


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("form", ["text", "json"])
def test_what_cannot_be_logged_is_lost(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    full = Path("/dev/full").open("w")  # noqa: SIM115 closing it fails, too
    monkeypatch.setattr(sys, "stderr", full)
    try:
        processes.set_up_logs(LogConfig(log_level="info", log_format=form), "gateway")  # type: ignore[arg-type]
        for _ in range(3):
            logging.getLogger("rootlace").error("x" * 100_000)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        with pytest.raises(OSError, match="No space left"):
            full.close()
