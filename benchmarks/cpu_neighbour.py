"""Cost of neighbours that take cores: `python -m benchmarks.cpu_neighbour [--json FILE]`.

Steps of a model on the native kernels run for some seconds alone, and for some beside programs that
never rest and have one core each, in turns. The result is the number of steps, not the fastest one.
With one neighbour on two cores, one core and half of the other are left: an even division gives
half of the throughput, a perfect one three quarters.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from benchmarks.common import Report, aim, console_of, new_parser, new_table
from benchmarks.cpu_steps import BLOCK_SIZE, Case, Subject
from benchmarks.random_models import MODELS, SIZES, make_model
from benchmarks.step_plans import random_tokens, step_plan
from rootlace.kernels.native.machine import read_cores, usable_cores

REST = 0.5
"""Seconds after a neighbour comes or goes that do not count: the team has to notice."""
CASES = (Case("decode 8 x 300", 8, 1, 300), Case("prefill 1024", 1, 1024, 1024))
SHARE = 0.45
"""Of its throughput that one neighbour on two cores is to leave."""


@dataclass
class Result:
    """Steps per second of each turn."""

    model: str
    case: str
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return statistics.median(self.beside) / statistics.median(self.alone)


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run so many programs, on the first hardware threads of the last cores."""
    cores = [core.threads[0] for core in read_cores().all][::-1][:count]
    spin = "import os; os.sched_setaffinity(0, [{}])\nwhile True: pass"
    running = [subprocess.Popen([sys.executable, "-c", spin.format(core)]) for core in cores]
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def steps_per_second(step: Callable[[], object], seconds: float) -> float:
    for span in (REST, seconds):
        count, start = 0, time.perf_counter()
        while time.perf_counter() < start + span:
            step()
            count += 1
        lasted = time.perf_counter() - start
    return count / lasted


@torch.inference_mode()
def measure(
    size: str, folder: Path, threads: int, count: int, turns: int, seconds: float
) -> list[Result]:
    tables = [case.tables() for case in CASES]
    subject = Subject(folder, max(table.size for table in tables), threads)
    found = []
    for case, table in zip(CASES, tables, strict=True):
        known = random_tokens(case.context, subject.spec.vocab_size)
        step = partial(subject.run, step_plan(table, BLOCK_SIZE, known, case.new))
        result = Result(size, case.name)
        for _ in range(turns):
            result.alone.append(steps_per_second(step, seconds))
            with neighbours(count):
                result.beside.append(steps_per_second(step, seconds))
        found.append(result)
    return found


def main() -> None:
    parser = new_parser("cpu_neighbour", __doc__)
    option = parser.add_argument
    option("--models", type=Path, metavar="DIR", default=MODELS, help="holds them, or gets them")
    option("--sizes", nargs="+", choices=SIZES, default=["a", "b"])
    option("--neighbours", type=int, default=1, help="each takes a core")
    option("--threads", type=int, default=usable_cores(), help="threads that compute")
    option("--turns", type=int, default=3)
    option("--seconds", type=float, default=2.0, help="of each turn, alone and beside")
    args = parser.parse_args()
    console, report = console_of(100), Report("cpu_neighbour", args)
    if args.neighbours > len(os.sched_getaffinity(0)):
        parser.error("there are fewer cores than neighbours")
    results: list[Result] = []
    for size in args.sizes:
        folder = make_model(size, args.models / size)
        results += measure(size, folder, args.threads, args.neighbours, args.turns, args.seconds)
    table = new_table("Steps per second", "", "alone", "beside", "share")
    for one in results:
        cells = (f"{statistics.median(each):,.1f}" for each in (one.alone, one.beside))
        table.add_row(f"{one.model}, {one.case}", *cells, f"{one.share:.0%}")
    console.print(table)
    report.add("results", results)
    worst = min(one.share for one in results)
    if (args.neighbours, usable_cores()) == (1, 2):
        report.add("share", aim(worst, ">=", SHARE))
    report.write()


if __name__ == "__main__":
    main()
