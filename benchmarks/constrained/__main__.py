"""Constrained decoding: engines side by side on masks, and end to end on JSON extraction.

    python -m benchmarks.constrained --json benchmarks/results/constrained.json

First every engine that is installed (ours, with each of its backends; llguidance and xgrammar as
libraries), each in its own process on the same vocabulary: 20 regular expressions and a set of JSON
schemas are compiled, and known texts are walked token by token. Printed are compile times (the best
of five; and again with whatever the engine caches), mask times (first visit of a position, and
later ones), memory, how many constraints and texts each takes, and the share of forced tokens. Then
the embedded model serves an extraction load unconstrained, constrained, and constrained with forced
text appended, in turns.

Of the served loads, `closed` asks for one or two short facts, `records` for a record of eight
fields with enumerations, both by schemas that allow no other property; `open` and `open records`
leave the schemas open, so that llguidance makes the masks.

`--tokenizer` names a folder with a big vocabulary; the embedded model's small one is the default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import Report, new_parser, progress_bar, table_of
from benchmarks.constrained.engines import ENGINES
from benchmarks.constrained.masks import KINDS, measure_apart
from benchmarks.constrained.serving import LOADS, MODES, measure_serving, runs_of
from benchmarks.plot import plot_constrained
from rootlace.runtime.assets import demo_model

COMPILING = {
    "taken": "{taken}/{of}",
    "texts": "{texts_taken}/{texts}",
    "p50": "{compile_p50_ms:.2f}",
    "p99": "{compile_p99_ms:.1f}",
    "cached": "{cached_p50_ms:.3f}",
}
"""Of tables; see `table_of`."""
MASKS = {
    "p50": "{mask_p50_us:.1f}",
    "p99": "{mask_p99_us:.1f}",
    "1st p50": "{mask_first_p50_us:.0f}",
    "1st p99": "{mask_first_p99_us:.0f}",
    "1st max": "{mask_first_max_us:.0f}",
    "forced": "{forced_share:.0%}",
}
SERVING = {
    "tok/s": "{tokens_per_second:.0f}",
    "req/s": "{requests_per_second:.1f}",
    "p50 ms": "{latency_p50_ms:.0f}",
    "p99 ms": "{latency_p99_ms:.0f}",
    "forced": "{forced_share:.0%}",
    "ratio": "{ratio:.2f}x",
}


def engine_tables(engines: Mapping[str, Any]) -> Iterator[Table]:
    for kind, title in KINDS.items() if engines else ():
        rows = {name: found.get("kinds", {}).get(kind, found) for name, found in engines.items()}
        yield table_of(f"{title}: compiling, ms", rows, COMPILING)
        yield table_of(f"{title}: masks, us", rows, MASKS)


def serving_table(found: Mapping[str, Any]) -> Table:
    rows = {
        mode: found["modes"][mode] | {"ratio": found["ratios"].get(f"{mode} / unconstrained", 1.0)}
        for mode in MODES
    }
    title = f"Extraction ({found['load']}, {found['model']}), {found['concurrency']} at a time"
    return table_of(title, rows, SERVING)


def main() -> None:
    parser = new_parser("constrained", __doc__)
    option = parser.add_argument
    option("--plot", type=Path, help="draw the results (SVG or PNG)")
    option("--tokenizer", type=Path, default=demo_model(), help="folder of a big vocabulary")
    option("--engines", nargs="*", choices=ENGINES, default=list(ENGINES))
    option("--seconds", type=float, default=200.0, help="per engine (default 200)")
    option("--requests", type=int, default=64, help="of the served load (default 64)")
    option("--repetitions", type=int, default=40, help="rounds of the three modes (default 40)")
    option("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    option("--concurrency", type=int, nargs="*", default=[1, 8])
    arguments = parser.parse_args()
    console = Console()
    report = Report("constrained", arguments, "llguidance", "xgrammar", "outlines-core")
    engines: dict[str, Any] = {}
    serving: list[dict[str, Any]] = []
    with progress_bar(console) as progress:
        for name in progress.track(arguments.engines, description="masks"):
            engines[name] = measure_apart(name, arguments.tokenizer, arguments.seconds)
        loads = [(kind, count) for kind in arguments.loads for count in arguments.concurrency]
        requests, repetitions = arguments.requests, arguments.repetitions
        task = progress.add_task("", total=len(loads) * runs_of(repetitions))
        for kind, count in loads:
            progress.update(task, description=f"{kind}, {count} at a time")
            done = partial(progress.advance, task)
            serving.append(
                measure_serving(str(demo_model()), requests, repetitions, count, kind, done)
            )
    for table in engine_tables(engines):
        console.print(table)
    for name, found in engines.items():
        if "memory_mib" in found:
            setup, memory = found["setup_seconds"], found["memory_mib"]
            console.print(f"{name}: set-up {setup:.2f} s, all constraints {memory:.0f} MiB")
    for found in serving:
        console.print(serving_table(found))
    report.found |= {"vocabulary": arguments.tokenizer.name, "engines": engines, "serving": serving}
    report.write()
    if arguments.plot and engines and serving:
        plot_constrained(engines, serving, arguments.plot)


if __name__ == "__main__":
    main()
