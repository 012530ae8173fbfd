"""llama.cpp's own server over HTTP, with prompts as token ids."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from typing import Any

from serve import LlamaServer, Request, arguments_of, serve

START_SECONDS = 120


class Engine(LlamaServer):
    """The server in its own process, restarted to empty its cache."""

    def __init__(self, arguments: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        super().__init__(f"llama-server-np{arguments.slots}", url, timeout=1200)
        threads, slots = str(arguments.threads), str(arguments.slots)
        self._command = [
            *(arguments.server, "-m", arguments.model),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("-np", slots, "-c", str(arguments.context), "--kv-unified"),
            *("-t", threads, "-tb", threads, "-fa", "on", "-b", "2048", "-ub", "512"),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.reset()

    def reset(self) -> None:
        self.stop()
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait_until_ready(self._process)
        self.add(Request("warm-up", list(range(300, 330)), 4))
        while not any(news.finished for news in self.step()):
            pass
        super().reset()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {process.returncode}")
            try:
                with self.open("/health", method="GET"):
                    return
            except OSError:  # no server listens, or it still loads (503)
                time.sleep(0.1)
        raise RuntimeError(f"llama-server was not ready within {START_SECONDS} s")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


if __name__ == "__main__":
    options = arguments_of(server="llama-server", slots=16, context=65536)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the server, too
    engine = Engine(options)
    try:
        serve(engine)
    finally:
        engine.stop()
