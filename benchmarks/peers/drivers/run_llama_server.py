"""llama.cpp's own server over HTTP, with prompts as token ids."""

from __future__ import annotations

import http.client
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from serve import News, Request, arguments_of, serve

START_SECONDS = 120


class Engine:
    """The server in a process of its own, started anew to empty its cache."""

    replies_are_ids = True

    def __init__(self, arguments: Any) -> None:
        self.name = f"llama-server-np{arguments.slots}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        threads, slots = str(arguments.threads), str(arguments.slots)
        self._command = [
            *(arguments.server, "-m", arguments.model),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("-np", slots, "-c", str(arguments.context), "--kv-unified"),
            *("-t", threads, "-tb", threads, "-fa", "on", "-b", "2048", "-ub", "512"),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._news: queue.Queue[News | Exception] = queue.Queue()
        self._cached = 0
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
        self._cached = 0

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {process.returncode}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"llama-server was not ready within {START_SECONDS} s")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def cached(self) -> int:
        return self._cached

    def add(self, request: Request) -> None:
        threading.Thread(target=self._complete, args=(request,), daemon=True).start()

    def step(self) -> list[News]:
        news = self._news.get()
        if isinstance(news, Exception):
            raise news
        return [news]

    def _complete(self, request: Request) -> None:
        body = {
            "prompt": request.prompt,
            "n_predict": request.wanted,
            "temperature": 0.0,
            "top_k": 1,
            "samplers": ["top_k"],
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
            "return_tokens": True,
        }
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1200)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/completion", json.dumps(body), headers)
            told = 0
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    told = self._tell(request, told, json.loads(line[6:]))
                elif line.strip():
                    raise RuntimeError(line.decode(errors="replace")[:300])
        except Exception as error:
            self._news.put(error)

    def _tell(self, request: Request, told: int, event: dict[str, Any]) -> int:
        """Pass an event's tokens on; how many were told by now."""
        finished = bool(event.get("stop"))
        tokens = (event.get("tokens") or [])[: request.wanted - told]
        told += len(tokens)
        if finished:
            # Ids of a character that is not complete were generated and are never streamed.
            if event.get("tokens_predicted") == request.wanted:
                tokens += [1000] * (request.wanted - told)
            self._cached += event.get("timings", {}).get("cache_n", 0)
        self._news.put(News(request.name, tokens, finished, time.perf_counter()))
        return told


if __name__ == "__main__":
    options = arguments_of(server="llama-server", slots=16, context=65536)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped, too
    engine = Engine(options)
    try:
        serve(engine)
    finally:
        engine.stop()
