"""Attention on a CPU: `python -m benchmarks.cpu_attention [--json FILE]`.

Steps of attention over paged keys and values as serving brings them, in layers whose caches are
larger than the processor's. Columns:

    native     kernels/native: one call for all layers, its plan included
    reference  kernels/reference: keys gathered by slot, shared runs once, torch's fused kernel
    views      torch's fused kernel on keys that lie in one piece per row (as no paged cache has
               them), shared keys once for all rows below, merged by log-sum-exp
    flex       the same keys through compiled torch.nn.attention.flex_attention (--flex), every row
               with a copy of its own

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
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.common import ForeignLoad, environment, write_json
from benchmarks.cpu_kernels import Bench, Setting, Shape, best_in_turns
from rootlace.kernels import AttentionBatch
from rootlace.kernels.native.attention import attend, laid_out
from rootlace.kernels.native.cores import usable_cores
from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.library import load
from rootlace.kernels.reference.attention import paged_attention
from rootlace.kernels.reference.attention_plan import plan_attention
from rootlace.kernels.reference.shared_prefix import shared_runs

CACHED_BYTES = 96 << 20
"""Layers are added until their keys and values take more than this."""
MOST_LAYERS = 12
GEMM = Shape("down", 768, 3072)
GEMM_ROWS = 2048


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
    """A case's tensors: L layers of a paged cache with blocks in random order, and the same keys
    and values in one piece per row and per shared node."""

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

    def _gathered(self, rows: np.ndarray, low: int, high: int) -> Tensor:
        """[L, 2, len(rows), Nk, high - low, D], a view of what lies row by row, token by token."""
        size = self.batch.block_size
        positions = np.arange(low, high)
        slots = self.batch.block_tables[rows][:, positions // size] * size + positions % size
        flat = self.cache.flatten(2, 3)
        index = torch.from_numpy(slots.astype(np.int64))
        return torch.stack([flat[:, :, one] for one in index], 2).transpose(3, 4)

    def views(self) -> Callable[[], Tensor]:
        case, heads = self.case, self.heads
        every = np.arange(case.rows)
        own = self._gathered(every, case.shared, case.context)
        common = self._gathered(every[:: case.below], 0, case.shared) if case.shared else None
        q = self.q.view(case.rows, case.new, heads.queries, heads.dim)
        # [nodes, Nq, below x new, D]
        together = q.unflatten(0, (-1, case.below)).flatten(1, 2).transpose(1, 2).contiguous()
        alone = q.transpose(1, 2)
        mask = None
        if case.new > 1:
            last = torch.arange(case.context - case.new, case.context)[:, None]
            hidden = torch.arange(case.shared, case.context) > last
            mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
            mask = mask[None, None]
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

        def work() -> Tensor:
            for layer in range(self.layers):
                out, lse = fused(alone, own[layer, 0], own[layer, 1], attn_mask=mask)
                if common is None:
                    continue
                part, part_lse = fused(together, common[layer, 0], common[layer, 1])
                part = part.unflatten(2, (case.below, -1)).transpose(1, 2).flatten(0, 1)
                part_lse = part_lse.unflatten(2, (case.below, -1)).transpose(1, 2).flatten(0, 1)
                weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)
                out = out.float().lerp(part.float(), weight).to(self.dtype)
            return out.transpose(1, 2).flatten(0, 1)

        return work

    def flex(self) -> Callable[[], Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        case, heads = self.case, self.heads
        whole = self._gathered(np.arange(case.rows), 0, case.context)
        q = self.q.view(case.rows, case.new, heads.queries, heads.dim).transpose(1, 2)
        before = case.context - case.new
        mask = None
        if case.new > 1:
            mask = create_block_mask(
                lambda b, h, i, j: j <= i + before, None, None, case.new, case.context, "cpu"
            )
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False)

        def work() -> Tensor:
            for layer in whole:
                out = compiled(q, layer[0], layer[1], block_mask=mask, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)

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


def ceilings(dtype: torch.dtype, threads: int, seconds: float) -> tuple[float, float]:
    """(operations per second of a large product, bytes read per second)."""
    bench = Bench(Setting(dtype, threads, seconds, ()))
    rates = [one.gflops for one in bench.shape("", GEMM, (GEMM_ROWS,))]
    return max(rates) * 1e9, bench.read_bandwidth


def show(results: list[Result], console: Console) -> None:
    kernels = list(dict.fromkeys(one.kernel for one in results))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("step")
    for kernel in kernels:
        for what in ("us", "GFLOP/s", "GB/s", "of floor"):
            table.add_column(f"{kernel}\n{what}", justify="right")
    table.add_column("best other\n/ native", justify="right")
    for case in dict.fromkeys(one.case for one in results):
        by = {one.kernel: one for one in results if one.case == case}
        cells = [case]
        for kernel in kernels:
            found = by.get(kernel)
            cells += ["", "", "", ""] if found is None else _cells(found)
        others = [one.seconds for kernel, one in by.items() if kernel != "native"]
        cells.append(f"{min(others) / by['native'].seconds:.2f}")
        table.add_row(*cells)
    console.print(table)


def _cells(one: Result) -> list[str]:
    return [
        f"{one.seconds * 1e6:,.0f}",
        f"{one.gflops:,.0f}",
        f"{one.gbs:.1f}",
        f"{100 * one.floor:.0f} %",
    ]


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
    parser.add_argument("--flex", action="store_true", help="flex attention too: compiles long")
    args = parser.parse_args()
    cases = [one for one in CASES if not args.cases or any(w in one.name for w in args.cases)]
    if not cases:
        parser.error("no case of that name")
    dtype, heads = getattr(torch, args.dtype), Heads(*args.heads)
    console = Console()
    if not console.is_terminal:
        console.width = 200 if args.flex else 170
    foreign = ForeignLoad()
    results: list[Result] = []
    with torch.inference_mode():
        rate, bandwidth = ceilings(dtype, args.threads, args.seconds)
        library = load()
        team = Team(library, args.threads)
        for case in cases:
            step = Step(case, heads, dtype, args.block_size)
            kernels = {
                "native": step.native(team, library),
                "reference": step.reference(),
                "views": step.views(),
            }
            if args.flex:
                kernels["flex"] = step.flex()
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
    show(results, console)
    other = foreign.cores()
    console.print(
        f"{args.threads} threads, {args.dtype}, {heads.queries} / {heads.keys} heads of "
        f"{heads.dim}; a large product {rate / 1e9:,.0f} GFLOP/s, bandwidth {bandwidth / 1e9:.1f} "
        f"GB/s; other programs kept {other:.2f} cores busy"
    )
    if args.json:
        report = {
            "benchmark": "cpu_attention",
            **environment(),
            "threads": args.threads,
            "dtype": args.dtype,
            "heads": asdict(heads),
            "block_size": args.block_size,
            "foreign_cores": other,
            "rate": rate,
            "read_bandwidth": bandwidth,
            "results": [asdict(one) for one in results],
        }
        write_json(args.json, report)


if __name__ == "__main__":
    main()
