"""The engine's loop, without processes: messages in, messages out."""

from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.contracts.messages import (
    Abort,
    EngineOutput,
    EngineRequest,
    Flush,
    Flushed,
    FromEngine,
    GetStats,
    Pause,
    PinsLost,
    Stats,
    Stop,
    ToEngine,
    read_step_record,
)
from rootlace.runtime.contracts.plan import StepPlan, StepResult
from rootlace.runtime.engine.core import EngineLoop, step_record
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.protocol import Constraint, SamplingParams
from rootlace.wire.sampling import Cache, Handling
from tests.engine.harness import compiling_with

VOCAB = 50


class CountingExecutor:
    """Continues every sequence with last token + 1; fails when it sees a poisonous token."""

    num_blocks, context_length, vocab_size = 64, 128, VOCAB
    poison = 49

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def collect(self, plan: StepPlan) -> StepResult:
        if self.poison in plan.token_ids:
            raise RuntimeError("poisoned")
        tokens = [(int(s.token_ids[-1]) + 1) % VOCAB for s in plan.samples]
        return StepResult(
            np.asarray(tokens, dtype=np.int32),
            [None] * len(tokens),
            [],
        )


def compiler() -> GrammarCompiler:
    """Compile for tokens 1..26, which are the letters."""
    letters = {"<eos>": 0} | {chr(ord("a") + i): i + 1 for i in range(26)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return GrammarCompiler(Vocabulary(tokenizer.to_str(), VOCAB, [0]))


class Conversation:
    """Script of the gateway's messages before each step, with the engine's messages."""

    def __init__(
        self,
        *turns: list[ToEngine],
        preparations: int = 0,
        record: np.ndarray | None = None,
    ) -> None:
        self.turns = deque(turns)
        self.preparations = preparations
        self.busy_while_prepared: list[bool] = []
        self.received: list[FromEngine] = []
        self.loop = EngineLoop(
            Scheduler(
                SchedulerConfig(max_step_tokens=32, check_invariants=True),
                CacheConfig(block_size=4, num_blocks=64),
                CountingExecutor.context_length,
                vocab_size=VOCAB,
            ),
            CountingExecutor(),
            compiling := compiling_with(compiler()),
            self.receive,
            self.received.extend,
            record=record,
            prepare=self.prepare,
            executor_stats=lambda: {"prepared": len(self.busy_while_prepared)},
        )
        self.loop.run()
        compiling.close()

    def prepare(self) -> bool:
        self.busy_while_prepared.append(bool(self.loop.stats()["running"]))
        self.preparations -= 1
        return self.preparations >= 0

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        if self.turns:
            return self.turns.popleft()
        return [Stop()] if timeout_ms else []  # it would sleep: nothing is left to do

    def tokens(self, rid: int) -> list[int]:
        return [t for u in self.updates(rid) for t in u.token_ids]

    def updates(self, rid: int) -> list[EngineOutput]:
        return [m for m in self.received if isinstance(m, EngineOutput) and m.rid == rid]

    def end(self, rid: int) -> EngineOutput:
        finals = [u for u in self.updates(rid) if u.finish]
        assert len(finals) == 1
        return finals[0]


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def submit(rid: int, *ids: int, **params: object) -> EngineRequest:
    settings = {"max_tokens": 4, "temperature": 0.0, "seed": 0, **params}
    return EngineRequest(rid, ids_of(*ids), SamplingParams(**settings))  # type: ignore[arg-type]


def test_requests_run_to_their_ends() -> None:
    talk = Conversation([submit(1, 5, 6), submit(2, 10, stop_token_ids=(12,))])
    assert talk.tokens(1) == [7, 8, 9, 10]
    assert talk.end(1).finish == "length"
    assert talk.tokens(2) == [11, 12]
    assert talk.end(2).finish == "stop"
    assert talk.end(2).matched == 12
    assert talk.loop.turns > 0


def test_a_request_is_on_record_while_it_is_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an engine that dies here names the request; later the record has the steps alone."""
    path, on_record = tmp_path / "steps", list[dict[int, int]]()
    add = Scheduler.add

    def spy(self: Scheduler, request: EngineRequest, *args: Any, **kwargs: Any) -> None:
        on_record.append(read_step_record(path))
        add(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "add", spy)
    talk = Conversation(
        [submit(1, 5, 6)], [submit(2, 9, max_tokens=1)], record=step_record(path, 8)
    )
    assert on_record == [{1: 2}, {2: 1}] and read_step_record(path) == {}
    assert talk.tokens(1) == [7, 8, 9, 10] and talk.tokens(2) == [10]


def test_a_pause_lets_requests_stand_still() -> None:
    turns = [[submit(1, 5, max_tokens=6)], [], [Pause(True)], [submit(2, 9)], []]
    paused = Conversation(*turns)  # and stopped then
    assert paused.tokens(1) == [6, 7] and not paused.tokens(2)
    assert not any(paused.busy_while_prepared)
    going = Conversation(*turns, [Pause(False)])
    assert going.tokens(1) == [6, 7, 8, 9, 10, 11] and going.tokens(2) == [10, 11, 12, 13]


def test_what_is_told_in_the_middle_of_a_step_is_told_once() -> None:
    """A prompt makes the loop send held-back tokens before its step, with the step's own behind."""
    patient = msgspec.structs.replace(submit(1, 5, max_tokens=30), emit_seconds=1e9)
    talk = Conversation([patient], [], [], [submit(2, 2, 20)], [], [submit(3, 3, 30)])
    assert talk.tokens(1) == list(range(6, 36))
    assert talk.tokens(2) == [21, 22, 23, 24] and talk.tokens(3) == [31, 32, 33, 34]
    assert len(talk.updates(1)) > 2  # held back, and told before its end all the same


def test_a_failing_step_ends_its_requests_and_no_others() -> None:
    talk = Conversation(
        [submit(1, 5, 6, max_tokens=8)], [], [submit(2, CountingExecutor.poison)], [], []
    )
    assert talk.end(2).finish == "error"
    assert "poisoned" in talk.end(2).error
    late = Conversation([submit(2, CountingExecutor.poison)], [submit(3, 1)])
    assert late.end(2).finish == "error"
    assert late.tokens(3) == [2, 3, 4, 5]


def test_pins_that_a_failing_step_loses_are_told() -> None:
    handling = Handling(cache=Cache(pin=True))
    pinned = msgspec.structs.replace(submit(1, 5, 6, 7, 8, 9), handling=handling)
    poison, more = (submit(rid, CountingExecutor.poison) for rid in (2, 3))
    talk = Conversation([pinned], *[[]] * 5, [poison], *[[]] * 3, [more])
    assert any(update.facts and update.facts.pin for update in talk.updates(1))
    lost = [m for m in talk.received if isinstance(m, PinsLost)]
    assert lost == [PinsLost(1)]  # none was left for the second fault
    assert talk.received.index(lost[0]) > talk.received.index(talk.end(1))


def test_refusals_name_the_reason() -> None:
    constrained = EngineRequest(
        4, ids_of(1), SamplingParams(max_tokens=1, seed=0), constraint=Constraint("regex", "(")
    )
    talk = Conversation([submit(1), submit(2, *[1] * 129), constrained, submit(3, 1)])
    assert talk.end(1).code == "invalid_request"
    assert talk.end(2).code == "context_length_exceeded"
    assert talk.end(4).code == "invalid_constraint"
    assert talk.end(3).finish == "length"


def test_abort_flush_and_stats_are_answered() -> None:
    talk = Conversation(
        [submit(1, 5, max_tokens=100)], [], [Abort((1, 99))], [Flush(7)], [GetStats(8)]
    )
    assert talk.end(1).finish == "abort"
    assert any(isinstance(m, Flushed) and m.ticket == 7 for m in talk.received)
    (stats,) = [m for m in talk.received if isinstance(m, Stats)]
    assert stats.values["running"] == 0
    assert stats.values["blocks_free"] == 64


def test_time_without_work_is_used_to_prepare_and_never_slept_away_before() -> None:
    talk = Conversation([submit(1, 5)], [GetStats(8)], preparations=5)
    # Stop comes where the loop would sleep: when nothing is left to be prepared.
    assert len(talk.busy_while_prepared) == 6
    assert not any(talk.busy_while_prepared)
    (stats,) = [m for m in talk.received if isinstance(m, Stats)]
    assert stats.values["prepared"] > 0
    assert talk.end(1).finish == "length"


def test_a_request_resumes_where_another_engine_left_it() -> None:
    whole = Conversation([submit(1, 5, 6, max_tokens=6)])
    message = submit(2, 5, 6, max_tokens=6)
    resumed = EngineRequest(2, message.token_ids, message.params, output_ids=ids_of(7, 8))
    talk = Conversation([resumed])
    assert [7, 8, *talk.tokens(2)] == whole.tokens(1)


def test_a_constrained_request_resumes_inside_its_constraint() -> None:
    """The executor goes on counting, and so does the alphabet."""
    resumed = EngineRequest(
        1,
        ids_of(5),
        SamplingParams(max_tokens=9, temperature=0.0, seed=0),
        output_ids=ids_of(6, 7),
        constraint=Constraint("regex", "fghi"),
    )
    astray = msgspec.structs.replace(resumed, rid=2, output_ids=ids_of(9))
    talk = Conversation([resumed, astray])
    assert talk.tokens(1) == [8, 9]
    assert talk.end(1).finish == "stop"
    assert talk.end(2).code == "invalid_constraint"
