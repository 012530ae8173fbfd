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
seed of its own. Engines that are slow do a part of a workload, which the table marks.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.ceilings import measure_apart
from benchmarks.common import Report, console_of, progress_bar
from benchmarks.peers.known_peers import KNOWN_PEERS
from benchmarks.peers.measure import Row
from benchmarks.peers.report import RAW, SPEED_TARGETS, Results
from benchmarks.peers.turns import measure_model, parse, turn_parser
from benchmarks.peers.workloads import WORKLOADS, Workload
from benchmarks.plot import plot_peers
from benchmarks.random_models import make_model

QUICK_SCALE = 0.125
TABLE_WIDTH = 110
"""Columns of text: all engines, ratios and floors."""


def _named(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not (name and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _peer(text: str) -> tuple[str, Path]:
    name, python = _named(text)
    if name not in KNOWN_PEERS:
        known = ", ".join(KNOWN_PEERS)
        raise argparse.ArgumentTypeError(f"unknown peer {name!r}; there are: {known}")
    if not Path(python).is_file():
        raise argparse.ArgumentTypeError(f"there is no {python}")
    return name, Path(python).absolute()


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = turn_parser("peers", __doc__, "bfloat16")
    option = parser.add_argument
    known = f"the interpreter of a peer, of: {', '.join(KNOWN_PEERS)}"
    repeated: dict[str, Any] = {"action": "append", "default": []}
    option("--peer-python", type=_peer, metavar="PEER=PATH", help=known, **repeated)
    option("--llama-server", type=Path, metavar="PATH", help="for llamacpp")
    option("--url", type=_named, metavar="NAME=URL", help="a server that runs", **repeated)
    option("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    option("--seed", type=int, default=0, help="of the first repetition")
    found = parse(parser, arguments)
    found.peer_python, found.url = dict(found.peer_python), dict(found.url)
    found.scale = found.scale or (QUICK_SCALE if found.quick else 1.0)
    return found


def floors_of(
    rows: Sequence[Row], model: Path, dtype: str, ceilings: dict[str, Any]
) -> dict[str, Any]:
    """Return workload -> floor, of the first repetition (all have the same lengths)."""
    # Not at the top: these need torch, which the measured client must not load.
    from benchmarks.peers.floors import floor_of, work_of
    from rootlace.runtime.model.checkpoint.config import ModelConfig

    spec = ModelConfig.read(model).spec
    limits = (ceilings["gemm_rate"], ceilings["read_bandwidth"])
    found = {}
    for row in rows:
        if row.engine == RAW and row.repetition == 0:
            workload = Workload(row.workload, row.seed, row.scale, spec.vocab_size)
            work = work_of(workload, row.outputs)
            found[row.workload] = asdict(floor_of(work, spec, dtype, *limits))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the peers, too
    # Broken lines on a narrow terminal are better than a table without its last columns.
    console = console_of(TABLE_WIDTH)
    console.width = max(console.width, TABLE_WIDTH)
    report = Report("peers", arguments)
    rows: list[Row] = []
    models: dict[str, Path] = {}
    about: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="rootlace-peers-") as work,
        progress_bar(console) as bar,
    ):
        task = bar.add_task("", total=None)

        def progress(what: str) -> None:
            bar.update(task, description=what, advance=1)
            if not console.is_terminal:  # output goes to a log
                print(what, flush=True)

        progress("ceilings of the machine")
        seconds = 0.5 if arguments.quick else 5.0
        ceilings = measure_apart(arguments.threads, arguments.dtype, seconds)
        for size in arguments.sizes:
            models[size] = make_model(size, arguments.models / size)
            progress(f"{size}: loading")
            found, about[size] = measure_model(size, models[size], arguments, Path(work), progress)
            rows += found
    floors = {
        size: floors_of([r for r in rows if r.model == size], model, arguments.dtype, ceilings)
        for size, model in models.items()
    }
    results = Results(rows, floors)
    for size in arguments.sizes:
        console.print(*results.tables(size))
    failed = [
        f"{name} ({size}): {known['error']}"
        for size, engines in about.items()
        for name, known in engines.items()
        if "error" in known
    ]
    console.print(*results.summary(), *failed, sep="\n", markup=False, highlight=False)
    report.found |= {
        "workloads": {name: kind.describe for name, kind in WORKLOADS.items()},
        "peers": about,
        "ceilings": ceilings,
        "ratios": results.ratios(),
        "ttft_ratios": results.ttft_ratios(),
        "dsl_over_raw": results.programs_over_raw(),
        "dsl_same_tokens": results.same_tokens(),
        "floors": floors,
        "over_floor": results.over_floor(),
        "over_arithmetic_floor": results.over_floor("arithmetic_s"),
        "targets": results.targets(),
        "remarks": list(results.remarks()),
        "rows": [row.as_json() for row in rows],
    }
    report.write()
    if arguments.plot:
        plot_peers(report.found, SPEED_TARGETS, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
