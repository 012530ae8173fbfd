"""Constraints compiled beside the loop: nobody else waits, and a failure is one request's own."""

from __future__ import annotations

import gc
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest

from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.matcher import UNKNOWN
from rootlace.runtime.contracts.messages import (
    Abort,
    EngineOutput,
    EngineRequest,
    FromEngine,
    GetStats,
    Stats,
    Stop,
    ToEngine,
)
from rootlace.runtime.engine import core
from rootlace.runtime.engine.core import EngineLoop
from rootlace.runtime.engine.process import AT_ONCE, CompilingRequests
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.structured import Grammar
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint, SamplingParams
from tests.scheduler.matchers import Plain
from tests.simulated_executor import SimulatedExecutor

VOCAB = 32


class OnlySeven(Plain):
    """7, three times; forced where that may show."""

    place = UNKNOWN

    def __init__(self) -> None:
        self.count = 0

    def fill_bitmask(self, out: np.ndarray) -> None:
        out[:] = 1 << 7

    def advance(self, token_id: int) -> bool:
        self.count += token_id == 7
        return token_id == 7

    def is_finished(self) -> bool:
        return self.count == 3

    def forced_tokens(self) -> list[int]:
        return [7] * (3 - self.count)


class Endless(Plain):
    """7 for ever."""

    def matcher(self) -> Endless:
        return self

    def fill_bitmask(self, out: np.ndarray) -> None:
        out[:] = 1 << 7

    def advance(self, token_id: int) -> bool:
        return token_id == 7

    def is_finished(self) -> bool:
        return False


class FakeGrammar:
    def matcher(self) -> OnlySeven:
        return OnlySeven()


class FakeService:
    """Compiles when told to."""

    def __init__(self) -> None:
        self.done: dict[str, Grammar] = {}
        self.pending: dict[str, Future[Grammar]] = {}

    def cached(self, constraint: Constraint) -> Grammar | None:
        return self.done.get(constraint.source)

    def submit(self, constraint: Constraint, client: str = "") -> Future[Grammar]:
        return self.pending.setdefault(constraint.source, Future())

    def finish(self, source: str, error: Exception | None = None) -> None:
        future = self.pending.pop(source)
        if error is not None:
            future.set_exception(error)
        else:
            self.done[source] = FakeGrammar()  # type: ignore[assignment]
            future.set_result(self.done[source])


Turn = list[ToEngine] | Callable[[], None]


class Talk:
    """Messages of the gateway before each step, events between steps, and messages of the
    engine."""

    def __init__(
        self, service: FakeService, *turns: Turn, jump: bool = True, waiting: int = 9
    ) -> None:
        self.turns = deque(turns)
        self.received: list[FromEngine] = []
        executor = SimulatedExecutor(64, 4, vocab_size=VOCAB, verify=True)
        self.loop = EngineLoop(
            Scheduler(
                SchedulerConfig(check_invariants=True, max_waiting=waiting),
                CacheConfig(block_size=4, num_blocks=64),
                128,
                vocab_size=VOCAB,
            ),
            executor,
            service,
            self.receive,
            self.received.extend,
            jump,
        )
        self.loop.run()

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        if not self.turns:
            return [Stop()] if timeout_ms else []
        turn = self.turns.popleft()
        if callable(turn):
            turn()
            return []
        return turn

    def of(self, rid: int) -> list[EngineOutput]:
        return [m for m in self.received if isinstance(m, EngineOutput) and m.rid == rid]

    def end(self, rid: int) -> EngineOutput:
        (final,) = [update for update in self.of(rid) if update.finish]
        return final

    def tokens(self, rid: int) -> list[int]:
        return [token for update in self.of(rid) for token in update.token_ids]


def submit(rid: int, source: str | None = None, jump: str = "canonical") -> EngineRequest:
    constraint = None if source is None else Constraint("regex", source, jump_forward=jump)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=5, temperature=0.0, seed=0)
    return EngineRequest(rid, np.array([rid, 3], np.int32), params, constraint=constraint)


def test_others_go_on_while_a_constraint_is_compiled() -> None:
    service = FakeService()
    talk = Talk(
        service,
        [submit(1, "slow"), submit(2)],
        *([[]] * 8),
        lambda: time.sleep(0.02),
        lambda: service.finish("slow"),
    )
    assert [m.rid for m in talk.received if isinstance(m, EngineOutput) and m.finish] == [2, 1]
    assert talk.tokens(1) == [7, 7, 7] and talk.end(1).finish == "stop"
    assert talk.of(1)[0].forced == (0, 1, 2)
    facts = talk.of(1)[0].facts
    assert facts is not None and facts.queued >= 0.02, "compilation is part of the wait"


def test_who_asks_for_the_same_constraint_shares_its_compilation_and_its_failure() -> None:
    service = FakeService()
    talk = Talk(
        service,
        [submit(1, "a"), submit(2, "a"), submit(3, "b"), submit(4)],
        lambda: service.finish("a", InvalidConstraint("no such thing")),
        lambda: service.finish("b"),
        [submit(5, "b")],
    )
    for rid in (1, 2):
        assert (talk.end(rid).code, talk.end(rid).error) == ("invalid_constraint", "no such thing")
    assert [talk.end(rid).finish for rid in (3, 4, 5)] == ["stop", "length", "stop"]


def test_what_nobody_asked_for_is_left_out_where_it_cannot_be_enforced() -> None:
    service = FakeService()
    constraints = [Constraint("regex", "a", optional=optional) for optional in (True, False)]
    asked = [
        msgspec.structs.replace(submit(rid), constraint=constraint)
        for rid, constraint in enumerate(constraints, 1)
    ]
    talk = Talk(service, asked, lambda: service.finish("a", InvalidConstraint("no such thing")))
    assert talk.end(1).finish == "length" and len(talk.tokens(1)) == 5
    assert talk.end(2).code == "invalid_constraint"


def test_a_fault_of_the_compiler_is_internal() -> None:
    service = FakeService()
    talk = Talk(service, [submit(1, "a")], lambda: service.finish("a", ValueError("odd")))
    assert talk.end(1).code == "internal" and "odd" in talk.end(1).error


def test_abort_duplicates_bounds_and_stats_while_compiling() -> None:
    service = FakeService()
    talk = Talk(
        service,
        [submit(1, "a"), submit(2, "a")],
        [submit(1), submit(3, "b"), GetStats(5)],
        [Abort((1,))],
        lambda: service.finish("a"),
        [GetStats(6)],
        waiting=2,
    )
    codes = [update.code for update in talk.of(1) if update.finish]
    assert codes == ["invalid_request", ""] and talk.of(1)[-1].finish == "abort"
    assert talk.end(3).code == "overloaded"
    assert talk.end(3).error == "at most 2 requests may wait for their constraints"
    assert talk.end(2).finish == "stop"
    before, after = [m.values for m in talk.received if isinstance(m, Stats)]
    assert (before["compiling"], before["waiting"]) == (2, 2)
    assert (after["compiling"], after["waiting"]) == (0, 0)
    assert after["requests_added"] == 1
    # The aborted one does not count.
    assert (before["compiled"], after["compiled"]) == (0, 1) and after["compile_seconds"] > 0


def test_an_id_is_free_again_after_its_abort() -> None:
    service = FakeService()
    talk = Talk(
        service,
        [submit(1, "a")],
        [Abort((1,)), submit(1, "b")],
        lambda: service.finish("a"),  # the aborted one's: it must not start the other
        [],
        lambda: service.finish("b", InvalidConstraint("not b")),
    )
    assert [update.finish for update in talk.of(1)] == ["abort", "error"]


def test_what_another_engine_generated_is_taken_in_while_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failure in the earlier output ends this request alone."""
    monkeypatch.setattr(core, "TOKENS_AT_ONCE", 3)
    service, tokens = FakeService(), np.full(16, 7, np.int32)
    service.done["a"] = Endless()  # type: ignore[assignment]
    params = SamplingParams(max_tokens=18, temperature=0.0, seed=0)
    long, wrong, gone, short = (
        msgspec.structs.replace(submit(rid, "a"), output_ids=ids, params=params)
        for rid, ids in enumerate((tokens, np.append(tokens, 3), tokens, tokens[:2]), 1)
    )
    talk = Talk(
        service,
        [submit(5), short, long, wrong, gone],
        [msgspec.structs.replace(long), GetStats(6)],
        [Abort((3,))],
    )
    ends = [m.rid for m in talk.received if isinstance(m, EngineOutput) and m.finish]
    assert ends.index(5) < ends.index(1, 1), "others have gone on meanwhile"
    assert talk.end(5).finish == talk.end(4).finish == "length"
    assert [one.code for one in talk.of(1) if one.finish] == ["invalid_request", ""]
    assert talk.end(2).code == "invalid_constraint" and talk.end(3).finish == "abort"
    (stats,) = [m.values for m in talk.received if isinstance(m, Stats)]
    assert stats["waiting"] == 3


def test_what_was_waited_for_is_not_kept() -> None:
    """Nor until a full collection of garbage: grammars may be large."""
    service = FakeService()
    requests = CompilingRequests(service)
    requests.add(submit(1, "a"), Constraint("regex", "a"))
    service.finish("a")
    grammar = weakref.ref(service.done.pop("a"))
    gc.disable()
    try:
        assert [request.rid for request, *_ in requests.take()] == [1]
        assert grammar() is None
    finally:
        gc.enable()


def test_a_turn_takes_some_of_many_that_are_ready() -> None:
    service = FakeService()
    requests = CompilingRequests(service)
    for rid in range(1, 97):
        requests.add(submit(rid, "a"), Constraint("regex", "a"))
    service.finish("a")
    turns = []
    while requests.by_rid:
        requests.wait(1e6)  # there is something already, or will never be
        turns.append([request.rid for request, *_ in requests.take()])
    assert [rid for turn in turns for rid in turn] == [*range(1, 97)]
    assert max(map(len, turns)) == AT_ONCE


def test_jumping_takes_both_the_request_and_the_configuration() -> None:
    for jump, allowed in (("canonical", True), ("off", True), ("canonical", False)):
        service = FakeService()
        talk = Talk(service, [submit(1, "a", jump)], lambda s=service: s.finish("a"), jump=allowed)
        assert talk.tokens(1) == [7, 7, 7]
        forced = sum(len(update.forced) for update in talk.of(1))
        assert forced == (3 if jump == "canonical" and allowed else 0)
