"""Constrained decoding: engines side by side on masks, and end to end on JSON extraction.

    python -m benchmarks.constrained --json benchmarks/results/constrained.json

First every engine that is installed (ours, llguidance, xgrammar, outlines-core), each in its own
process on the same vocabulary: 20 regular expressions and a set of JSON schemas are compiled, and
known texts are walked token by token. Printed are compile times (the best of five; and again with
whatever the engine caches), mask times (first visit of a position, and later ones), memory, how
many constraints and texts each takes, and the share of forced tokens. Then the embedded model
serves an extraction load unconstrained, constrained, and constrained with forced text appended,
in turns.

Of the served loads, `closed` asks for one or two short facts, `records` for a record of eight
fields with enumerations, both by schemas that allow no other property; `open` and `open records`
leave the schemas open, so that llguidance makes the masks.

`--tokenizer` names a folder with a big vocabulary; the embedded model's small one is the default.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.common import (
    ForeignLoad,
    aim,
    environment,
    new_table,
    package_version,
    percentile,
    progress_bar,
    write_json,
)
from benchmarks.constrained.engines import ENGINES
from benchmarks.constrained.serving import MODES, measure_serving, runs_of
from benchmarks.given import REGEXES, SCHEMAS
from benchmarks.plot import plot_constrained
from rootlace.runtime.assets import demo_model

LOADS = ("closed", "open", "records", "open records")
KINDS = {"regex": "20 regular expressions", "json_schema": f"{len(SCHEMAS)} JSON schemas"}


def measure_engine(
    name: str, tokenizer: Path, seconds: float, progress: Progress
) -> dict[str, Any]:
    """Run `benchmarks.constrained.masks` for one engine and collect what it says."""
    task = progress.add_task(name, total=len(REGEXES) + len(SCHEMAS))
    command = [sys.executable, "-m", "benchmarks.constrained.masks", name, str(tokenizer)]
    load = ForeignLoad()
    lines: list[dict[str, Any]] = []
    with subprocess.Popen(
        [*command, str(seconds)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(json.loads(line))
            progress.update(task, advance="name" in lines[-1])
    progress.remove_task(task)
    if not lines:
        return {"error": "not installed, or it could not start"}
    single = {key: value for line in lines if "name" not in line for key, value in line.items()}
    constraints = [line for line in lines if "name" in line]
    return {
        **single,
        "foreign_cores": load.cores(),
        "kinds": {
            kind: summarise([line for line in constraints if line["kind"] == kind])
            for kind in KINDS
        },
        "constraints": [
            {
                key: percentile(value, 0.99) if key.endswith("_us") else value
                for key, value in line.items()
            }
            for line in constraints
        ],
    }


def summarise(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Percentiles over all constraints of one kind that the engine took."""
    taken = [line for line in lines if "error" not in line]
    compiles = [line["compile_ms"] for line in taken]
    first = [value for line in taken for value in line["first_us"]]
    later = [value for line in taken for value in line["later_us"]]
    tokens = sum(line["tokens"] for line in taken)
    return {
        "taken": len(taken),
        "of": len(lines),
        "texts": sum(line["texts"] for line in taken),
        "texts_taken": sum(line["texts"] - line["texts_refused"] for line in taken),
        "compile_p50_ms": percentile(compiles, 0.5),
        "compile_p99_ms": percentile(compiles, 0.99),
        "cached_p50_ms": percentile([line["cached_ms"] for line in taken], 0.5),
        "mask_first_p50_us": percentile(first, 0.5),
        "mask_first_p99_us": percentile(first, 0.99),
        "mask_first_max_us": max(first, default=float("nan")),
        "mask_p50_us": percentile(later, 0.5),
        "mask_p99_us": percentile(later, 0.99),
        "forced_share": sum(line["forced"] for line in taken) / tokens if tokens else 0.0,
    }


COMPILING = {
    "taken": "{taken}/{of}",
    "texts": "{texts_taken}/{texts}",
    "p50": "{compile_p50_ms:.2f}",
    "p99": "{compile_p99_ms:.1f}",
    "cached": "{cached_p50_ms:.3f}",
}
"""Of tables: what stands in each column, of a row's figures."""
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


def table_of(title: str, rows: Mapping[str, Any], columns: Mapping[str, str]) -> Table:
    """A row per name; one that failed has its error instead."""
    table = new_table(title, "", *columns)
    for name, row in rows.items():
        cells = [row["error"]] if "error" in row else [c.format(**row) for c in columns.values()]
        table.add_row(name, *cells)
    return table


def engine_tables(engines: Mapping[str, Any]) -> Iterator[Table]:
    for kind, title in KINDS.items():
        rows = {name: found.get("kinds", {}).get(kind, found) for name, found in engines.items()}
        yield table_of(f"{title}: compiling, ms", rows, COMPILING)
        yield table_of(f"{title}: masks, us", rows, MASKS)


def serving_table(found: Mapping[str, Any]) -> Table:
    names = {"constrained": "constrained, no jump", "jump": "constrained, jump"}
    rows = {
        names.get(mode, mode): found["modes"][mode]
        | {"ratio": found["ratios"].get(f"{mode} / unconstrained", 1.0)}
        for mode in MODES
    }
    title = f"Extraction ({found['load']}, {found['model']}), {found['concurrency']} at a time"
    return table_of(title, rows, SERVING)


def targets(engines: dict[str, Any], serving: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each target of the design with what was measured."""
    found: dict[str, dict[str, Any]] = {}

    ours, peer = engines.get("rootlace (automaton)", {}), engines.get("llguidance", {})
    if "kinds" in ours:
        regex = ours["kinds"]["regex"]
        found |= {
            "compile p50 of 20 regexes": aim(regex["compile_p50_ms"], "<", 2, " ms"),
            "mask p99 of a row that is there": aim(regex["mask_p99_us"], "<", 50, " us"),
            "mask p99 of a first visit": aim(regex["mask_first_p99_us"], "<", 5000, " us"),
        }
        if "kinds" in peer:
            theirs = peer["kinds"]["regex"]["compile_p50_ms"]
            warm = aim(regex["cached_p50_ms"], "<", theirs, " ms, llguidance's")
            found["compile p50 with a warm cache"] = warm
    for one in serving:
        at = f", {one['load']}, {one['model']}, {one['concurrency']} at a time"
        ratios = one["ratios"]
        without, jump = ratios["constrained / unconstrained"], ratios["jump / unconstrained"]
        found[f"constrained without jump / unconstrained{at}"] = aim(without, ">=", 0.97)
        found[f"with jump / unconstrained{at}"] = aim(jump, ">=", 1.6)
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.constrained", description=(__doc__ or "").splitlines()[0]
    )
    option = parser.add_argument
    option("--json", type=Path, help="write everything measured to this file")
    option("--plot", type=Path, help="draw the results (SVG or PNG)")
    option("--tokenizer", type=Path, help="folder of a tokenizer with a big vocabulary")
    option("--engines", nargs="*", choices=ENGINES, default=list(ENGINES))
    option("--seconds", type=float, default=200.0, help="per engine (default 200)")
    option("--requests", type=int, default=64, help="of the served load (default 64)")
    option("--repetitions", type=int, default=40, help="rounds of the three modes (default 40)")
    option("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    option("--concurrency", type=int, nargs="*", default=[1, 8])
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    model = str(demo_model())
    tokenizer = arguments.tokenizer or Path(model)
    console = Console()
    engines: dict[str, Any] = {}
    serving: list[dict[str, Any]] = []
    with progress_bar(console) as progress:
        for name in arguments.engines:
            engines[name] = measure_engine(name, tokenizer, arguments.seconds, progress)
        loads = [(kind, count) for kind in arguments.loads for count in arguments.concurrency]
        requests, repetitions = arguments.requests, arguments.repetitions
        task = progress.add_task("", total=len(loads) * runs_of(repetitions))
        for kind, count in loads:
            progress.update(task, description=f"{kind}, {count} at a time")
            done = partial(progress.advance, task)
            serving.append(measure_serving(model, requests, repetitions, count, kind, done))
    for table in engine_tables(engines) if engines else ():
        console.print(table)
    for name, found in engines.items():
        if "memory_mib" in found:
            setup, memory = found["setup_seconds"], found["memory_mib"]
            console.print(f"{name}: set-up {setup:.2f} s, all constraints {memory:.0f} MiB")
    for found in serving:
        console.print(serving_table(found))
    checks = targets(engines, serving)
    for name, check in checks.items():
        mark = {True: "met", False: "MISSED", None: ""}[check["met"]]
        console.print(f"{mark:>6}  {name}: {check['value'] or 0.0:.3f} ({check['target']})")
    if arguments.json:
        packages = ("llguidance", "xgrammar", "outlines-core", "interegular")
        result = {
            "environment": environment() | {"engines": {p: package_version(p) for p in packages}},
            "vocabulary": {"tokenizer": tokenizer.name},
            "engines": engines,
            "serving": serving,
            "targets": checks,
        }
        write_json(arguments.json, result)
    if arguments.plot and engines and serving:
        plot_constrained(engines, serving, arguments.plot)


if __name__ == "__main__":
    main()
