"""What everything but the model costs: `python -m benchmarks.host_overhead [--json FILE]`.

The whole stack on an engine without a model: CPU time of engine (and of planning and committing
there), gateway and client per decode step and per request, with nobody, somebody and everybody
streaming, for programs and over HTTP; and with long prompts, which tells what grows with the
context.

All in CPU microseconds, which other programs disturb little: where compute and host share the
cores, what the host takes is what compute loses.
"""

from __future__ import annotations

from dataclasses import asdict, fields

from benchmarks.common import Report, console_of, new_parser, table_of
from benchmarks.host_overhead.stack import MODES, StackCost, measure_stack, started
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
    args = parser.parse_args()
    console, report = console_of(140), Report("host_overhead", args)
    with started(demo_model()) as running:
        costs = [
            measure_stack(running, mode, rows, args.rounds)
            for mode in args.modes
            for rows in args.rows
        ]
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
