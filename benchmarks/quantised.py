"""What quantised weights gain on a CPU: `python -m benchmarks.quantised [--json FILE]`.

Steps of one random model with dense bfloat16 weights, and with weights that `--quantize` rounds to
int8 and to int4, all in memory at once and run in turns: decode steps of one row and of eight, and
a prefill. A step is counted with its logits; the fastest of each counts. Beside it stand the bytes
of weights that a step reads (codes and scales, without the embedding) over its time: a decode step
of one row reads little else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from rich.console import Console

from benchmarks.ceilings import measure_apart
from benchmarks.common import Report, console_of, new_parser, new_table
from benchmarks.cpu_steps import BLOCK_SIZE, Case, Subject
from benchmarks.random_models import MODELS, make_model
from benchmarks.step_plans import random_tables, random_tokens, step_plan
from rootlace.kernels.native.cores import usable_cores
from rootlace.kernels.weights import tensors
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import LoadWeights, checkpoint_dtype, load_weights
from rootlace.runtime.model.checkpoint.rounding import rounded

Weights = Literal["dense", "int8", "int4"]
KINDS: tuple[Weights, ...] = get_args(Weights)
SIZES = ("0.6B", "1B")


@dataclass(frozen=True)
class Result:
    model: str
    case: str
    weights: Weights
    milliseconds: float
    least: float
    """Milliseconds that reading the weights takes at the measured bandwidth."""
    gigabytes: float
    """Of weights, which a step reads."""


def weights_of(kind: Weights) -> LoadWeights:
    return load_weights if kind == "dense" else rounded(load_weights, kind)


def bytes_read(folder: Path, kind: Weights) -> int:
    """Of the weights that each step multiplies by."""
    config = ModelConfig.read(folder)
    weights = weights_of(kind)(config, checkpoint_dtype(config), torch.device("cpu"), None)
    return sum(tensor.nbytes for weight in weights.products() for tensor in tensors(weight))


@torch.inference_mode()
def measure(
    name: str,
    folder: Path,
    cases: Sequence[Case],
    threads: int,
    seconds: float,
    bandwidth: float,
) -> list[Result]:
    """The fastest step of each case and kind of weights, `seconds` being spent on a case."""
    tables = [random_tables(case.rows, case.context, BLOCK_SIZE) for case in cases]
    blocks = max(table.size for table in tables)
    sizes = {kind: bytes_read(folder, kind) for kind in KINDS}
    subjects = {kind: Subject(folder, blocks, threads, weights_of(kind)) for kind in KINDS}
    results = []
    for case, table in zip(cases, tables, strict=True):
        known = random_tokens(case.context, subjects["dense"].spec.vocab_size)
        plan = step_plan(table, BLOCK_SIZE, known, case.new)
        best = dict.fromkeys(KINDS, float("inf"))
        for subject in subjects.values():
            subject.run(plan)
        end = time.perf_counter() + seconds
        while True:
            for kind, subject in subjects.items():
                best[kind] = min(best[kind], subject.run(plan)[0])
            if time.perf_counter() > end:
                break
        results += [
            Result(
                *(name, case.name, kind, 1e3 * best[kind]),
                *(1e3 * sizes[kind] / bandwidth, sizes[kind] / 1e9),
            )
            for kind in KINDS
        ]
    return results


def show(results: list[Result], console: Console) -> None:
    columns = ("model, case", "weights", "GB", "step, ms", "GB/s", "least, ms", "x dense")
    table = new_table("Steps with quantised weights", *columns)
    dense = {(one.model, one.case): one for one in results if one.weights == "dense"}
    for one in results:
        table.add_row(
            f"{one.model}, {one.case}",
            one.weights,
            f"{one.gigabytes:.2f}",
            f"{one.milliseconds:,.1f}",
            f"{1e3 * one.gigabytes / one.milliseconds:.1f}",
            f"{one.least:.1f}",
            f"{dense[one.model, one.case].milliseconds / one.milliseconds:.2f}",
        )
    console.print(table)


def main() -> None:
    parser = new_parser("quantised", __doc__)
    option = parser.add_argument
    option("--models", type=Path, metavar="DIR", default=MODELS, help="holds them, or gets them")
    option("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    option("--rows", type=int, nargs="+", default=[1, 8], help="of the decode steps")
    option("--context", type=int, default=300, help="tokens of each of these rows")
    option("--prefill", type=int, nargs="+", default=[1024], help="tokens of the prompts")
    option("--threads", type=int, default=usable_cores(), help="threads that compute")
    option("--seconds", type=float, default=5.0, help="per case, best of many")
    args = parser.parse_args()
    cases = [
        *(Case(f"decode {n} x {args.context}", n, 1, args.context) for n in args.rows),
        *(Case(f"prefill {n}", 1, n, n) for n in args.prefill),
    ]
    console, report = console_of(100), Report("quantised", args)
    ceilings = measure_apart(args.threads, "bfloat16", args.seconds)
    results: list[Result] = []
    for size in args.sizes:
        folder = make_model(size, args.models / size)
        results += measure(
            *(size, folder, cases, args.threads, args.seconds, ceilings["read_bandwidth"])
        )
    show(results, console)
    report.add("ceilings", ceilings)
    report.add("results", results)
    console.print(f"reading {ceilings['read_bandwidth'] / 1e9:.1f} GB/s")
    console.print(report.foreign_line())
    report.write()


if __name__ == "__main__":
    main()
