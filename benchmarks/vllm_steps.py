"""vLLM's steps on a CPU, for the steps of `cpu_steps`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cpu_steps import Case
from benchmarks.peers.known_peers import DRIVERS, vllm_environment


def milliseconds(python: Path, folder: Path, cases: Sequence[Case], threads: int) -> list[float]:
    """Return the milliseconds of a step of each case, with sampling and scheduling: the fastest of
    several. `python`: interpreter with vLLM. Raises CalledProcessError."""
    asked = [f"{case.rows}x{case.context}x{case.new}" for case in cases]
    command = [str(python), str(DRIVERS / "time_vllm.py"), str(folder.absolute()), *asked]
    more = vllm_environment(python, threads, kv_gib=1) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | more
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found
