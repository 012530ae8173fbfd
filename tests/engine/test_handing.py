"""Blocks that one engine computes and another goes on from: the tokens are those of one alone."""

import importlib.util
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rootlace.runtime.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from rootlace.runtime.contracts.block_store import TransferConfig, TransferKind
from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.engine.core import Steps
from rootlace.runtime.engine.offload import open_tiers
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.processes import new_memory
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.errors import InternalError, InvalidRequest
from tests.engine.harness import Outcome, greedy
from tests.tiny_model import make_tiny_model
from tests.waiting import eventually

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed"
)
PROMPT = [random.Random(5).randrange(256) for _ in range(100)]
BLOCKS = (len(PROMPT) - 1) // 16
SLOTS = 64


class Peer:
    """Engine as in `engine.__main__`. Reading always pays, since the model is too small."""

    def __init__(
        self, model: Path, memory: int = -1, num_blocks: int = 40, by: TransferKind = "memory"
    ) -> None:
        config = EngineConfig(
            executor=ExecutorConfig(
                model=str(model), dtype="float32", device="cpu", threads=1, kernels="native"
            ),
            cache=CacheConfig(block_size=16, num_blocks=num_blocks),
            scheduler=SchedulerConfig(check_invariants=True),
        )
        runner = ModelRunner.load(config.executor, config.cache, 512, 16)
        self.block_bytes = runner.kv_cache.nbytes // num_blocks
        transfer = TransferConfig(by, SLOTS * self.block_bytes, memory)
        alone = by == "memory" and memory < 0
        self.below = open_tiers(config, runner, 2, None if alone else transfer)
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            runner.context_length,
            vocab_size=runner.vocab_size,
            tiers=self.below and self.below.tiers,
        )
        if self.below is not None:
            self.below.begin(self.scheduler, runner, 16)
            self.scheduler.pace.begin(1, 1e9)
        self.outcomes: dict[int, Outcome] = {}
        move = self.below and self.below.mover.move
        self.steps = Steps(self.scheduler, runner, False, self.take, move=move)

    @property
    def address(self) -> bytes:
        return self.below.handed_at

    def close(self) -> None:
        self.below.transfer.close()

    @property
    def handing(self):
        return self.scheduler.kv.tiering.handing

    def take(self, updates) -> None:
        for update in updates:
            self.outcomes[update.rid].add(update)

    def ask(self, prompt: list[int], max_tokens: int = 6, namespace: str = "") -> Outcome:
        rid = len(self.outcomes)
        self.outcomes[rid] = Outcome()
        params = greedy(max_tokens, logprobs=max_tokens > 0, top_logprobs=2 if max_tokens else 0)
        tokens = np.array(prompt, np.int32)
        self.scheduler.add(EngineRequest(rid, tokens, params, namespace=namespace))

        def turn() -> bool:
            self.take(self.steps.step())
            return self.outcomes[rid].finish is not None

        eventually(turn)
        return self.outcomes[rid]

    def give(self, first: int, slots: list[int], namespace: str = "") -> tuple[int, ...]:
        self.handing.give(7, namespace, np.array(PROMPT, np.int32), first, slots)
        answers: list[tuple[int, tuple[int, ...]]] = []

        def turn() -> bool:
            self.take(self.steps.step())
            answers.extend(self.handing.take_answers())
            return bool(answers)

        eventually(turn)
        ((ticket, checksums),) = answers
        assert ticket == 7 and not self.handing.busy
        self.scheduler.check()
        return checksums

    def offer(
        self, first: int, slots: list[int], crcs: tuple[int, ...], namespace="", source=b""
    ) -> None:
        """Offer blocks for the next request."""
        places = list(zip(slots, crcs, strict=False))
        tokens = np.array(PROMPT, np.int32)
        self.handing.offer(len(self.outcomes), namespace, tokens, first, places, source)

    def stats(self, name: str) -> int | float:
        return self.scheduler.stats()[f"handed_{name}"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path) -> Outcome:
    return Peer(model).ask(PROMPT)


@pytest.fixture
def memory() -> Iterator[int]:
    found = new_memory()
    yield found
    os.close(found)


def same(found: Outcome, wanted: Outcome) -> bool:
    """To the bit."""
    return (found.token_ids, found.logprobs, found.top) == (
        wanted.token_ids,
        wanted.logprobs,
        wanted.top,
    )


@pytest.mark.parametrize("by", ["memory", "tcp", pytest.param("nixl", marks=needs_nixl)])
def test_what_the_other_lacks_travels_and_the_tokens_are_the_same(
    model: Path, alone: Outcome, memory: int, by: TransferKind
) -> None:
    source, target = Peer(model, memory, by=by), Peer(model, memory, by=by)
    target.ask(PROMPT[:40])
    assert source.ask(PROMPT, 0).token_ids == []
    slots = [9, 3, 30, 2]
    crcs = source.give(2, slots)
    target.offer(2, slots, crcs, source=source.address)
    found = target.ask(PROMPT)
    assert same(found, alone) and found.cached_tokens == 16 * BLOCKS
    assert target.stats("read_bytes") == len(slots) * target.block_bytes
    assert source.stats("given_blocks") == len(slots)
    # What was offered is forgotten, what came is cached.
    assert target.stats("blocks") == 0
    assert target.ask(PROMPT).cached_tokens == len(PROMPT) - 1
    source.close()
    target.close()


def test_a_giver_that_dies_in_the_middle(model: Path, alone: Outcome) -> None:
    """Blocks that came before count; the rest is computed, as fast as usual."""
    source, target = Peer(model, by="tcp"), Peer(model, by="tcp")
    source.ask(PROMPT, 0)
    slots = list(range(BLOCKS))
    crcs = source.give(0, slots)
    transfer = target.below.transfer
    take, taken = transfer.take, []

    def dies(at: bytes, slot: int, into: np.ndarray) -> None:
        taken.append(slot)
        if len(taken) == 3:
            source.close()
            transfer._drop(at)  # what is on its way is lost, too
        take(at, slot, into)

    transfer.take = dies
    target.offer(0, slots, crcs, source=source.address)
    found = target.ask(PROMPT)
    assert same(found, alone) and found.cached_tokens == 32
    eventually(lambda: target.stats("lost_blocks") == BLOCKS - 2)
    assert target.stats("damaged_blocks") == 0 and target.stats("working") == 1
    target.close()


def test_a_damaged_block_and_all_behind_it_are_computed(
    model: Path, alone: Outcome, memory: int
) -> None:
    source, target = Peer(model, memory), Peer(model, memory)
    source.ask(PROMPT, 0)
    slots = list(range(BLOCKS))
    crcs = source.give(0, slots)
    os.pwrite(memory, b"\x55" * 8, 2 * source.block_bytes + 100)
    target.offer(0, slots, crcs)
    found = target.ask(PROMPT)
    assert same(found, alone) and found.cached_tokens == 32
    assert target.stats("damaged_blocks") == 1


def test_nobody_takes_what_was_given_of_another_namespace(
    model: Path, alone: Outcome, memory: int
) -> None:
    source, target = Peer(model, memory), Peer(model, memory)
    source.ask(PROMPT, 0, "one")
    assert source.give(0, [0, 1]) == ()  # there is none of it here
    slots = list(range(BLOCKS))
    crcs = source.give(0, slots, "one")
    assert len(crcs) == BLOCKS
    target.offer(0, slots, crcs, "two")
    found = target.ask(PROMPT, namespace="two")
    assert same(found, alone) and found.cached_tokens == 0
    target.offer(0, slots, crcs, "one")
    assert target.ask(PROMPT, namespace="two").cached_tokens == len(PROMPT) - 1  # its own
    target.offer(0, slots, crcs, "one")
    assert target.ask(PROMPT, namespace="one").cached_tokens == 16 * BLOCKS


def test_slots_that_somebody_else_got_meanwhile(model: Path, alone: Outcome, memory: int) -> None:
    source, target = Peer(model, memory), Peer(model, memory)
    source.ask(PROMPT, 0)
    slots = list(range(BLOCKS))
    crcs = source.give(0, slots)
    source.ask([*PROMPT[:16], *PROMPT], 0)
    source.handing.give(8, "", np.array([*PROMPT[:16], *PROMPT], np.int32), 1, slots)
    eventually(lambda: bool(source.steps.step() or source.handing.take_answers()))
    target.offer(0, slots, crcs)
    found = target.ask(PROMPT)
    assert same(found, alone) and found.cached_tokens == 0


def test_what_is_cached_in_part_is_given_in_part(model: Path, memory: int) -> None:
    source = Peer(model, memory)
    source.ask(PROMPT[:50], 0)
    assert len(source.give(1, [5, 6, 7, 8])) == 2
    assert source.give(3, [5, 6]) == ()


def test_more_is_given_than_there_are_buffers(model: Path, alone: Outcome, memory: int) -> None:
    source, target = Peer(model, memory), Peer(model, memory)
    assert source.below is not None and source.below.tiers.handed is not None
    source.below.tiers.handed.store.unreserved = 2  # type: ignore[attr-defined]
    source.ask(PROMPT, 0)
    slots = list(range(10, 10 + BLOCKS))
    crcs = source.give(0, slots)
    assert len(crcs) == BLOCKS
    target.offer(0, slots, crcs)
    assert same(target.ask(PROMPT), alone)


def test_a_step_that_fails_while_blocks_are_given(model: Path, memory: int) -> None:
    source = Peer(model, memory)
    source.ask(PROMPT, 0)
    source.handing.give(1, "", np.array(PROMPT, np.int32), 0, [0, 1])
    source.scheduler.add(EngineRequest(99, np.array([1, 2], np.int32), greedy(2)))
    source.outcomes[99] = Outcome()
    plan = source.scheduler.plan()
    assert plan is not None
    source.take(source.scheduler.fail(plan, InternalError("broken")))
    source.scheduler.check()
    assert source.handing.take_answers() == [(1, ())] and not source.handing.busy
    # Slots and buffers are as before.
    source.ask(PROMPT, 0)
    assert len(source.give(0, [0, 1])) == 2


def test_slots_that_are_written_are_not_given_twice(model: Path, memory: int) -> None:
    """Slots are refused during a write, and after a failed step; the answer comes after all
    writes."""
    source = Peer(model, memory)
    store = source.below.tiers.handed.store
    source.ask(PROMPT, 0)
    tokens = np.array(PROMPT, np.int32)
    held = threading.Event()
    store.ask(lambda: held.wait(60) and None)
    source.handing.give(1, "", tokens, 0, [0, 1])
    source.handing.give(2, "", tokens, 0, [1, 2])
    assert source.handing.take_answers() == [(2, ())]
    source.take(source.steps.step())  # the moves are made, and nothing is written yet
    source.scheduler.add(EngineRequest(99, np.array([1, 2], np.int32), greedy(2)))
    source.outcomes[99] = Outcome()
    plan = source.scheduler.plan()
    source.take(source.scheduler.fail(plan, InternalError("broken")))
    source.handing.give(3, "", tokens, 0, [0])
    assert source.handing.take_answers() == [(3, ())] and source.handing.busy
    held.set()
    answers: list[tuple[int, tuple[int, ...]]] = []
    eventually(
        lambda: bool(
            source.steps.step() or answers.extend(source.handing.take_answers()) or answers
        )
    )
    assert answers == [(1, ())] and not source.handing.busy
    source.ask(PROMPT, 0)
    assert len(source.give(0, [0, 1])) == 2


def test_who_wants_room_gets_what_is_held_for_others(
    model: Path, alone: Outcome, memory: int
) -> None:
    source = Peer(model, memory, num_blocks=8)
    assert source.below is not None and source.below.tiers.handed is not None
    source.below.tiers.handed.store.unreserved = 0  # type: ignore[attr-defined]
    source.ask(PROMPT, 0)
    source.handing.give(1, "", np.array(PROMPT, np.int32), 0, list(range(BLOCKS)))
    other = [(token + 1) % 256 for token in PROMPT]
    assert len(source.ask(other).token_ids) == 6
    assert source.handing.take_answers() == [(1, ())]
    source.scheduler.check()


def test_a_memory_without_room_for_a_block_is_refused(model: Path, memory: int) -> None:
    config = EngineConfig(
        executor=ExecutorConfig(model=str(model), dtype="float32", device="cpu", threads=1),
        cache=CacheConfig(block_size=16, num_blocks=8),
    )
    runner = ModelRunner.load(config.executor, config.cache, 512, 16)
    with pytest.raises(InvalidRequest, match="--disaggregate-gb 1e-06: a block takes"):
        open_tiers(config, runner, 2, TransferConfig("memory", 1000, memory))


def test_a_memory_that_cannot_be_written_holds_nobody_up(model: Path, memory: int) -> None:
    """A gift in progress is answered without the missing blocks, and later prompts at once."""
    peer = Peer(model, memory)
    peer.ask(PROMPT, 0)
    store = peer.below.tiers.handed.store
    reserved = [(100 + at, at.to_bytes(16, "big")) for at in range(store.writable_slots)]
    for slot, key in reserved:  # no room: the giving waits
        store.reserve(slot, key)
    peer.handing.give(7, "", np.array(PROMPT, np.int32), 0, [0])
    peer.handing.poll()
    assert peer.handing.busy
    store._switch.off(OSError("no space is left"))
    peer.handing.poll()
    assert peer.handing.take_answers() == [(7, ())] and not peer.handing.busy
    for slot, _ in reserved:
        store.cancel(slot)
    assert peer.give(0, [0]) == ()
