"""What quantised weights gain on a CPU: `python -m benchmarks.quantised [--json FILE]`.

Steps of one random model with dense bfloat16 weights, and with weights that `--quantize` rounds to
int8 and to int4, all in memory at once and run in turns: decode steps of one row and of eight, and
a prefill. A step is counted with its logits; the fastest of each counts. Beside it stand the bytes
of weights that a step reads (codes and scales, without the embedding) over its time: a decode step
of one row reads little else.

With `--gguf FILE ... --llama-batched-bench PATH` the same steps of GGUF files, and llama.cpp's of
the very files (`benchmarks/llama_cpp.py`); `benchmarks/peers/drivers/to_gguf.py` writes the file
that `llama-quantize` takes. With `--checkpoints w8a8 awq --vllm-python PATH` those of checkpoints
in these formats, and vLLM's of the very checkpoints (`benchmarks/vllm_steps.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from rich.console import Console

from benchmarks import llama_cpp, vllm_steps
from benchmarks.ceilings import measure_apart
from benchmarks.common import Report, console_of, new_parser, new_table
from benchmarks.cpu_steps import BLOCK_SIZE, Case, Subject
from benchmarks.quantised_checkpoints import SCHEMES, make_quantised
from benchmarks.random_models import MODELS, make_model
from benchmarks.step_plans import random_tables, random_tokens, step_plan
from rootlace.kernels.native.machine import usable_cores
from rootlace.kernels.weights import tensors
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import LoadWeights, load_weights, rounded

Kind = Literal["dense", "int8", "int4"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SIZES = ("0.6B", "1B")


@dataclass(frozen=True)
class Result:
    model: str
    case: str
    weights: str
    """A kind of weights, or a file's or checkpoint's name."""
    milliseconds: float
    least: float
    """Milliseconds that reading the weights takes at the measured bandwidth."""
    gigabytes: float
    """Of weights, which a step reads."""
    peer: float | None = None
    """Milliseconds that llama.cpp takes with a GGUF file, or vLLM with a checkpoint."""


@dataclass(frozen=True)
class Source:
    """A folder or a GGUF file, and how to load its weights."""

    weights: str
    path: Path
    load: LoadWeights

    def bytes_read(self) -> int:
        """Return the bytes of the weights that each step multiplies by."""
        config = ModelConfig.read(self.path)
        weights = self.load(config, torch.bfloat16, torch.device("cpu"), None)
        return sum(tensor.nbytes for weight in weights.products() for tensor in tensors(weight))


@dataclass(frozen=True)
class Peer:
    """Another engine. `files`: its files by the names of results; `milliseconds` measures its
    steps."""

    files: Mapping[str, Path]
    milliseconds: Callable[[Path, Sequence[Case]], Sequence[float]]


def sources_of(folder: Path, kinds: Sequence[Kind], files: Sequence[Path]) -> list[Source]:
    loads = {
        kind: load_weights if kind == "dense" else rounded(load_weights, kind) for kind in kinds
    }
    return [
        *(Source(kind, folder, load) for kind, load in loads.items()),
        *(Source(file.stem, file, load_weights) for file in files),
    ]


@torch.inference_mode()
def measure(
    name: str,
    sources: Sequence[Source],
    cases: Sequence[Case],
    threads: int,
    seconds: float,
    bandwidth: float,
) -> list[Result]:
    """Return the fastest step of each case and source, in `seconds` of measuring per case."""
    tables = [random_tables(case.rows, case.context, BLOCK_SIZE) for case in cases]
    blocks = max(table.size for table in tables)
    sizes = [source.bytes_read() for source in sources]
    subjects = [
        Subject(source.path, blocks, threads, source.load, torch.bfloat16) for source in sources
    ]
    results = []
    for case, table in zip(cases, tables, strict=True):
        known = random_tokens(case.context, subjects[0].spec.vocab_size)
        plan = step_plan(table, BLOCK_SIZE, known, case.new)
        best = [subject.run(plan)[0] for subject in subjects]
        end = time.perf_counter() + seconds
        while True:
            best = [min(least, one.run(plan)[0]) for least, one in zip(best, subjects, strict=True)]
            if time.perf_counter() > end:
                break
        results += [
            Result(
                *(name, case.name, source.weights, 1e3 * least),
                *(1e3 * size / bandwidth, size / 1e9),
            )
            for source, least, size in zip(sources, best, sizes, strict=True)
        ]
    return results


def beside(results: list[Result], cases: Sequence[Case], peer: Peer) -> list[Result]:
    """Return the results, with the peer's times beside those of its files."""
    known = {
        (weights, case.name): time
        for weights, file in peer.files.items()
        for case, time in zip(cases, peer.milliseconds(file, cases), strict=True)
    }
    return [replace(one, peer=known.get((one.weights, one.case), one.peer)) for one in results]


def _llama_cpp(
    program: Path, threads: int, options: Sequence[str], file: Path, cases: Sequence[Case]
) -> list[float]:
    return [llama_cpp.milliseconds(program, file, case, threads, options) for case in cases]


def _vllm(python: Path, threads: int, folder: Path, cases: Sequence[Case]) -> list[float]:
    return vllm_steps.milliseconds(python, folder, cases, threads)


def show(results: list[Result], console: Console) -> None:
    columns = ("model, case", "weights", "GB", "step, ms", "GB/s", "least, ms", "x dense")
    table = new_table("Steps with quantised weights", *columns, "x peer")
    dense = {(one.model, one.case): one.milliseconds for one in results if one.weights == "dense"}

    def times(other: float | None, own: float) -> str:
        return "" if other is None else f"{other / own:.2f}"

    for one in results:
        table.add_row(
            f"{one.model}, {one.case}",
            one.weights,
            f"{one.gigabytes:.2f}",
            f"{one.milliseconds:,.1f}",
            f"{1e3 * one.gigabytes / one.milliseconds:.1f}",
            f"{one.least:.1f}",
            times(dense.get((one.model, one.case)), one.milliseconds),
            times(one.peer, one.milliseconds),
        )
    console.print(table)


def main() -> None:
    parser = new_parser("quantised", __doc__)
    option = parser.add_argument
    option("--models", type=Path, metavar="DIR", default=MODELS, help="holds them, or gets them")
    option("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    option("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="of weights")
    option("--gguf", type=Path, nargs="+", default=[], metavar="FILE", help="of the one size")
    option("--llama-batched-bench", type=Path, metavar="PATH", help="llama.cpp's own benchmark")
    option("--llama-options", default="", help='its options besides, as "--no-repack --no-host"')
    option("--checkpoints", nargs="*", choices=SCHEMES, default=[], help="that vLLM reads, too")
    option("--vllm-python", type=Path, metavar="PATH", help="of an environment with vLLM")
    option("--rows", type=int, nargs="+", default=[1, 8], help="of the decode steps")
    option("--context", type=int, default=300, help="tokens of each of these rows")
    option("--prefill", type=int, nargs="+", default=[1024], help="tokens of the prompts")
    option("--threads", type=int, default=usable_cores(), help="threads that compute")
    option("--seconds", type=float, default=5.0, help="per case, best of many")
    args = parser.parse_args()
    if args.gguf and len(args.sizes) > 1:
        parser.error("--gguf takes files of one size: name it with --sizes")
    cases = [
        *(Case(f"decode {n} x {args.context}", n, 1, args.context) for n in args.rows),
        *(Case(f"prefill {n}", 1, n, n) for n in args.prefill),
    ]
    console, report = console_of(120), Report("quantised", args)
    ceilings = measure_apart(args.threads, "bfloat16", args.seconds)
    results: list[Result] = []
    for size in args.sizes:
        folder = make_model(size, args.models / size)
        made = {
            name: make_quantised(name, folder, args.models / f"{size}-{name}")
            for name in args.checkpoints
        }
        sources = [
            *sources_of(folder, args.kinds, args.gguf),
            *(Source(name, path, load_weights) for name, path in made.items()),
        ]
        found = measure(
            *(size, sources, cases, args.threads, args.seconds, ceilings["read_bandwidth"])
        )
        if args.vllm_python:
            found = beside(found, cases, Peer(made, partial(_vllm, args.vllm_python, args.threads)))
        results += found
    if args.llama_batched_bench:
        program, options = args.llama_batched_bench, args.llama_options.split()
        files = {file.stem: file for file in args.gguf}
        run = partial(_llama_cpp, program, args.threads, options)
        results = beside(results, cases, Peer(files, run))
    show(results, console)
    report.add("ceilings", ceilings)
    report.add("results", results)
    console.print(f"reading {ceilings['read_bandwidth'] / 1e9:.1f} GB/s")
    console.print(report.foreign_line())
    report.write()


if __name__ == "__main__":
    main()
