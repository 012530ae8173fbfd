"""The gateway as a child of this process."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rootlace.wire.errors import RootlaceError, ServerUnavailable, from_code

GATEWAY_MODULE = "rootlace.runtime.gateway"
MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 300.0
_LOG_TAIL_LINES = 20


class GatewayProcess:
    """Starts the gateway with a `RuntimeConfig` (nested dictionaries), waits until it is `ready`,
    and stops it. Messages go to the file `log`.

    With `on_gone`, one that dies is started again, up to `MAX_RESTARTS` times in
    `RESTART_WINDOW_SECONDS`; then `on_gone` is called.

    Raises ServerUnavailable, or the gateway's own typed error, when it does not start within
    `timeout` seconds.
    """

    def __init__(
        self,
        config: dict[str, Any],
        log: Path,
        timeout: float,
        on_gone: Callable[[], object] | None = None,
    ) -> None:
        self._config = config
        self._log = log
        self._timeout = timeout
        self._lock = threading.Lock()
        self._stopped = False
        self._log.write_bytes(b"")
        self._process = self._spawn()
        try:
            self.ready = self._wait_ready(self._process)
        except BaseException:
            self.stop(grace=1.0)
            raise
        if on_gone is not None:
            watching = threading.Thread(target=self._keep_up, args=(on_gone,), daemon=True)
            watching.start()

    def stop(self, grace: float) -> None:
        """End it: killed if it takes over `grace` seconds. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            process = self._process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        for end in (lambda: None, process.terminate, process.kill):
            end()
            try:
                process.wait(timeout=grace)
                return
            except subprocess.TimeoutExpired:
                grace = 2.0

    def _spawn(self) -> subprocess.Popen[str]:
        with self._log.open("a") as log:
            # A session of its own: Ctrl-C in the terminal is for the program, which cancels what
            # it runs. The runtime ends when its standard input does.
            return subprocess.Popen(
                [sys.executable, "-m", GATEWAY_MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def _wait_ready(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=_read_ready, args=(process.stdout, lines), daemon=True).start()
        try:
            process.stdin.write(json.dumps(self._config) + "\n")
            process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it died or was stopped at once: the reader finds its output ended
        try:
            ready = lines.get(timeout=self._timeout)
        except queue.Empty:
            raise ServerUnavailable(
                f"the runtime was not ready after {self._timeout:g} s{self._log_tail()}"
            ) from None
        if ready is None:
            code = process.wait(timeout=10)
            raise ServerUnavailable(
                f"the runtime ended with status {code} before it was ready{self._log_tail()}"
            )
        if "error" in ready:
            raise from_code(str(ready["error"]), f"{ready.get('message')}{self._log_tail()}")
        return ready

    def _keep_up(self, on_gone: Callable[[], object]) -> None:
        """Start it again whenever it has died."""
        deaths: list[float] = []
        while True:
            self._process.wait()
            now = time.monotonic()
            deaths = [*(t for t in deaths if now - t < RESTART_WINDOW_SECONDS), now]
            with self._lock:
                if self._stopped:
                    return
                if len(deaths) > MAX_RESTARTS:
                    break
                process = self._process = self._spawn()
            try:
                self.ready = self._wait_ready(process)
            except (RootlaceError, subprocess.TimeoutExpired):
                process.kill()
        on_gone()

    def _log_tail(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        except OSError:
            return ""
        return "".join(f"\n  | {line}" for line in lines)


def _read_ready(output: IO[str], lines: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """Pass on the first line that is a JSON object; then keep the pipe from filling up."""
    found = False
    for line in output:
        if found or not line.startswith("{"):
            continue
        try:
            lines.put(json.loads(line))
            found = True
        except ValueError:
            continue
    if not found:
        lines.put(None)
