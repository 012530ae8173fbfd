"""Attention on a CPU: `python -m benchmarks.cpu_attention [--json FILE]`.

Steps of attention over paged keys and values as serving brings them, in layers whose caches are
larger than the processor's. Columns:

    native     kernels/native: one call for all layers, its plan included
    reference  kernels/reference: keys gathered by slot, shared runs once, torch's fused kernel

The floor of a step is the larger of its bytes (keys and values, shared ones once) by the bandwidth
and its operations (4 x heads x head_dim for each pair of a token and a key it sees) by the rate of
a large product, both measured in the same run. Times are the best of many, taken in turns.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Report, console_of
from benchmarks.cpu_kernels import best_in_turns, kernel_table
from rootlace.kernels import AttentionBatch
from rootlace.kernels.native.attention import attend, laid_out
from rootlace.kernels.native.cores import usable_cores
from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.library import load
from rootlace.kernels.reference.attention import paged_attention
from rootlace.kernels.reference.attention_plan import plan_attention
from rootlace.kernels.reference.shared_prefix import shared_runs
from rootlace.runtime.doctor.ceilings import READ_BYTES, product_rates, read_bandwidth

CACHED_BYTES = 96 << 20
"""Layers are added until their keys and values take more than this."""
MOST_LAYERS = 12


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
class Heads:
    queries: int
    keys: int
    dim: int


@dataclass(frozen=True)
class Result:
    case: str
    kernel: str
    seconds: float
    """Of one layer."""
    gflops: float
    gbs: float
    floor: float
    """Share of the floor, 1 at best."""


class Step:
    """A case's tensors: L layers of a paged cache with blocks in random order."""

    def __init__(self, case: Case, heads: Heads, dtype: torch.dtype, block_size: int) -> None:
        random = np.random.default_rng(0)
        self.case, self.heads, self.dtype = case, heads, dtype
        if case.shared % block_size:
            raise ValueError(f"{case.shared} shared tokens in blocks of {block_size}")
        needed, common = -(-case.context // block_size), case.shared // block_size
        free = random.permutation(case.rows * needed)
        tables = free.reshape(case.rows, needed).astype(np.int32)
        for first in range(0, case.rows, case.below):
            tables[first : first + case.below, :common] = tables[first, :common]
        self.layer_bytes = 2 * case.distinct * heads.keys * heads.dim * dtype.itemsize
        self.layers = int(np.clip(CACHED_BYTES / self.layer_bytes, 1, MOST_LAYERS))
        if case.pairs > 1e6:
            self.layers = 1  # computes longer than it reads
        shape = (self.layers, 2, case.rows * needed, block_size, heads.keys, heads.dim)
        self.cache = torch.randn(shape, dtype=torch.float32).to(dtype)
        self.q = torch.randn(case.rows * case.new, heads.queries, heads.dim).to(dtype)
        self.batch = AttentionBatch(
            row_start=np.arange(case.rows + 1, dtype=np.int32) * case.new,
            context_len=np.full(case.rows, case.context, np.int32),
            block_tables=tables,
            block_size=block_size,
            num_heads=heads.queries,
            num_kv_heads=heads.keys,
            head_dim=heads.dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )

    def native(self, team: Team, library: ctypes.CDLL) -> Callable[[], Tensor]:
        batch, out = self.batch, torch.empty_like(self.q)
        runs = shared_runs(
            batch.block_tables,
            batch.context_len,
            np.diff(batch.row_start) == 1,
            batch.block_size,
        )
        keys, values = laid_out(self.cache[:, 0], self.cache[:, 1])
        numbers = [(run.begin, run.end, run.low, run.high) for run in runs]
        return lambda: attend(
            library,
            team.handle,
            self.q,
            keys,
            values,
            batch,
            runs=numbers,
            out=out,
        )

    def reference(self) -> Callable[[], Tensor]:
        plan = plan_attention(self.batch, None)

        def work() -> Tensor:
            for layer in self.cache:
                out, _ = paged_attention(self.q, layer[0], layer[1], plan)
            return out

        return work


def measure(
    step: Step, kernels: dict[str, Callable[[], Tensor]], seconds: float
) -> dict[str, float]:
    """Seconds of one layer of each. Raises ValueError where one computes something else."""
    results = {name: work().float() for name, work in kernels.items()}
    tolerance = 1e-4 if step.dtype == torch.float32 else 3e-2
    for name, found in results.items():
        error = float((found - results["native"]).norm() / found.norm())
        if not error < tolerance:
            raise ValueError(f"{step.case.name}: {name} and native differ by {error:.1e}")
    best = best_in_turns(dict(kernels), seconds)
    return {name: taken / step.layers for name, taken in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="all cores")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--heads", nargs=3, type=int, default=[12, 4, 64], metavar=("Q", "KV", "D"))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--cases", nargs="+", metavar="WORD", help="whose names hold one of these")
    parser.add_argument("--seconds", type=float, default=2.0, help="for a case")
    args = parser.parse_args()
    cases = [one for one in CASES if not args.cases or any(w in one.name for w in args.cases)]
    if not cases:
        parser.error("no case of that name")
    dtype, heads = getattr(torch, args.dtype), Heads(*args.heads)
    console, report = console_of(170), Report("cpu_attention")
    results: list[Result] = []
    with torch.inference_mode():
        library = load()
        rate = max(product_rates(dtype, args.threads, args.seconds, library).values())
        bandwidth = read_bandwidth(args.threads, args.seconds, READ_BYTES, None)
        team = Team(library, args.threads)
        for case in cases:
            step = Step(case, heads, dtype, args.block_size)
            kernels = {
                "native": step.native(team, library),
                "reference": step.reference(),
            }
            flops = 4.0 * heads.queries * heads.dim * case.pairs
            floor = max(step.layer_bytes / bandwidth, flops / rate)
            for kernel, seconds in measure(step, kernels, args.seconds).items():
                results.append(
                    Result(
                        case.name,
                        kernel,
                        seconds,
                        flops / seconds / 1e9,
                        step.layer_bytes / seconds / 1e9,
                        floor / seconds,
                    )
                )
    rows: dict[str, dict[str, Result]] = {}
    for result in results:
        rows.setdefault(result.case, {})[result.kernel] = result
    console.print(kernel_table("Attention, a layer of a step", "step", rows))
    console.print(
        f"{args.threads} threads, {args.dtype}, {heads.queries} / {heads.keys} heads of "
        f"{heads.dim}; a large product {rate / 1e9:,.0f} GFLOP/s, bandwidth {bandwidth / 1e9:.1f} "
        f"GB/s; {report.foreign_line()}"
    )
    report.found |= {"threads": args.threads, "dtype": args.dtype, "heads": asdict(heads)}
    report.found |= {"block_size": args.block_size, "rate": rate, "read_bandwidth": bandwidth}
    report.add("results", results)
    report.write(args.json)


if __name__ == "__main__":
    main()
