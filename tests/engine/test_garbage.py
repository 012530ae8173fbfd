"""Garbage of requests in the engine's process: no reference cycles, so that full collections, which
stop the process, find little to do."""

import gc
import json
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import pytest

from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.messages import (
    Abort,
    EngineOutput,
    EngineRequest,
    FromEngine,
    ToEngine,
)
from rootlace.runtime.engine.constraints import LateCompiler
from rootlace.runtime.engine.core import EngineLoop
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.protocol import Constraint, SamplingParams
from tests.engine.harness import compiling_with
from tests.simulated_executor import SimulatedExecutor

VOCAB = 4096
Given = tuple[str, Any]
KINDS: dict[str, Callable[[int], Given]] = {
    "a pattern": lambda n: ("regex", f"[a-f]{{{n},40}}x"),
    "choices": lambda n: ("choices", [f"red {n}", "green"]),
    "a regular grammar": lambda n: ("ebnf", f'root ::= "a"* "{n}"'),
    "a recursive grammar": lambda n: ("ebnf", f'root ::= "a" root "b" | "{n}"'),
    "a closed schema": lambda n: (
        "json_schema",
        {
            "type": "object",
            "properties": {f"p{n}": {"oneOf": [{"type": "integer"}, {"maxLength": 4}]}},
            "additionalProperties": False,
        },
    ),
    "an open schema": lambda n: (
        "json_schema",
        {"type": "object", "properties": {f"p{n}": {"format": "date"}}, "required": [f"p{n}"]},
    ),
    "a recursive schema": lambda n: (
        "json_schema",
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": n}]}}
            },
        },
    ),
    "a checked schema": lambda n: (
        "json_schema",
        {"type": "array", "items": {"maximum": n}, "uniqueItems": True, "maxItems": 5},
    ),
    "a structural tag": lambda n: (
        "structural_tag",
        {
            "type": "structural_tag",
            "structures": [{"begin": f"<{n}>", "schema": {"type": "integer"}, "end": "</>"}],
            "triggers": ["<"],
        },
    ),
    "no pattern": lambda n: ("regex", f"(a{n}"),
    "no schema": lambda n: ("json_schema", {"type": f"nothing {n}"}),
    "what nothing satisfies": lambda n: (
        "json_schema",
        {"minimum": n, "maximum": n - 1, "type": "integer"},
    ),
    "no tag": lambda n: ("structural_tag", {"type": f"no {n}"}),
    "no JSON": lambda n: ("json_schema", f"{{{n}"),
}


class Served:
    """A loop that goes on, and one compiler for all."""

    def __init__(self, compiling: LateCompiler) -> None:
        self.inbox: deque[ToEngine] = deque()
        self.received: list[FromEngine] = []
        self.rid = 0
        self.loop = EngineLoop(
            Scheduler(
                SchedulerConfig(check_invariants=True),
                CacheConfig(block_size=4, num_blocks=64),
                128,
                vocab_size=VOCAB,
            ),
            SimulatedExecutor(64, 4, vocab_size=VOCAB),
            compiling,
            self.receive,
            self.received.extend,
        )

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        received, self.inbox = list(self.inbox), deque()
        return received

    def ask(self, given: Given | None, fate: str) -> None:
        """Run one request, from its beginning to its end."""
        self.rid += 1
        constraint = None
        if given is not None:
            kind, source = given
            constraint = Constraint(kind, source if isinstance(source, str) else json.dumps(source))  # type: ignore[arg-type]
        output = np.array([5] if fate == "resumed" else [], np.int32)
        params = SamplingParams(max_tokens=12, temperature=0.0, seed=0)
        prompt = np.array([self.rid, 3, 4, 5, 6], np.int32)
        self.inbox.append(
            EngineRequest(self.rid, prompt, params, output_ids=output, constraint=constraint)
        )
        if fate == "vanished":
            self.inbox.append(Abort((self.rid,)))
        while not any(isinstance(one, EngineOutput) and one.finish for one in self.received):
            self.loop.turn()
            if fate == "aborted" and any(isinstance(one, EngineOutput) for one in self.received):
                self.inbox.append(Abort((self.rid,)))
        self.received.clear()


@pytest.fixture(scope="module")
def served(demo_model) -> Iterator[Served]:
    tokenizer = (demo_model / "tokenizer.json").read_text("utf-8")
    compiler = GrammarCompiler(Vocabulary(tokenizer, VOCAB, [2]))
    compiler.prepare()
    compiling = compiling_with(compiler)
    gc.collect()
    gc.freeze()  # what other tests left need not be looked through by each of these
    yield Served(compiling)
    compiling.close()


def garbage_of(work: Callable[[], None]) -> Counter[str]:
    """Count by type the objects of `work` that only a garbage collection finds."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        work()
        gc.collect()
        return Counter(map(_name, gc.garbage))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        if enabled:
            gc.enable()


def left_behind(ask: Callable[[int], None]) -> Counter[str]:
    """Count the objects left by each of several calls; late threads of other tests may disturb one
    call."""
    found = Counter[str]()
    for number in (12, 13, 14):
        found = garbage_of(lambda number=number: ask(number))  # type: ignore[misc]
        if not found:
            break
    return found


def _name(one: object) -> str:
    if isinstance(one, TracebackType):
        one = one.tb_frame
    return (
        f"frame of {one.f_code.co_qualname}" if isinstance(one, FrameType) else type(one).__name__
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_leaves_nothing_to_the_garbage_collector(served: Served, kind: str) -> None:
    served.ask(KINDS[kind](11), "answered")  # what is made once
    assert not left_behind(lambda number: served.ask(KINDS[kind](number), "answered"))


@pytest.mark.parametrize("fate", ["answered", "aborted", "vanished", "resumed"])
@pytest.mark.parametrize("kind", [None, "a pattern", "an open schema", "no schema"])
def test_nor_does_one_that_ends_otherwise(served: Served, kind: str | None, fate: str) -> None:
    def ask(number: int) -> None:
        served.ask(None if kind is None else KINDS[kind](number + len(fate)), fate)

    ask(11)
    assert not left_behind(ask)


# ---------------------------------------------------------------- when all is looked through

MADE = """
import gc
from rootlace.runtime.engine import core as garbage
class Circle:
    alive = 0
    def __init__(self):
        self.me, self.more = self, [[] for _ in range(8)]
        Circle.alive += 1
    def __del__(self):
        Circle.alive -= 1
def make(count):  # each thousand lives until there are some thousands more, so through young ones
    global held
    for _ in range(count):
        held.append([Circle() for _ in range(1000)])
        del held[:-20]
        most.append(Circle.alive)
held, most, full = [], [], []
gc.callbacks.append(
    lambda phase, info: phase == "start" and info["generation"] == 2 and full.append(Circle.alive)
)
garbage.collect_when_idle()
full.clear()
"""


def said(program: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", MADE + program], capture_output=True, text=True, check=True
    )
    return [
        int(number) for number in done.stdout.replace("True", "1").replace("False", "0").split()
    ]


def test_all_is_looked_through_at_idle_moments_where_much_has_come() -> None:
    program = """
print(garbage.collect(), len(full))
make(20)
print(len(full), not garbage.collect(), garbage.collect(), len(full), Circle.alive > 0)
held.clear()
make(10)
held.clear()
print(not garbage.collect(), Circle.alive)
"""
    assert said(program) == [0, 0, 0, 0, 0, 1, 1, 0, 0]


def test_circles_are_bounded_where_there_is_no_idle_moment() -> None:
    before, most = said("make(100); print(len(full)); make(500); print(max(most))")
    assert not before and 100_000 < most < 400_000
