"""What everything but the model costs: `python -m benchmarks.host_overhead [--json FILE]`.

1. A decode step of the engine's loop beside the model, part by part, over rows and context.
2. The whole stack on a simulated engine: CPU time of engine, gateway and client per decode step,
   with nobody, somebody and everybody streaming, for programs and over HTTP.
3. The tree's operations with 10 thousand and a million cached nodes, and on five loads.

All in CPU microseconds, which other programs disturb little: where compute and host share the
cores, what the host takes is what compute loses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import ForeignLoad, environment, new_table, write_json
from benchmarks.host_overhead import engine_loop, stack, tree_operations
from rootlace.runtime.assets import demo_model

ROWS = (1, 16, 64, 256)
CONTEXTS = (1024, 32_768)
LONG_CONTEXT = (64, 131_072)
"""Rows and tokens of one case more, which shows what grows with the context."""
STACK_ROWS = (32, 64)
STEP_SECONDS = 0.002
NODES = (10_000, 1_000_000)


def show(title: str, results: Sequence[Any], console: Console) -> None:
    rows = [asdict(result) for result in results]
    table = new_table(title, *(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument(
        "--only", nargs="+", choices=("steps", "stack", "tree"), help="parts to measure (all)"
    )
    parser.add_argument(
        "--model", type=Path, help="folder of the tokenizer for the stack (the embedded model's)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="sizes of the tree")
    args = parser.parse_args()
    parts = args.only or ("steps", "stack", "tree")
    console = Console()
    if not console.is_terminal:
        console.width = 140
    foreign = ForeignLoad()
    report: dict[str, Any] = {"benchmark": "host_overhead", **environment()}
    if "steps" in parts:
        cases = [(r, c) for c in CONTEXTS for r in ROWS] + [LONG_CONTEXT]
        steps = [
            engine_loop.measure_steps(rows, context, rounds=args.rounds, streaming=streaming)
            for streaming in (True, False)
            for rows, context in cases
        ]
        show("Engine: CPU us per decode step beside the model", steps, console)
        report["steps"] = [asdict(cost) for cost in steps]
    if "stack" in parts:
        costs = []
        with stack.started(args.model or demo_model(), STEP_SECONDS) as running:
            for mode in stack.MODES:
                for rows in STACK_ROWS:
                    costs.append(stack.measure_stack(running, mode, rows, args.rounds))
        show("Whole stack: CPU us per decode step, and per request", costs, console)
        report["stack"] = [asdict(cost) for cost in costs]
    if "tree" in parts:
        loads = tree_operations.measure_loads(args.rounds)
        show("Tree: CPU us per request of a load", loads, console)
        sizes = [tree_operations.measure_tree_apart(nodes) for nodes in args.nodes]
        show("Tree: CPU us per operation on 4,096-token prompts", sizes, console)
        report["loads"] = [asdict(cost) for cost in loads]
        report["tree"] = [asdict(cost) for cost in sizes]
    report["foreign_cores"] = foreign.cores()
    console.print(f"other programs kept {report['foreign_cores']:.2f} cores busy meanwhile")
    if args.json:
        write_json(args.json, report)


if __name__ == "__main__":
    main()
