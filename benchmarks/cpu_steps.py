"""Where the time of a step on a CPU goes: `python -m benchmarks.cpu_steps [--json FILE]`.

Decode steps of one row and of many, and prefills of one prompt, greedy, on the native kernels; the
same beside them of plain transformers, with the cache that its `generate` uses, or with
`--beside reference` of our own decoder in torch. The parts are those of the fastest step of each
case: noise only slows.

The percentages beside linear layers, attention and logits are the shares of the machine's measured
ceilings that they reach: the least time that the part could take, over the time that it took. The
least time is that of reading its bytes, or of its operations at the rate of a large product,
whichever is longer. Above 100 %, a cache held what was read, as it does the smallest model.

With `--gguf FILE` a real file's steps, in the default type or `--dtype`, without anything beside;
the bytes are those of its codes and scales.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.ceilings import measure_apart
from benchmarks.common import Report, console_of, new_parser, new_table
from benchmarks.random_models import MODELS, SIZES, make_model
from benchmarks.step_plans import random_tables, random_tokens, step_plan
from rootlace.kernels.arrays import as_tensor, numpy_dtype
from rootlace.kernels.native.machine import usable_cores
from rootlace.kernels.weights import tensors
from rootlace.runtime.config import CacheConfig, ExecutorConfig, KVDtype
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.doctor.ceilings import Elements, Row, best_seconds, step_work
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.automaton_table import HostMasks
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import LoadWeights, load_weights
from rootlace.runtime.model.decoder.native_decoder import PARTS, NativeDecoder
from rootlace.runtime.model.executor.cpu_setup import LoadedModel, on_cpu
from rootlace.runtime.model.executor.runner import chosen_dtype
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.sampler import Sampler

BLOCK_SIZE = 16
SHOWN = ("linear", "attention", "elementwise", "plan", "host", "logits", "sampling")


@dataclass(frozen=True)
class Case:
    """`rows` sequences of `context` tokens, the last `new` of which are computed and the first
    `shared` of which all have in common (whole blocks)."""

    name: str
    rows: int
    new: int
    context: int
    shared: int = 0

    def tables(self) -> np.ndarray:
        """Return the block tables of the rows."""
        found = random_tables(self.rows, self.context, BLOCK_SIZE)
        found[:, : self.shared // BLOCK_SIZE] = found[0, : self.shared // BLOCK_SIZE]
        return found


@dataclass(frozen=True)
class Result:
    model: str
    case: str
    milliseconds: float
    parts: dict[str, float]
    """Milliseconds by `SHOWN`; "host" is what Python does in the forward pass."""
    least: dict[str, float]
    """Milliseconds that a part takes at least; see `least_seconds`."""
    beside: float | None = None
    """Milliseconds of the same step on what is measured beside."""


Limits = tuple[float, float]
"""Flop/s of a large product, bytes/s of reading."""


def least_seconds(
    spec: ModelSpec,
    case: Case,
    size: Elements,
    limits: Limits,
    read: tuple[int, int] | None = None,
) -> dict[str, float]:
    """Return the least time of the products of the layers, of attention and of the output head.
    Products read their weights; attention reads each key and value once, however many rows share
    it. `read`: bytes of the layers' weights and of the head's, if these are codes."""
    rate, bandwidth = limits
    whole = step_work(spec, [Row(case.new, case.context)] * case.rows, size)
    two, one = (step_work(spec, [Row(1, context)], size).read for context in (2, 1))
    token = two - one
    weights = whole.read - token * case.rows * case.context
    head = spec.vocab_size * spec.hidden_size
    layers, last = read or (weights - head * size.weight, head * size.weight)
    keys = case.rows * (case.context - case.shared) + case.shared
    work = {
        "linear": (whole.products - 2 * head * case.rows, layers),
        "attention": (whole.attention, token * keys),
        "logits": (2 * head * case.rows, last),
    }
    return {part: max(flops / rate, read / bandwidth) for part, (flops, read) in work.items()}


def loaded(
    folder: Path,
    cache: CacheConfig,
    executor: ExecutorConfig,
    weights_of: LoadWeights = load_weights,
    dtype: torch.dtype | None = None,
) -> tuple[LoadedModel, ModelSpec]:
    config = ModelConfig.read(folder)
    kind = chosen_dtype(executor, config) if dtype is None else numpy_dtype(dtype)
    model = on_cpu(ModelSetup(config, executor, cache, kind, "cpu", weights_of))
    # Products of zeros would be faster.
    pool = as_tensor(model.pool)
    if pool.dtype == torch.uint8:
        pool.fill_(60)  # codes, scales and offsets that are numbers
    else:
        pool.normal_()
    return model, config.spec


def product_bytes(file: Path) -> tuple[int, int]:
    """Return the bytes of a file's weights that a step's layers multiply by, and of its head's."""
    weights = load_weights(ModelConfig.read(file), torch.bfloat16, torch.device("cpu"), None)
    products = (one for layer in weights.layers for one in layer.products())
    layers = sum(tensor.nbytes for one in products for tensor in tensors(one))
    head = tensors(weights.head) if weights.head is not None else [weights.embedding]
    return layers, sum(tensor.nbytes for tensor in head)


class Subject:
    """A model on the native kernels, divided into its parts."""

    def __init__(
        self,
        folder: Path,
        blocks: int,
        threads: int,
        weights_of: LoadWeights = load_weights,
        dtype: torch.dtype | None = None,
        kv_dtype: KVDtype = "auto",
    ) -> None:
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=blocks)
        executor = ExecutorConfig(
            model=str(folder), threads=threads, kernels="native", kv_dtype=kv_dtype
        )
        model, self.spec = loaded(folder, cache, executor, weights_of, dtype)
        assert isinstance(model.forward, NativeDecoder)
        weights = model.forward.dtype
        stored = kv_pool.storage_dtype(kv_dtype, weights)
        number = kv_pool.bytes_per_number(self.spec.attention, stored)
        self.size = Elements(weights.itemsize, number)
        self._forward = model.forward
        self._forward.nanos = self._nanos = np.zeros(len(PARTS), np.int64)
        vocab = self.spec.vocab_size
        self._sampler = Sampler(vocab, model.sampling, HostMasks(vocab))

    def run(self, plan: StepPlan) -> tuple[float, dict[str, float]]:
        """Return the seconds of a step and of its parts."""
        self._nanos[:] = 0
        start = time.perf_counter()
        hidden = self._forward.run(plan)
        ran = time.perf_counter()
        parts = dict(zip(PARTS, (self._nanos / 1e9).tolist(), strict=True))
        parts["host"] = ran - start - sum(parts.values())
        logits = self._forward.logits(hidden)
        computed = time.perf_counter()
        self._sampler.sample(logits, plan.samples)
        end = time.perf_counter()
        return end - start, parts | {"logits": computed - ran, "sampling": end - computed}


class Transformers:
    """The same model in transformers."""

    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def step(self, case: Case, known: np.ndarray) -> Callable[[], object]:
        """Return a function that runs a step of `case`."""
        ids = torch.from_numpy(known).long().tile(case.rows, 1)
        old, cache = case.context - case.new, DynamicCache(config=self._model.config)
        if old:
            self._model(ids[:1, :old], past_key_values=cache, logits_to_keep=1)
            cache.batch_repeat_interleave(case.rows)

        def run() -> None:
            grown = cache if old else DynamicCache(config=self._model.config)
            found = self._model(ids[:, old:], past_key_values=grown, logits_to_keep=1)
            found.logits.argmax(-1)
            grown.crop(-case.new)

        return run


class Reference:
    """The same model on the reference kernels."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder, self._threads = folder, threads

    def step(self, case: Case, known: np.ndarray) -> Callable[[], object]:
        """Return a function that runs a step of `case`."""
        tables = case.tables()
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=tables.size)
        executor = ExecutorConfig(
            model=str(self._folder), threads=self._threads, kernels="reference"
        )
        model, _ = loaded(self._folder, cache, executor)
        plan = step_plan(tables, BLOCK_SIZE, known, case.new)
        return lambda: model.forward.logits(model.forward.run(plan)).argmax(-1)


BESIDE: dict[str, type[Transformers] | type[Reference]] = {
    "transformers": Transformers,
    "reference": Reference,
}


@torch.inference_mode()
def measure(
    name: str,
    folder: Path,
    cases: list[Case],
    threads: int,
    seconds: float,
    limits: Limits,
    beside: str | None = None,
    kv_dtype: KVDtype = "auto",
    dtype: torch.dtype | None = None,
) -> list[Result]:
    """Return the fastest step of each case, in `seconds` of measuring, and of one of `BESIDE`."""
    tables = [case.tables() for case in cases]
    blocks = max(table.size for table in tables)
    subject = Subject(folder, blocks, threads, dtype=dtype, kv_dtype=kv_dtype)
    read = product_bytes(folder) if folder.is_file() else None
    peer = BESIDE[beside](folder, threads) if beside else None
    results = []
    for case, table in zip(cases, tables, strict=True):
        known = random_tokens(case.context, subject.spec.vocab_size)
        plan = step_plan(table, BLOCK_SIZE, known, case.new)
        end = time.perf_counter() + seconds
        subject.run(plan)
        found = [subject.run(plan)]
        while time.perf_counter() < end:
            found.append(subject.run(plan))
        best, parts = min(found, key=lambda one: one[0])
        shown = {part: 1e3 * parts[part] for part in SHOWN}
        least = least_seconds(subject.spec, case, subject.size, limits, read)
        least = {part: 1e3 * spent for part, spent in least.items()}
        theirs = 1e3 * best_seconds(peer.step(case, known), seconds) if peer else None
        results.append(Result(name, case.name, 1e3 * best, shown, least, theirs))
    return results


def show(results: list[Result], console: Console, beside: str = "transformers") -> None:
    columns = ("model", "case", "step", *SHOWN, beside, "x")
    table = new_table("Milliseconds of a step", *columns)
    for result in results:
        cells = [f"{result.milliseconds:,.2f}"]
        for part, spent in result.parts.items():
            share = f" {result.least[part] / spent:4.0%}" if part in result.least else ""
            cells.append(f"{spent:,.2f}{share}")
        if result.beside:
            cells += [f"{result.beside:,.2f}", f"{result.beside / result.milliseconds:.2f}"]
        table.add_row(result.model, result.case, *cells)
    console.print(table)


def main() -> None:
    parser = new_parser("cpu_steps", __doc__)
    option = parser.add_argument
    option("--models", type=Path, metavar="DIR", default=MODELS, help="holds them, or gets them")
    option("--sizes", nargs="+", choices=SIZES, default=["a", "b"])
    option("--gguf", type=Path, nargs="+", default=[], metavar="FILE", help="in place of these")
    option("--dtype", choices=["float32", "bfloat16"], help="of --gguf; by default the default")
    option("--rows", type=int, nargs="+", default=[1, 8, 32], help="of the decode steps")
    option("--context", type=int, default=300, help="tokens of each of these rows")
    option("--shared", type=int, default=0, help="how many of them all rows have in common")
    option("--prefill", type=int, nargs="+", default=[1024, 4096], help="tokens of the prompts")
    option("--behind", type=int, default=0, help="tokens before each prompt")
    option("--kv-dtype", nargs="+", choices=get_args(KVDtype), default=["auto"], metavar="TYPE")
    option("--alone", action="store_true", help="without another beside")
    option("--beside", choices=BESIDE, default="transformers", help="what is measured, too")
    option("--threads", type=int, default=usable_cores(), help="threads that compute")
    option("--seconds", type=float, default=3.0, help="per case, best of many")
    args = parser.parse_args()
    shared = args.shared // BLOCK_SIZE * BLOCK_SIZE
    own = f"({shared} + {args.context - shared})" if shared else args.context
    behind = f" over {args.behind}" if args.behind else ""
    cases = [
        *(Case(f"decode {n} x {own}", n, 1, args.context, shared) for n in args.rows),
        *(Case(f"prefill {n}{behind}", 1, n, args.behind + n) for n in args.prefill),
    ]
    console, report = console_of(140), Report("cpu_steps", args)
    ceilings = measure_apart(args.threads, args.dtype or "bfloat16", args.seconds)
    rate, bandwidth = ceilings["gemm_rate"], ceilings["read_bandwidth"]
    results: list[Result] = []
    limits, beside = (rate, bandwidth), None if args.alone else args.beside
    dtype = args.dtype and getattr(torch, args.dtype)
    for file, kv_dtype in itertools.product(args.gguf, args.kv_dtype):
        name = file.stem if kv_dtype == "auto" else f"{file.stem}, {kv_dtype}"
        results += measure(
            name, file, cases, args.threads, args.seconds, limits, None, kv_dtype, dtype
        )
    sizes = [] if args.gguf else args.sizes
    for size, kv_dtype in itertools.product(sizes, args.kv_dtype):
        folder = make_model(size, args.models / size)
        name = size if kv_dtype == "auto" else f"{size}, {kv_dtype}"
        results += measure(
            name, folder, cases, args.threads, args.seconds, limits, beside, kv_dtype
        )
    show(results, console, args.beside)
    report.add("ceilings", ceilings)
    report.add("results", results)
    console.print(f"large product {rate / 1e9:,.0f} GFLOP/s, reading {bandwidth / 1e9:.1f} GB/s")
    console.print(report.foreign_line())
    report.write()


if __name__ == "__main__":
    main()
