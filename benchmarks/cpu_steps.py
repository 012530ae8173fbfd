"""Where the time of a step on a CPU goes: `python -m benchmarks.cpu_steps [--json FILE]`.

A decode step of many rows and the prefill of one long prompt, greedy, on the native kernels and on
the reference in torch. The parts are those of the fastest step of each case: noise only slows.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from benchmarks.common import Report, console_of, new_table
from benchmarks.random_models import SHAPES, make_model
from rootlace.kernels.native.cores import usable_cores
from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import SampleRow, StepPlan
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import checkpoint_dtype, load_weights
from rootlace.runtime.model.decoder.forward import Forward, ReferenceForward
from rootlace.runtime.model.decoder.native_decoder import PARTS, NativeDecoder
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.decoder.step_input import StepInputBuilder
from rootlace.runtime.model.decoder.torch_decoder import Decoder
from rootlace.runtime.model.executor.cpu_setup import on_cpu
from rootlace.runtime.model.kv import pool as kv_pool
from rootlace.runtime.model.sampling.host_masks import HostMasks
from rootlace.runtime.model.sampling.sampler import Sampler
from rootlace.wire.protocol import SamplingParams

Kernels = Literal["native", "reference"]

BLOCK_SIZE = 16
CPU = torch.device("cpu")
SHOWN = ("linear", "attention", "elementwise", "plan", "host", "logits", "sampling")
GREEDY = SamplingParams(temperature=0.0, seed=0)


@dataclass(frozen=True)
class Case:
    """`rows` sequences of `context` tokens, the last `new` of which are computed."""

    name: str
    rows: int
    new: int
    context: int

    def plan(self, blocks: np.ndarray, vocab: int) -> StepPlan:
        """The step; sequence r has the blocks of row r of `blocks`."""
        rng = np.random.default_rng(0)
        positions = np.tile(np.arange(self.context - self.new, self.context), (self.rows, 1))
        blocks = blocks[: self.rows, : -(-self.context // BLOCK_SIZE)]
        slots = np.take_along_axis(blocks, positions // BLOCK_SIZE, 1) * BLOCK_SIZE
        token_ids = rng.integers(3, vocab, self.rows * self.new).astype(np.int32)
        known = np.zeros(self.context, np.int32)
        return StepPlan(
            step=0,
            token_ids=token_ids,
            positions=positions.ravel().astype(np.int32),
            slots=(slots + positions % BLOCK_SIZE).ravel().astype(np.int64),
            row_start=np.arange(0, self.rows * self.new + 1, self.new, dtype=np.int32),
            context_len=np.full(self.rows, self.context, np.int32),
            block_tables=np.ascontiguousarray(blocks, np.int32),
            copies=np.empty((0, 3), np.int32),
            duplicate_tokens=np.empty(0, np.int32),
            duplicate_slots=np.empty(0, np.int64),
            samples=[SampleRow(row, GREEDY, known, self.context) for row in range(self.rows)],
        )


@dataclass(frozen=True)
class Result:
    model: str
    kernels: Kernels
    case: str
    milliseconds: float
    parts: dict[str, float]
    """Milliseconds by `SHOWN`; "host" is what Python does in the forward pass."""


@dataclass
class Parts:
    """Seconds by part, of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.measuring(name):
                return function(*args, **kwargs)

        return measured

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class Subject:
    """A model on one set of kernels, taken apart."""

    def __init__(self, folder: Path, kernels: Kernels, blocks: int, threads: int | None) -> None:
        self.config = ModelConfig.read(folder)
        self.kernels: Kernels = kernels
        self.parts = Parts()
        self._nanos = np.zeros(len(PARTS), np.int64)
        dtype = checkpoint_dtype(self.config)
        rotary = RotaryEmbedding(self.config, None, CPU, dtype)
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=blocks)
        self._forward: Forward
        if kernels == "native":
            executor = ExecutorConfig(model=str(folder), threads=threads, kernels="native")
            model = on_cpu(self.config, dtype, rotary, cache, executor, load_weights, None)
            assert isinstance(model.forward, NativeDecoder)
            model.forward.nanos = self._nanos
            self._forward, pool = model.forward, model.pool
            picks = model.kernels
        else:
            # Where native kernels ran before, torch was left with one.
            torch.set_num_threads(threads or usable_cores())
            pool = kv_pool.allocate(self.config, blocks, BLOCK_SIZE, CPU, dtype)
            self._forward = self._reference(rotary, pool)
            picks = REFERENCE
        vocab_size = self.config.spec.vocab_size
        self._sampler = Sampler(vocab_size, picks, HostMasks(vocab_size))
        pool.zero_()

    def run(self, plan: StepPlan) -> float:
        """Seconds of a step; `parts` says which."""
        self.parts.seconds.clear()
        self._nanos[:] = 0
        start = time.perf_counter()
        hidden = self._forward.run(plan)
        ran = time.perf_counter() - start
        for name, nanos in zip(PARTS, self._nanos.tolist(), strict=True):
            if self.kernels == "native":
                self.parts.add(name, nanos / 1e9)
        self.parts.add("host", ran - sum(self.parts.seconds.values()))
        layers = self.parts.seconds["linear"]
        with self.parts.measuring("logits"):
            logits = self._forward.logits(hidden)
        self.parts.seconds["linear"] = layers  # the head's product is of the logits
        with self.parts.measuring("sampling"):
            self._sampler.sample(logits, plan.samples)
        return time.perf_counter() - start

    def _reference(self, rotary: RotaryEmbedding, pool: torch.Tensor) -> ReferenceForward:
        config, timed = self.config, self.parts.timed
        kernels = dataclasses.replace(
            REFERENCE,
            linear=timed("linear", REFERENCE.linear),
            embedding=timed("elementwise", REFERENCE.embedding),
            rms_norm=timed("elementwise", REFERENCE.rms_norm),
            add_rms_norm=timed("elementwise", REFERENCE.add_rms_norm),
            rope_and_write=timed("elementwise", REFERENCE.rope_and_write),
            silu_mul=timed("elementwise", REFERENCE.silu_mul),
            plan_attention=timed("plan", REFERENCE.plan_attention),
            paged_attention=timed("attention", REFERENCE.paged_attention),
        )
        weights = load_weights(config, pool.dtype, CPU)
        inputs = StepInputBuilder(config.spec, kernels, rotary, BLOCK_SIZE, pool.dtype, CPU)
        return ReferenceForward(Decoder(config.spec, weights, kernels), kernels, inputs, pool)


@torch.inference_mode()
def measure(
    name: str, folder: Path, kernels: Kernels, cases: list[Case], args: argparse.Namespace
) -> list[Result]:
    width = -(-max(case.context for case in cases) // BLOCK_SIZE)
    most = max(case.rows for case in cases)
    blocks = np.random.default_rng(0).permutation(most * width).reshape(most, width)
    subject = Subject(folder, kernels, most * width, args.threads)
    results = []
    for case in cases:
        plan = case.plan(blocks, subject.config.spec.vocab_size)
        best, parts = float("inf"), {}
        end = time.perf_counter() + args.seconds
        subject.run(plan)
        while time.perf_counter() < end or best == float("inf"):
            seconds = subject.run(plan)
            if seconds < best:
                best, parts = seconds, dict(subject.parts.seconds)
        shown = {part: 1e3 * parts.get(part, 0.0) for part in SHOWN}
        results.append(Result(name, kernels, case.name, 1e3 * best, shown))
    return results


def show(results: list[Result], console: Console) -> None:
    columns = ("model", "case", "kernels", "step", *SHOWN)
    table = new_table("Milliseconds of a step", *columns)
    for result in sorted(results, key=lambda one: (one.model, one.case, one.kernels)):
        numbers = [result.milliseconds, *(result.parts[part] for part in SHOWN)]
        cells = [f"{number:,.2f}" for number in numbers]
        table.add_row(result.model, result.case, result.kernels, *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--models", type=Path, default=Path("build/models"), help="their folder")
    parser.add_argument("--sizes", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument(
        "--kernels", nargs="+", choices=("native", "reference"), default=("reference", "native")
    )
    parser.add_argument("--rows", type=int, default=32, help="rows of the decode step")
    parser.add_argument("--context", type=int, default=300, help="tokens of each of them")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--threads", type=int, help="threads that compute")
    parser.add_argument("--seconds", type=float, default=3.0, help="per case, best of many")
    args = parser.parse_args()
    cases = [
        Case(f"decode {args.rows} x {args.context}", args.rows, 1, args.context),
        Case(f"prefill {args.prefill}", 1, args.prefill, args.prefill),
    ]
    console, report = console_of(140), Report("cpu_steps")
    results: list[Result] = []
    for size in args.sizes:
        folder = make_model(size, args.models / size)
        for kernels in args.kernels:
            results += measure(size, folder, kernels, cases, args)
    show(results, console)
    report.add("results", results)
    console.print(report.foreign_line())
    report.write(args.json)


if __name__ == "__main__":
    main()
