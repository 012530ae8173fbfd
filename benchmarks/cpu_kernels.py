"""Linear layers on a CPU: `python -m benchmarks.cpu_kernels [--json FILE]`.

Our own kernels beside torch's for the shapes of two models and larger ones, from one row to
thousands. Weights rotate, as in a forward pass, so that few rows find none in a cache. Columns:

    native     kernels/native: packed panels, one call for a pass over the weights
    torch      torch.nn.functional.linear
    packed     oneDNN with weights reordered beforehand (torch.ops.mkldnn._linear_pointwise)

Times are the best of many passes, taken in turns. The floor of a product is the larger of its bytes
by the best bandwidth and its operations by the best rate that anything reached in this run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.common import Report, console_of, new_table
from rootlace.kernels.native.cores import usable_cores
from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.library import load
from rootlace.kernels.native.linear import Arena, Epilogue, PackedLinear, Products
from rootlace.runtime.doctor.ceilings import READ_BYTES, read_bandwidth

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
ROTATED = 160 << 20
"""Bytes of weights that a pass goes over, more than caches hold; fewer at many rows."""
PASS_SECONDS = 0.004
"""A pass is about so long: the best of many short ones is found even on a machine with others."""
SPIN_SECONDS = 0.01
"""Threads of torch's pool wait so long for more work before they leave the cores to others."""


@dataclass(frozen=True)
class Shape:
    name: str
    outputs: int
    inputs: int


SHAPES = {
    "150m": (
        Shape("qkv", 1280, 768),
        Shape("output", 768, 768),
        Shape("gate_up", 6144, 768),
        Shape("down", 768, 3072),
        Shape("head", 32000, 768),
    ),
    "15m": (
        Shape("qkv", 512, 256),
        Shape("output", 256, 256),
        Shape("gate_up", 1536, 256),
        Shape("down", 256, 768),
        Shape("head", 32000, 256),
    ),
    "qwen3-0.6b": (
        Shape("qkv", 4096, 1024),
        Shape("output", 1024, 2048),
        Shape("gate_up", 6144, 1024),
        Shape("down", 1024, 3072),
        Shape("head", 151936, 1024),
    ),
    "large": (
        Shape("gate_up", 16384, 2048),
        Shape("down", 2048, 8192),
        Shape("head", 128256, 2048),
    ),
}


@dataclass(frozen=True)
class Result:
    model: str
    shape: str
    outputs: int
    inputs: int
    rows: int
    kernel: str
    seconds: float
    """Of one product."""
    gflops: float
    weight_gbs: float
    floor: float | None = None
    """Share of the floor, 1 at best."""

    @property
    def gbs(self) -> float:
        return self.weight_gbs


@dataclass(frozen=True)
class Setting:
    dtype: torch.dtype
    threads: int
    seconds: float
    """For all kernels of one shape and number of rows."""
    alone: bool = False
    """Only our own."""


class Bench:
    """Measures shape by shape; the best rate and bandwidth seen make the floors."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        torch.set_num_threads(setting.threads)
        self._library = load()
        self._team = Team(self._library, setting.threads)
        self.read_bandwidth = read_bandwidth(setting.threads, setting.seconds, READ_BYTES, None)

    def shape(self, model: str, shape: Shape, rows: Sequence[int]) -> Iterator[Result]:
        size = shape.outputs * shape.inputs * self._setting.dtype.itemsize
        weights = [
            (torch.randn(shape.outputs, shape.inputs) * 0.05).to(self._setting.dtype)
            for _ in range(max(1, min(ROTATED // size, 400)))
        ]
        gated = shape.name == "gate_up"
        arena = Arena()
        packed = [
            PackedLinear(self._library, self._team, one, gated=gated, arena=arena)
            for one in weights
        ]
        for count in rows:
            yield from self._rows(model, shape, count, weights, packed)

    def _rows(
        self,
        model: str,
        shape: Shape,
        rows: int,
        weights: list[Tensor],
        packed: list[PackedLinear],
    ) -> Iterator[Result]:
        flops = 2.0 * rows * shape.outputs * shape.inputs
        size = shape.outputs * shape.inputs * self._setting.dtype.itemsize
        guess = max(size / self.read_bandwidth, flops / 1e12)
        # A pass goes over some of the weights, the next one over those behind them.
        length = max(1, min(len(weights), int(PASS_SECONDS / guess)))
        x = torch.randn(rows, shape.inputs).to(self._setting.dtype)
        kernels: dict[str, Callable[[], object]] = {"native": self._native(x, packed, length)}
        if not self._setting.alone:
            kernels["torch"] = _torch(x, weights, length)
            reordered = _reordered(x, weights, length)
            if reordered is not None:
                kernels["packed"] = reordered
        best = best_in_turns(kernels, self._setting.seconds)
        for kernel, seconds in best.items():
            seconds /= length
            yield Result(
                model,
                shape.name,
                shape.outputs,
                shape.inputs,
                rows,
                kernel,
                seconds,
                flops / seconds / 1e9,
                size / seconds / 1e9,
            )

    def _native(self, x: Tensor, packed: list[PackedLinear], length: int) -> Callable[[], object]:
        epilogue = Epilogue.SILU_MUL if packed[0].gated else Epilogue.STORE
        columns = packed[0].outputs // (2 if packed[0].gated else 1)
        out = torch.empty(x.shape[0], columns, dtype=x.dtype)
        x = _spread(x)
        parts = [Products(part) for part in _parts(packed, length)]
        turn = _turns(parts)
        return lambda: next(turn).multiply(epilogue, x, out)


def _spread(x: Tensor) -> Tensor:
    """The same rows an odd number of cache lines apart, as a forward pass keeps them."""
    line = 64 // x.dtype.itemsize
    stride = (-(-x.shape[1] // line) | 1) * line
    return torch.zeros(x.shape[0], stride, dtype=x.dtype)[:, : x.shape[1]].copy_(x)


def _parts(all_of_them: list[Any], length: int) -> list[list[Any]]:
    count = len(all_of_them) // length
    return [all_of_them[i * length : (i + 1) * length] for i in range(count)]


def _turns(parts: list[Any]) -> Iterator[Any]:
    while True:
        yield from parts


def _torch(x: Tensor, weights: list[Tensor], length: int) -> Callable[[], object]:
    turn = _turns(_parts(weights, length))

    def work() -> None:
        for weight in next(turn):
            torch.nn.functional.linear(x, weight)

    return work


def _reordered(x: Tensor, weights: list[Tensor], length: int) -> Callable[[], object] | None:
    """None where this build of torch has no oneDNN or does not reorder."""
    operators = torch.ops.mkldnn
    try:
        again = [operators._reorder_linear_weight(weight, x.shape[0]) for weight in weights]
        operators._linear_pointwise(x, again[0], None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    turn = _turns(_parts(again, length))

    def work() -> None:
        for weight in next(turn):
            operators._linear_pointwise(x, weight, None, "none", [], "")

    return work


def best_in_turns(kernels: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Seconds of the best call of each."""
    best = dict.fromkeys(kernels, float("inf"))
    for work in kernels.values():
        work()
    rounds, end = 0, time.perf_counter() + seconds
    while rounds < 3 or time.perf_counter() < end:
        for name, work in kernels.items():
            with _rest():
                started = time.perf_counter()
                while time.perf_counter() - started < seconds / 20:
                    before = time.perf_counter()
                    work()
                    best[name] = min(best[name], time.perf_counter() - before)
        rounds += 1
    return best


@contextmanager
def _rest() -> Iterator[None]:
    """Let the threads of whoever ran before fall asleep."""
    time.sleep(SPIN_SECONDS)
    yield


def with_floors(results: list[Result], bandwidth: float) -> tuple[list[Result], dict[str, float]]:
    """Each beside the largest rate and bandwidth that any of them, or reading alone, reached."""
    rate = max(result.gflops for result in results) * 1e9
    bandwidth = max(bandwidth, *(result.weight_gbs * 1e9 for result in results))
    found = []
    for one in results:
        flops = 2.0 * one.rows * one.outputs * one.inputs
        floor = max(one.weight_gbs * 1e9 * one.seconds / bandwidth, flops / rate)
        found.append(Result(**(asdict(one) | {"floor": floor / one.seconds})))
    return found, {"rate": rate, "read_bandwidth": bandwidth}


def show(results: list[Result], console: Console) -> None:
    shapes = dict.fromkeys((r.model, r.shape, r.outputs, r.inputs) for r in results)
    for model, shape, outputs, inputs in shapes:
        rows: dict[str, dict[str, Any]] = {}
        for result in results:
            if (result.model, result.shape) == (model, shape):
                rows.setdefault(str(result.rows), {})[result.kernel] = result
        console.print(kernel_table(f"{model} {shape}: {outputs} x {inputs}", "rows", rows))


def kernel_table(title: str, first: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row per name, of the results by kernel: time, rates, share of the floor."""
    kernels = list(dict.fromkeys(kernel for by in rows.values() for kernel in by))
    units = ("us", "GFLOP/s", "GB/s", "of floor")
    columns = [f"{kernel}\n{unit}" for kernel in kernels for unit in units]
    table = new_table(title, first, *columns, "best other\n/ native")
    for name, by in rows.items():
        cells = [name]
        for kernel in kernels:
            one = by.get(kernel)
            cells += ["", "", "", ""] if one is None else _cells(one)
        others = [one.seconds for kernel, one in by.items() if kernel != "native"]
        cells.append(f"{min(others) / by['native'].seconds:.2f}" if others else "")
        table.add_row(*cells)
    return table


def _cells(one: Any) -> list[str]:
    return [
        f"{one.seconds * 1e6:,.1f}",
        f"{one.gflops:,.0f}",
        f"{one.gbs:.1f}",
        f"{100 * (one.floor or 0):.0f} %",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="all cores")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--models", nargs="+", default=["150m", "15m"], choices=list(SHAPES))
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="of these names (all)")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=0.6, help="for a shape and number of rows")
    parser.add_argument("--alone", action="store_true", help="only our own kernels")
    args = parser.parse_args()
    setting = Setting(getattr(torch, args.dtype), args.threads, args.seconds, args.alone)
    console, report = console_of(170), Report("cpu_kernels")
    results: list[Result] = []
    with torch.inference_mode():
        bench = Bench(setting)
        for model in args.models:
            for shape in SHAPES[model]:
                if not args.shapes or shape.name in args.shapes:
                    results += bench.shape(model, shape, args.rows)
    if not results:
        parser.error("no shape of that name")
    results, ceilings = with_floors(results, bench.read_bandwidth)
    show(results, console)
    console.print(
        f"{args.threads} threads, {args.dtype}; best rate {ceilings['rate'] / 1e9:,.0f} GFLOP/s, "
        f"bandwidth {ceilings['read_bandwidth'] / 1e9:.1f} GB/s; {report.foreign_line()}"
    )
    report.found |= {"threads": args.threads, "dtype": args.dtype, **ceilings}
    report.add("results", results)
    report.write(args.json)


if __name__ == "__main__":
    main()
