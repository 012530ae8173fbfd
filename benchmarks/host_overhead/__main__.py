"""What everything but the model costs: `python -m benchmarks.host_overhead [--json FILE]`.

The whole stack on an engine without a model: CPU time of engine (and of planning and committing
there), gateway and client per decode step and per request, with nobody, somebody and everybody
streaming, for programs and over HTTP; and with long prompts, which tells what grows with the
context.

All in CPU microseconds, which other programs disturb little: where compute and host share the
cores, what the host takes is what compute loses.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from itertools import product
from tempfile import TemporaryDirectory

from benchmarks.common import Report, console_of, new_parser, table_of
from benchmarks.host_overhead.stack import (
    LONG,
    MODES,
    SHORT,
    StackCost,
    measure_stack,
    started,
)
from rootlace.runtime.assets import demo_model

COLUMNS = {
    field.name.replace("_", " "): f"{{{field.name}:,.1f}}"
    for field in fields(StackCost)
    if field.name not in ("mode", "rows")
}


def main() -> None:
    parser = new_parser("host_overhead", __doc__)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 16, 64), help="at a time")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--state", action="store_true", help="each also with --state, in turns")
    args = parser.parse_args()
    console, report = console_of(140), Report("host_overhead", args)
    costs: list[StackCost] = []
    with ExitStack() as stack:
        stacks = {"": stack.enter_context(started(demo_model()))}
        if args.state:
            folder = stack.enter_context(TemporaryDirectory())
            stacks[", kept"] = stack.enter_context(started(demo_model(), state=folder))
        for mode, rows in product(args.modes, args.rows):
            for suffix, running in stacks.items():
                before = running.written()
                cost = measure_stack(running, mode, rows, args.rounds)
                costs.append(replace(cost, mode=f"{mode}{suffix}"))
                if suffix:
                    written = running.written() - before
                    tokens = rows * (SHORT + args.rounds * (SHORT + LONG))
                    console.print(f"{mode}, {rows}: {written / tokens:.1f} bytes for each token")
    rows = {f"{cost.mode}, {cost.rows} at a time": asdict(cost) for cost in costs}
    console.print(table_of("CPU us per decode step, and per request", rows, COLUMNS))
    for cost in costs:
        spent = (100 * cost.gateway / cost.rows + cost.gateway_request) / 1000
        name = f"{cost.mode}, {cost.rows} at a time"
        console.print(f"{name}: the gateway takes {spent:.2f} CPU ms for a request of 100 tokens")
    report.add("stack", costs)
    console.print(report.foreign_line())
    report.write()


if __name__ == "__main__":
    main()
