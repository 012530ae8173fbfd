"""How long constraints hold an engine's loop, or its interpreter: `python -m
benchmarks.constrained.holds [--tokenizer FOLDER] [--json FILE]`.

A thread takes a turn each millisecond while constraints are compiled beside it, like the engine's
loop, in an interpreter set up like the engine's. The delay of a turn, without the thread's waits
for a processor, is the time for which the interpreter was held. The delay is bounded by the CPU
time of the process, because the holder may wait for a processor, too. The thread also submits the
constraints itself, and walks through compiled ones with tokens drawn from the masks: the calls of a
step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.common import Report, console_of, new_parser, percentile, table_of
from benchmarks.constrained.engines import load_tokenizer
from benchmarks.given import REGEXES, SCHEMAS
from rootlace.runtime.assets import demo_model
from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.runtime.engine.__main__ import SWITCH_SECONDS
from rootlace.runtime.engine.constraints import prepare
from rootlace.runtime.engine.core import collect_when_idle
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.sandbox import CompileService
from rootlace.wire.errors import RootlaceError
from rootlace.wire.protocol import Constraint

T = TypeVar("T")

TURN = 0.001
TOKENS = 40
"""Walked through each grammar."""
COLUMNS = {
    "constraints": "{count}",
    "compiled": "{compiled}",
    "compiling: hold p99, ms": "{held_p99:.2f}",
    "most": "{held:.1f}",
    "submit, most": "{submit:.1f}",
    "a token p99": "{step_p99:.2f}",
    "most ": "{step:.1f}",
}


def kinds() -> dict[str, list[Constraint]]:
    """Return constraints of strangers: ordinary ones, and hostile ones of several kinds."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    optional = " ".join(f'"{letters[i % 26]}"?' for i in range(3000))
    chain = [f'r{i} ::= r{i + 1} "a" r{i + 1} | r{i}' for i in range(5000)]
    names = ["".join(f"{i:05d}" for _ in range(2)) for i in range(20_000)]
    wide = {"type": "object", "properties": {f"p{i}": {"minimum": i} for i in range(8_000)}}
    return {
        "nothing": [],
        "ordinary": [
            *(Constraint("regex", one.pattern) for one in REGEXES),
            *(Constraint("json_schema", json.dumps(one.schema)) for one in SCHEMAS),
        ],
        "an EBNF of 3,000 optional letters": [Constraint("ebnf", f"root ::= ({optional})*")],
        "40 heavy patterns": [
            Constraint("regex", f"(a|b)*a(a|b){{{40 + i}}}(c|(a|b)*a(a|b){{60}})")
            for i in range(40)
        ],
        "an EBNF of 5,000 rules": [
            Constraint("ebnf", "\n".join(["root ::= r0", *chain, 'r5000 ::= "b"']))
        ],
        "20,000 choices": [Constraint("choices", json.dumps(names))],
        "a schema of 8,000 properties": [Constraint("json_schema", json.dumps(wide))],
        "nested counts": [Constraint("regex", "((x{1,100000}){1,100000}){1,100000}")],
    }


class Clock:
    """Measures milliseconds without the time that other programs took."""

    def __init__(self) -> None:
        self._waited = Path("/proc/thread-self/schedstat")
        self._there = self._waited.exists()

    def of(self, call: Callable[[], T], asleep: float = 0.0) -> tuple[T, float]:
        """Return the result of `call`, and how long this thread was busy or held up, beyond the
        milliseconds `asleep`."""
        began, computed = self._now(), time.process_time()
        found = call()
        computed = 1e3 * (time.process_time() - computed)
        return found, min(self._now() - began - asleep, computed)

    def _now(self) -> float:
        """Return the time without this thread's waits for a processor."""
        waited = int(self._waited.read_text().split()[1]) if self._there else 0
        return time.perf_counter() * 1e3 - waited / 1e6


def compile_all(
    service: CompileService, constraints: list[Constraint], wait: float, clock: Clock
) -> tuple[list[Future[Grammar]], list[float], list[float]]:
    """Compile all; return futures, times of the submissions, and delays of the turns meanwhile."""
    futures, submits, late = [], [], []
    for number, constraint in enumerate(constraints):
        future, took = clock.of(lambda one=constraint, n=number: service.submit(one, str(n % 4)))  # type: ignore[misc]
        futures.append(future)
        submits.append(took)
    end = time.perf_counter() + (wait if constraints else 2.0)
    while time.perf_counter() < end and not (futures and all(one.done() for one in futures)):
        late.append(clock.of(lambda: time.sleep(TURN), 1e3 * TURN)[1])
    return futures, submits, late


def walk(grammar: Grammar, clock: Clock, dice: np.random.Generator) -> list[float]:
    """Return the time to mask and take each token of a random text."""
    took = []
    matcher, first = clock.of(grammar.matcher)
    took.append(first)
    for _ in range(TOKENS):
        mask, masking = clock.of(matcher.allowed_mask)
        allowed = np.flatnonzero(mask)
        if not len(allowed) or matcher.is_finished():
            break
        token = int(dice.choice(allowed))
        _, advancing = clock.of(lambda m=matcher, t=token: m.advance(t))  # type: ignore[misc]
        took += [masking, advancing]
    return took


def measure(
    service: CompileService,
    constraints: list[Constraint],
    wait: float,
    dice: np.random.Generator,
) -> dict[str, float]:
    clock = Clock()
    futures, submits, late = compile_all(service, constraints, wait, clock)
    compiled = [one.result() for one in futures if one.done() and one.exception() is None]
    for one in futures:
        assert not one.done() or isinstance(one.exception(), RootlaceError | None)
    steps = [took for grammar in compiled for took in walk(grammar, clock, dice)]
    return {
        "count": len(constraints),
        "compiled": len(compiled),
        "held_p99": percentile(late, 0.99),
        "held": max(late, default=0.0),
        "submit": max(submits, default=0.0),
        "step_p99": percentile(steps, 0.99),
        "step": max(steps, default=0.0),
    }


def main() -> None:
    parser = new_parser("constrained.holds", __doc__)
    parser.add_argument("--tokenizer", type=Path, default=demo_model())
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds at most for each kind")
    args = parser.parse_args()
    console, report = console_of(120), Report("constrained.holds", args, "llguidance")
    compiler = GrammarCompiler(load_tokenizer(args.tokenizer))
    prepare(compiler)
    collect_when_idle()
    sys.setswitchinterval(SWITCH_SECONDS)
    service = CompileService(compiler, ConstraintConfig())
    service.submit(Constraint("choices", '["a"]')).exception()  # the engine does this at its start
    service.submit(Constraint("regex", "a" * 20_000)).exception()  # starts the child process
    rows = {
        name: measure(service, constraints, args.wait, np.random.default_rng(0))
        for name, constraints in kinds().items()
        if args.only in name
    }
    service.close()
    console.print(table_of("how long constraints hold the engine, ms", rows, COLUMNS))
    console.print(report.foreign_line())
    report.add("kinds", rows)
    report.write()


if __name__ == "__main__":
    main()
