"""Our kernels on a CPU beside what it can do at most: `python -m benchmarks.cpu_kernels`.

*Products* of the linear layers of the random models, from one row to thousands, beside torch's.
Weights rotate, as in a forward pass, so that few rows find none in a cache. *Attention* over paged
keys and values as serving brings them, beside our reference kernels, in layers whose caches are
larger than the processor's.

The floor of a product or a step is the larger of its bytes by the bandwidth and its operations by
the rate of a large product, both measured in the same run. `of floor` is the share of it that is
reached: above 1 where a product is faster than the one that the rate is measured by. Times are the
best of many, taken in turns.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from benchmarks.common import Report, console_of, new_table
from benchmarks.random_models import SHAPES
from benchmarks.step_plans import random_tables
from rootlace.kernels import AttentionBatch
from rootlace.kernels.native.attention import attend, laid_out
from rootlace.kernels.native.cores import usable_cores
from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.library import load
from rootlace.kernels.native.linear import Arena, Epilogue, PackedLinear, Products
from rootlace.kernels.reference.attention import paged_attention
from rootlace.kernels.reference.attention_plan import plan_attention
from rootlace.kernels.reference.shared_prefix import shared_runs
from rootlace.runtime.doctor.ceilings import (
    READ_BYTES,
    Heads,
    best_seconds,
    product_rates,
    read_bandwidth,
)

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
ROTATED = 160 << 20
"""Bytes of weights that a pass goes over, more than caches hold; fewer at many rows."""
PASS_FLOPS = 8e9
CACHED_BYTES = 96 << 20
"""Layers are added until their keys and values take more than this."""
MOST_LAYERS = 12
BLOCK_SIZE = 16
SPIN_SECONDS = 0.01
"""Threads of torch's pool wait so long for more work before they leave the cores to others."""


def layers_of(model: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each kind of linear layer of a random model."""
    shape = SHAPES[model]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    q, kv = (shape["head_dim"] * shape[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    return {
        "qkv": (q + 2 * kv, hidden),
        "output": (hidden, q),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (shape["vocab_size"], hidden),
    }


@dataclass(frozen=True)
class Case:
    """`rows` rows of `new` tokens each, the last of `context`, of which groups of `below` rows
    share the first `shared`."""

    name: str
    rows: int
    new: int
    context: int
    shared: int = 0
    below: int = 1

    @property
    def pairs(self) -> float:
        """Tokens times the keys that each sees."""
        return self.rows * self.new * (self.context - (self.new - 1) / 2)

    @property
    def distinct(self) -> int:
        """Keys, shared ones once."""
        return self.rows * (self.context - self.shared) + self.rows // self.below * self.shared


CASES = (
    Case("decode 32 x 300", 32, 1, 300),
    Case("decode 32 x (1000 + 60)", 32, 1, 1056, 992, 32),
    Case("decode 64 x (1000 + 60)", 64, 1, 1056, 992, 64),
    Case("decode 1 x 4k", 1, 1, 4000),
    Case("decode 1 x 32k", 1, 1, 32768),
    Case("decode 4 x 4 x (400 + 52)", 16, 1, 452, 400, 4),
    Case("extend 60 x 64 over 1000", 64, 60, 1060, 992, 64),
    Case("extend 2048 over 2000", 1, 2048, 4048),
    Case("prefill 2048", 1, 2048, 2048),
)


@dataclass(frozen=True)
class Work:
    """`count` times the same: `flops` operations, `moved` bytes at least. `kernels`: what does it
    all, ours first."""

    name: str
    count: int
    flops: float
    moved: float
    kernels: dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Result:
    """`seconds`: of one of what was done `count` times."""

    name: str
    kernel: str
    seconds: float
    gflops: float
    gbs: float
    floor: float


def products(
    layer: str, shape: tuple[int, int], rows: Sequence[int], dtype: torch.dtype, team: Team
) -> Iterator[Work]:
    """Passes over many weights of one shape, at each number of rows."""
    (outputs, inputs), library = shape, load()
    size = outputs * inputs * dtype.itemsize
    gated, arena = layer == "gate_up", Arena()
    weights = [
        (torch.randn(outputs, inputs) * 0.05).to(dtype)
        for _ in range(max(1, min(ROTATED // size, 400)))
    ]
    packed = [PackedLinear(library, team, one, gated=gated, arena=arena) for one in weights]
    for count in rows:
        flops = 2.0 * count * outputs * inputs
        length = max(1, min(len(weights), int(PASS_FLOPS / flops)))
        x = _spread(torch.randn(count, inputs).to(dtype))
        out = torch.empty(count, outputs // 2 if gated else outputs, dtype=dtype)
        kernels: dict[str, Callable[[], object]] = {
            "native": partial(
                Products(packed[:length]).multiply,
                Epilogue.SILU_MUL if gated else Epilogue.STORE,
                x,
                out,
            ),
            "torch": partial(_linear, x, weights[:length]),
        }
        yield Work(f"{layer} {outputs} x {inputs}, {count} rows", length, flops, size, kernels)


def _linear(x: Tensor, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(x, weight)


def _spread(x: Tensor) -> Tensor:
    """The same rows an odd number of cache lines apart, as a forward pass keeps them."""
    line = 64 // x.dtype.itemsize
    stride = (-(-x.shape[1] // line) | 1) * line
    return torch.zeros(x.shape[0], stride, dtype=x.dtype)[:, : x.shape[1]].copy_(x)


def attention(
    case: Case, heads: Heads, dtype: torch.dtype, team: Team, library: ctypes.CDLL
) -> Work:
    """A step over some layers of a paged cache, with blocks in random order."""
    tables = block_tables(case)
    layer_bytes = 2 * case.distinct * heads.kv * heads.dim * dtype.itemsize
    layers = int(np.clip(CACHED_BYTES / layer_bytes, 1, MOST_LAYERS))
    if case.pairs > 1e6:
        layers = 1  # computes longer than it reads
    cache = torch.randn(layers, 2, tables.size, BLOCK_SIZE, heads.kv, heads.dim).to(dtype)
    q = torch.randn(case.rows * case.new, heads.query, heads.dim).to(dtype)
    batch = AttentionBatch(
        row_start=np.arange(case.rows + 1, dtype=np.int32) * case.new,
        context_len=np.full(case.rows, case.context, np.int32),
        block_tables=tables,
        block_size=BLOCK_SIZE,
        num_heads=heads.query,
        num_kv_heads=heads.kv,
        head_dim=heads.dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    decodes = np.full(case.rows, case.new == 1)
    shared = shared_runs(tables, batch.context_len, decodes, BLOCK_SIZE)
    runs = [(run.begin, run.end, run.low, run.high) for run in shared]
    keys, values, out = *laid_out(cache[:, 0], cache[:, 1]), torch.empty_like(q)
    plan = plan_attention(batch, None)

    def reference() -> Tensor:
        for layer in cache:
            found, _ = paged_attention(q, layer[0], layer[1], plan)
        return found

    kernels: dict[str, Callable[[], object]] = {
        "native": lambda: attend(library, team.handle, q, keys, values, batch, runs=runs, out=out),
        "reference": reference,
    }
    flops = 4.0 * heads.query * heads.dim * case.pairs
    return Work(case.name, layers, flops, layer_bytes, kernels)


def block_tables(case: Case) -> np.ndarray:
    """Blocks in random order, those of what is shared in common."""
    if case.shared % BLOCK_SIZE:
        raise ValueError(f"{case.shared} shared tokens in blocks of {BLOCK_SIZE}")
    common = case.shared // BLOCK_SIZE
    tables = random_tables(case.rows, case.context, BLOCK_SIZE)
    for first in range(0, case.rows, case.below):
        tables[first : first + case.below, :common] = tables[first, :common]
    return tables


def measure(work: Work, seconds: float, rate: float, bandwidth: float) -> list[Result]:
    """The best time of each kernel. They take turns, and let the others' threads fall asleep."""
    best = dict.fromkeys(work.kernels, float("inf"))
    end = time.perf_counter() + seconds
    while float("inf") in best.values() or time.perf_counter() < end:
        for kernel, run in work.kernels.items():
            time.sleep(SPIN_SECONDS)
            best[kernel] = min(best[kernel], best_seconds(run, seconds / 20) / work.count)
    floor = max(work.moved / bandwidth, work.flops / rate)
    return [
        Result(work.name, kernel, s, work.flops / s / 1e9, work.moved / s / 1e9, floor / s)
        for kernel, s in best.items()
    ]


def table_of(title: str, results: Sequence[Result]) -> Table:
    """A row per result; `native x`: how many times as fast ours is."""
    table = new_table(title, "", "kernel", "us", "GFLOP/s", "GB/s", "of floor", "native x")
    ours = {one.name: one.seconds for one in results if one.kernel == "native"}
    for one in results:
        numbers = f"{one.seconds * 1e6:,.1f}", f"{one.gflops:,.0f}", f"{one.gbs:.1f}"
        times = f"{one.seconds / ours[one.name]:.2f}"
        table.add_row(one.name, one.kernel, *numbers, f"{one.floor:.0%}", times)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--json", type=Path, help="write the results here as well")
    option("--threads", type=int, default=usable_cores(), help="all cores")
    option("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    option(
        "--parts", nargs="+", choices=("products", "attention"), default=("products", "attention")
    )
    option("--sizes", nargs="+", choices=list(SHAPES), default=["a", "b"])
    option("--rows", nargs="+", type=int, default=list(ROWS))
    option("--heads", nargs=3, type=int, default=[12, 4, 64], metavar=("Q", "KV", "D"))
    option("--seconds", type=float, default=1.0, help="for each product and step")
    args = parser.parse_args()
    dtype, heads = getattr(torch, args.dtype), Heads(*args.heads)
    console, report, library = console_of(110), Report("cpu_kernels"), load()
    with torch.inference_mode():
        rate = max(product_rates(dtype, args.threads, args.seconds, library).values())
        bandwidth = read_bandwidth(args.threads, args.seconds, READ_BYTES, library)
        team, limits = Team(library, args.threads), (args.seconds, rate, bandwidth)
        for model in args.sizes if "products" in args.parts else ():
            results = [
                one
                for layer, shape in layers_of(model).items()
                for work in products(layer, shape, args.rows, dtype, team)
                for one in measure(work, *limits)
            ]
            report.add(f"products_{model}", results)
            console.print(table_of(f"Products of model {model}", results))
        if "attention" in args.parts:
            steps = (attention(case, heads, dtype, team, library) for case in CASES)
            results = [one for work in steps for one in measure(work, *limits)]
            report.add("attention", results)
            console.print(table_of("Attention, a layer of a step", results))
    console.print(
        f"{args.threads} threads, {args.dtype}, {heads.query} / {heads.kv} heads of {heads.dim}; "
        f"a large product {rate / 1e9:,.0f} GFLOP/s, bandwidth {bandwidth / 1e9:.1f} GB/s; "
        f"{report.foreign_line()}"
    )
    report.found |= {"threads": args.threads, "dtype": args.dtype, "heads": asdict(heads)}
    report.add_options(args)
    report.found |= {"rate": rate, "read_bandwidth": bandwidth}
    report.write(args.json)


if __name__ == "__main__":
    main()
