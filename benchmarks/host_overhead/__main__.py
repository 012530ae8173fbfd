"""What everything but the model costs: `python -m benchmarks.host_overhead [--json FILE]`.

1. A decode step of the engine's loop beside the model, part by part, over rows and context.
2. The whole stack on an engine without a model: CPU time of engine, gateway and client per decode
   step, with nobody, somebody and everybody streaming, for programs and over HTTP.

All in CPU microseconds, which other programs disturb little: where compute and host share the
cores, what the host takes is what compute loses.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common import Report, console_of, rows_table
from benchmarks.host_overhead import engine_loop, stack
from rootlace.runtime.assets import demo_model

STEPS = [(rows, context) for context in (1024, 32_768) for rows in (1, 16, 64, 256)]
"""Rows and tokens of context; the last one shows what grows with the context."""
STEPS += [(64, 131_072)]
STACK_ROWS = (32, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--only", choices=("steps", "stack"), nargs="+", default=("steps", "stack"))
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    args = parser.parse_args()
    console = console_of(140)
    report = Report("host_overhead")

    def found(part: str, title: str, costs: list[Any]) -> None:
        console.print(rows_table(title, costs))
        report.add(part, costs)

    if "steps" in args.only:
        steps = [
            engine_loop.measure_steps(rows, context, rounds=args.rounds, streaming=streaming)
            for streaming in (True, False)
            for rows, context in STEPS
        ]
        found("steps", "Engine: CPU us per decode step beside the model", steps)
    if "stack" in args.only:
        with stack.started(demo_model()) as running:
            costs = [
                stack.measure_stack(running, mode, rows, args.rounds)
                for mode in stack.MODES
                for rows in STACK_ROWS
            ]
        found("stack", "Whole stack: CPU us per decode step, and per request", costs)
    console.print(report.foreign_line())
    report.write(args.json)


if __name__ == "__main__":
    main()
