"""The server process where it cannot start (the rest of its life is tested in tests/e2e)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rootlace.runtime.config import GatewayConfig, RuntimeConfig
from rootlace.runtime.server.app import serve
from rootlace.wire.errors import InvalidRequest


def run(line: bytes) -> tuple[int, dict[str, Any]]:
    """Exit status and the last line said; standard input stays open, as a parent's would."""
    command = [sys.executable, "-m", "rootlace.runtime.server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(line + b"\n")
        process.stdin.flush()
        said = process.stdout.read()
        code = process.wait()
    return code, json.loads(said.splitlines()[-1])


@pytest.mark.parametrize(
    ("line", "needle"),
    [
        (b"", "cannot be read"),
        (b"garbage", "cannot be read"),
        (b'{"gateway": {"model": "x"}, "engine": {}}', "program_address"),
        (
            b'{"gateway": {"model": "x", "program_address": "y", "http_port": "z"}, "engine": {}}',
            "http_port",
        ),
    ],
)
def test_bad_configuration(line: bytes, needle: str) -> None:
    code, said = run(line)
    assert code == 1 and said["error"] == "invalid_request" and needle in said["message"]


def test_no_model(tmp_path: Path) -> None:
    config = {
        "gateway": {"model": str(tmp_path), "program_address": f"ipc://{tmp_path}/g"},
        "engine": {"executor": {"model": str(tmp_path)}},
    }
    code, said = run(json.dumps(config).encode())
    assert code == 1 and said["error"] == "unsupported_model"
    assert "no config.json" in said["message"]


async def test_spans_without_their_packages_are_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, exporter, None)
    monkeypatch.setattr("rootlace.runtime.server.app.open_model", None)
    gateway = GatewayConfig(model="x", program_address="", otlp="http://localhost:1")
    with pytest.raises(InvalidRequest, match="--otlp needs OpenTelemetry's packages"):
        await serve([RuntimeConfig(gateway)])
