"""Ourselves beside other engines on one machine: five workloads, in turns, in one run.

    python -m benchmarks.peers --peer-python vllm=PATH --models DIR --json FILE --plot FILE.svg

Every engine has the model loaded and takes its turn: cache emptied, one workload, then the next
engine. A peer runs under its own interpreter, driven by its driver (`benchmarks/peers/drivers`,
whose README says how each peer is installed), and is stopped while others run; any server with
OpenAI's interface can be named by `--url NAME=URL`. Ourselves are the whole stack (client, gateway,
engine): once with raw requests, token ids and one request each, and once as programs of the DSL.

Printed per model and workload: wall time and mean time to the first token of each engine, how many
times longer the best peer takes, programs over raw requests, and the floor, the least time that
the machine could take (benchmarks/peers/floors.py has the formula; `all flops` is the bound
that counts attention and the products of decode steps, too). Medians over repetitions, each with a
seed of its own. Engines that are slow do a part of a workload (`--peer-scale`), which
the table marks.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import environment, progress_bar, write_json
from benchmarks.peers.ceilings import best_of, measure_apart
from benchmarks.peers.floors import Ceilings, Shape, floor_of, work_of
from benchmarks.peers.measure import Row
from benchmarks.peers.options import checkpoint, parse_arguments
from benchmarks.peers.report import PROGRAMS, RAW, SPEED_TARGETS, Results, met_line
from benchmarks.peers.turns import measure_model
from benchmarks.peers.workloads import DESCRIPTIONS, WORKLOADS
from benchmarks.plot import plot_peers

TABLE_WIDTH = 110
"""Columns of text: all engines, ratios and floors."""


def floors_of(
    rows: Sequence[Row], model: Path, arguments: argparse.Namespace, ceilings: dict[str, Any]
) -> dict[str, Any]:
    """workload -> floor, of the first repetition (lengths are the same in all)."""
    shape = Shape.read(model, arguments.dtype)
    limits = Ceilings(ceilings["gemm_rate"], ceilings["read_bandwidth"])
    found = {}
    for row in rows:
        if row.engine == RAW and row.repetition == 0:
            workload = WORKLOADS[row.workload](row.seed, row.scale, shape.vocab)
            found[row.workload] = floor_of(work_of(workload, row.outputs), shape, limits).as_json()
    return found


def same_tokens(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """model -> workload -> share of the requests to which programs gave the tokens raw requests
    got. In bfloat16 a kernel whose sums depend on the batch may choose otherwise at a near tie."""
    raw = {(r.model, r.workload, r.repetition): r.outputs for r in rows if r.engine == RAW}
    shares: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        other = raw.get((row.model, row.workload, row.repetition))
        if row.engine != PROGRAMS or other is None:
            continue
        same = sum(row.outputs.get(name) == tokens for name, tokens in other.items())
        by_workload = shares.setdefault(row.model, {})
        by_workload.setdefault(row.workload, []).append(same / len(other))
    return {
        model: {workload: sum(found) / len(found) for workload, found in by_workload.items()}
        for model, by_workload in shares.items()
    }


def same_line(shares: Mapping[str, Mapping[str, float]]) -> str:
    least = min((share for found in shares.values() for share in found.values()), default=0.0)
    return (
        f"programs got the tokens of raw requests in at least {least:.1%} of a workload's requests"
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(__doc__ or "", argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that peers are ended, too
    console = Console()
    rows: list[Row] = []
    models: dict[str, Path] = {}
    floors: dict[str, Any] = {}
    about: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="rootlace-peers-") as work,
        progress_bar(console) as bar,
    ):
        task = bar.add_task("ceilings of the machine", total=None)

        def progress(what: str) -> None:
            bar.update(task, description=what, advance=1)
            if not console.is_terminal:  # a log
                print(what, flush=True)

        seconds = 0.3 if arguments.quick else 1.0
        # Before and after: one of them may have met another program.
        limits = [measure_apart(arguments.threads, arguments.dtype, seconds)]
        for size in arguments.sizes:
            models[size] = checkpoint(size, arguments.models, arguments.dtype)
            progress(f"{size}: loading")
            found, about[size] = measure_model(size, models[size], arguments, Path(work), progress)
            rows += found
            progress("ceilings of the machine")
            limits.append(measure_apart(arguments.threads, arguments.dtype, seconds))
    ceilings = best_of(limits)
    for size, model in models.items():
        of_size = [row for row in rows if row.model == size]
        floors[size] = floors_of(of_size, model, arguments, ceilings)
    results = Results(rows, floors)
    # A narrow terminal breaks the lines; a table without its last columns would be worse.
    console.width = max(console.width, TABLE_WIDTH)
    for size in arguments.sizes:
        console.print(results.wall_table(size))
        console.print(results.ttft_table(size))
    console.print(results.cache_table(arguments.sizes[0]))
    targets = results.targets()
    shares = same_tokens(rows)
    for line in [*results.remarks(), same_line(shares), met_line(targets)]:
        console.print(line, markup=False, highlight=False)
    for size, engines_of in about.items():
        for name, known in engines_of.items():
            if "error" in known:
                console.print(f"{name} ({size}): {known['error']}", markup=False, style="yellow")
    result = {
        "benchmark": "peers",
        **environment(),
        "options": {
            name: getattr(arguments, name)
            for name in (
                "sizes",
                "workloads",
                "seed",
                "repetitions",
                "scale",
                "dtype",
                "threads",
                "runtime",
                "peer_arguments",
            )
        },
        "workloads": DESCRIPTIONS,
        "peers": about,
        "ceilings": ceilings,
        "ratios": results.ratios(),
        "ttft_ratios": results.ttft_ratios(),
        "dsl_over_raw": results.programs_over_raw(),
        "dsl_same_tokens": shares,
        "floors": floors,
        "over_floor": results.over_floor(),
        "over_arithmetic_floor": results.over_floor("arithmetic_s"),
        "targets": targets,
        "remarks": results.remarks(),
        "rows": [row.as_json() for row in rows],
    }
    if arguments.json:
        write_json(arguments.json, result)
        console.print(f"written to {arguments.json}")
    if arguments.plot:
        plot_peers(result, SPEED_TARGETS, arguments.plot)
        console.print(f"drawn in {arguments.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
