"""A tiny model and a `rootlace serve` of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_model import make_tiny_model

HERE = Path(__file__).parent
CPU = ("--device", "cpu", "--threads", "1", "--kv-blocks", "256")


class Serve:
    """`rootlace serve` as a process; ready when constructed (or ended: see `output`)."""

    def __init__(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-c", "from rootlace.cli import main; main()", "serve"]
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.output = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if "programs" in line:
                break
        self._rest = threading.Thread(target=self._drain, daemon=True)
        self._rest.start()

    def _drain(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    @property
    def url(self) -> str:
        return self._address("HTTP")

    @property
    def program_address(self) -> str:
        return self._address("programs")

    def _address(self, what: str) -> str:
        found = re.search(rf"{what}\s+(\S+)", self.output)
        assert found, self.output
        return found[1]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Exit code after a signal."""
        self.process.send_signal(number)
        code = self.process.wait(100)
        self._rest.join(100)
        return code


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make check` starts no server."""
    for item in items:
        if item.path.parent == HERE and "served" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def served(tiny_model: Path) -> Iterator[Serve]:
    serve = Serve(tiny_model, "--port", "0", *CPU)
    yield serve
    code = serve.stop()  # SIGTERM
    serve.process.kill()
    assert code == 0 and "Traceback" not in serve.output, serve.output
