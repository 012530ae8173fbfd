"""Length of a chat's path: `python -m benchmarks.path_hops [--json FILE] [--calls]`.

A warm chat of four tokens is sent to a served model, streamed, and with a known JSON schema.
Counted are the calls of our functions (a resumed coroutine counts again), their files, and how
often the path goes from one file to another: in the server, and in the engine's main thread.
`--calls` prints the path itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.common import ROOT, Report, aim, console_of, new_parser, table_of

# Python runs this at the start of each process; SIGUSR1 begins and ends the recording.
RECORDER = """
import json, os, signal, sys
calls, parts = [], [os.path.join({root!r}, one) for one in ("runtime", "frontend", "kernels")]
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(tuple(parts)):
        calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))
def turn(*_):
    if sys.getprofile() is None:
        calls.clear()
        sys.setprofile(note)
    else:
        sys.setprofile(None)
        path = os.path.join({folder!r}, str(os.getpid()))
        with open(path + ".part", "w") as file:
            json.dump(calls, file)
        os.rename(path + ".part", path)
signal.signal(signal.SIGUSR1, turn)
"""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
    "required": ["a"],
}
CHAT = {
    "messages": [{"role": "user", "content": "Hello!"}],
    "temperature": 0,
    "max_tokens": 4,
    "stream": True,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
WAYS = {
    "server, chat": ("server", CHAT, (260, 20, 90)),
    "engine, chat": ("engine", CHAT, (420, 25, 220)),
    "engine, JSON schema": ("engine", {**CHAT, "response_format": FORMAT}, (300, 30, 150)),
}
COLUMNS = {name: "{" + name + "}" for name in ("calls", "functions", "files", "moves")}


def record(pid: int, folder: Path, ask: Any) -> list[tuple[str, str]]:
    """Record calls of process `pid` while `ask` runs: (file, function), in order."""
    time.sleep(0.3)  # by then the previous request's connection is closed
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.05)
    ask()
    time.sleep(0.05)
    os.kill(pid, signal.SIGUSR1)
    while not (path := folder / str(pid)).exists():
        time.sleep(0.05)
    calls = [(os.path.relpath(file, ROOT), name) for file, name in json.loads(path.read_text())]
    path.unlink()
    return calls


def post(port: int, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        reply.read()


def main() -> None:
    parser = new_parser("path_hops", __doc__)
    parser.add_argument("--calls", action="store_true", help="print the way itself")
    parser.add_argument("--port", type=int, default=31877)
    options = parser.parse_args()
    report = Report("path_hops", options)
    found: dict[str, dict[str, int]] = {}
    aims = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        recorder = RECORDER.format(root=str(ROOT), folder=name)
        (folder / "sitecustomize.py").write_text(recorder)
        command = ["serve", "--served-name", "demo", "--port", str(options.port), "--threads", "1"]
        served = subprocess.Popen(
            [sys.executable, "-m", "rootlace.cli", *command],
            env={**os.environ, "PYTHONPATH": name},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while True:
                try:
                    post(options.port, CHAT)
                    break
                except OSError:
                    time.sleep(0.2)
            engine = next(
                one.pid
                for one in psutil.Process(served.pid).children(recursive=True)
                if "rootlace.runtime.engine" in one.cmdline()
            )
            for way, (process, body, bounds) in WAYS.items():
                for _ in range(3):
                    post(options.port, body)
                pid = engine if process == "engine" else served.pid
                ask = partial(post, options.port, body)
                # Timers that fire once a second do not belong to the path, so the median counts.
                calls = sorted((record(pid, folder, ask) for _ in range(5)), key=len)[2]
                files = [file for file, _ in calls]
                counts = {
                    "calls": len(calls),
                    "functions": len(set(calls)),
                    "files": len(set(files)),
                    "moves": sum(a != b for a, b in pairwise(files)),
                }
                found[way] = counts
                for what, bound in zip(("calls", "files", "moves"), bounds, strict=True):
                    aims.append({"what": f"{way}: {what}", **aim(counts[what], "<=", bound)})
                if options.calls:
                    print(way, *(f"  {file} {function}" for file, function in calls), sep="\n")
        finally:
            served.send_signal(signal.SIGINT)
            served.wait(30)
    console_of(100).print(table_of("one warm chat of four tokens", found, COLUMNS))
    report.add("ways", found)
    report.add("aims", aims)
    report.write()


if __name__ == "__main__":
    main()
