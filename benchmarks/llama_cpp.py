"""llama.cpp's own benchmark of batches, `llama-batched-bench`, for the steps of `cpu_steps`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cpu_steps import Case

DECODED = 32
"""Tokens that are decoded of each row."""


def milliseconds(program: Path, file: Path, case: Case, threads: int, more: Sequence[str]) -> float:
    """Return the milliseconds of a step, its logits included, without sampling; `more`: options of
    llama.cpp. Decode steps are the faster with or without its fused attention. Raises
    CalledProcessError."""
    decodes = case.new == 1
    # The context of decoded tokens is around the requested one.
    prompt, new = (case.context - DECODED // 2, DECODED) if decodes else (case.new, 1)
    command = [
        *(str(program), "-m", str(file), "-c", str(case.rows * (prompt + new))),
        *("-npp", str(prompt), "-ntg", str(new), "-npl", str(case.rows)),
        *("-b", "2048", "-ub", "512", "-t", str(threads), "-tb", str(threads)),
        *("--output-format", "jsonl", *more),
    ]
    times = []
    for fused in ("on", "off") if decodes else ("on",):
        asked = [*command, "-fa", fused]
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        found = json.loads(lines[-1])
        times.append(float(found["t_tg"]) / new if decodes else float(found["t_pp"]))
    return 1e3 * min(times)
