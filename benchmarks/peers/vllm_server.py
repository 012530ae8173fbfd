"""vLLM's server with OpenAI's interface, on the CPU."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.completion_server import DIRECT
from benchmarks.peers.drive import PeerError
from benchmarks.peers.family import Family, end
from benchmarks.peers.known_peers import vllm_environment

START_SECONDS = 600


@contextmanager
def vllm_server(
    python: Path, model: Path, log: Path, threads: int, kv_gib: int, options: Sequence[str] = ()
) -> Iterator[tuple[str, int]]:
    """Start the server; return its address and process (`python`: interpreter of its environment);
    `log` gets its output. In development mode its cache can be emptied.

    Raises PeerError if it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(str(python.absolute()), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--disable-uvicorn-access-log", *options),
    ]
    environment = {
        **os.environ,
        **vllm_environment(python, threads, kv_gib),
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    url = f"http://127.0.0.1:{port}"
    # A group in our session: see `PeerProcess`.
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, process_group=0
        )
    family = Family(process.pid)
    try:
        _wait_until_ready(process, url, log)
        yield url, process.pid
    finally:
        members = list(family)
        process.terminate()
        end(members, grace=10)
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with DIRECT.open(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    end_of_log = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise PeerError(f"vLLM's server did not start:\n{end_of_log}")
