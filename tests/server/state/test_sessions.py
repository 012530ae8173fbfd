"""Sessions that are interrupted at any moment and continue in another gateway from a folder."""

from __future__ import annotations

import asyncio
import random
from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.client.connection import Unanswered
from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.runtime.server import session_log
from rootlace.runtime.server.session import Session
from rootlace.runtime.server.session_log import attach
from rootlace.runtime.server.session_store import SessionStore
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire import protocol
from rootlace.wire.errors import StateLost
from rootlace.wire.protocol import (
    Append,
    Chunk,
    Close,
    Done,
    Event,
    Failed,
    Generate,
    Generated,
    Hello,
    Op,
    Open,
    Ping,
    Prefill,
    Quote,
    SamplingParams,
    Select,
    Text,
    Tokens,
    pack,
)
from tests.server.conftest import make_model
from tests.server.fake_engine import FakeEngine
from tests.waiting import until

read_tokenizer = cache(lambda folder: Tokenizer.read(FolderSource(folder)))
HELLO = Hello(0, protocol.PROTOCOL_VERSION, session="s")


class World:
    """A client of gateways that come and go; a dying gateway loses `loses` of its last frames."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self._unanswered = Unanswered()
        self._ops: dict[int, Op] = {}
        self._on_the_way: list[list[Event]] = []
        self.events: list[Event] = []
        self._first = True
        self._open()

    def _open(self) -> None:
        self.model, self.engine = make_model(self._tokenizer, eos=(2,))
        self.store = SessionStore(self._folder)
        hello = HELLO
        if not self._first:
            unanswered = self._unanswered
            hello = msgspec.structs.replace(
                HELLO, heard=unanswered.heard, chunks=unanswered.chunks()
            )
        self._first = False
        log = attach(self.store, hello, "")
        self.session: Session = Session(self.model, self._on_the_way.append, log=log)

    def send(self, *ops: Op) -> None:
        self._ops |= {op.op: op for op in ops}
        self._unanswered.sent([(op.op, pack(op)) for op in ops])
        self.session.handle(list(ops))

    def hear(self, frames: int | None = None) -> None:
        """Take some of the frames under way, or all."""
        taken, self._on_the_way[:frames] = self._on_the_way[:frames], []
        for event in (event for frame in taken for event in frame):
            self._unanswered.hear(event)
            self.events.append(event)

    def die(self, loses: int) -> None:
        """Kill the gateway, which loses its last frames, and start another one."""
        self.hear(max(0, len(self._on_the_way) - loses))
        self._on_the_way = []
        self.session.close()  # writes nothing to the store
        self.model.close()
        self.store._thread.shutdown()  # a killed process has no threads that continue
        self.store._file.close()
        self.store._lock.close()
        self._open()
        again = [self._ops[number] for number, _ in self._unanswered.take()]
        self.send(*again)

    async def turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def end(self) -> None:
        for _ in range(5000):
            self.hear()
            if not self._unanswered.waiting:
                return
            await asyncio.sleep(0)
        raise AssertionError("something never ended")

    def close(self) -> None:
        self.session.close()
        self.model.close()
        self.store.close()


def program(rng: random.Random) -> list[Op]:
    """Operations on a few branches, some of which fail."""
    ops: list[Op] = [Open(1, 1), Append(2, 1, (Text("Once upon a time"),))]
    branches = [1]
    for op in range(3, 26):
        branch = rng.choice(branches)
        params = SamplingParams(max_tokens=6, seed=op, n=rng.choice([1, 1, 2]), logprobs=True)
        if rng.random() < 0.3:
            params = msgspec.structs.replace(params, stop=("a", "the"))
        kinds: list[Op] = [
            Open(op, op, parent=branch),
            Open(op, op, parent=rng.choice(branches)),
            Append(op, branch, (Text(rng.choice([" a", "é", " story", ""])),)),
            Append(op, branch, (Quote(rng.choice(branches)), Text("!"))),
            Append(op, branch, (Tokens((5, 6)),)),
            Generate(op, branch, params=params, stream=True),
            Generate(op, branch, params=params, stream=True),
            Generate(op, branch, params=params, stream=rng.random() < 0.5),
            Select(op, branch, ("yes", "no")),
            Prefill(op, branch),
        ]
        rare: list[Op] = [
            Append(op, branch, (Tokens((10**6,)),)),
            Close(op, branch),
            Ping(op, heard=0),
        ]
        chosen = rng.choice(rare if rng.random() < 0.1 else kinds)
        ops.append(chosen)
        if isinstance(chosen, Open):
            branches.append(op)
        elif isinstance(chosen, Close):
            branches.remove(branch)
        if not branches:
            break
    return ops


def untimed(event: Event) -> object:
    """Return an event without the parts that depend on time."""
    if isinstance(event, Generated):
        return event.outputs, event.prompt_logprobs, event.usage.completion_tokens
    if isinstance(event, protocol.Selected):
        return event.choice, event.scores
    if isinstance(event, Failed):
        return event.code, event.message
    return type(event)


def outcomes(events: list[Event]) -> tuple[dict[int, object], dict[tuple[int, int], object]]:
    ended: dict[int, object] = {}
    streams: dict[tuple[int, int], list[object]] = {}
    for event in events:
        if isinstance(event, Chunk):
            stream = streams.setdefault((event.op, event.index), ["", (), ()])
            stream[0] += event.text  # type: ignore[operator]
            stream[1] += event.token_ids  # type: ignore[operator]
            stream[2] += event.logprobs  # type: ignore[operator]
            assert event.op not in ended
        else:
            assert event.op not in ended, "a second terminal event"
            ended[event.op] = untimed(event)
    return ended, {key: tuple(value) for key, value in streams.items()}


async def run(
    tokenizer: Tokenizer, folder: Path, seed: int, deaths: bool
) -> tuple[dict[int, object], dict[tuple[int, int], object]]:
    rng, fate = random.Random(seed), random.Random(seed + 1)
    world = World(tokenizer, folder)
    for op in program(rng):
        world.send(op)
        if deaths:
            await world.turns(fate.choice([0, 0, 1, 2, 5]))
            if fate.random() < 0.5:
                world.hear(1)
            if fate.random() < 0.15:
                world.send(Ping(1000 + op.op, heard=world._unanswered.heard))
            if fate.random() < 0.2:
                world.die(loses=fate.randrange(4))
    if deaths:
        world.die(loses=fate.randrange(4))
        await world.turns(fate.randrange(6))
        world.die(loses=fate.randrange(4))
    await world.end()
    world.close()
    ended, streams = outcomes(world.events)
    return {op: event for op, event in ended.items() if op < 1000}, streams


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whenever_servers_die_each_operation_ends_once_as_if_none_had(
    seed: int, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = read_tokenizer(demo_model)
    calm = asyncio.run(run(tokenizer, tmp_path_factory.mktemp("calm"), seed, False))
    disturbed = asyncio.run(run(tokenizer, tmp_path_factory.mktemp("dying"), seed, True))
    assert disturbed == calm


@pytest.mark.parametrize("kept_tokens", [0, 2])
async def test_a_stream_of_which_the_client_has_more_is_lost_and_not_repeated(
    kept_tokens: int, demo_model: Path, tmp_path: Path
) -> None:
    """A client has more of a stream than the store after a power failure, or with a full disk."""
    tokenizer = read_tokenizer(demo_model)
    engine = FakeEngine(tokenizer.vocab_size, paused=True)
    model, _ = make_model(tokenizer, engine)
    store = SessionStore(tmp_path)
    session = Session(model, lambda _: None, log=attach(store, HELLO, ""))
    stream = Generate(3, 1, params=SamplingParams(max_tokens=20), stream=True)
    session.handle([Open(1, 1), Append(2, 1, (Text("Once"),)), stream])
    await until(lambda: bool(engine.running))
    for _ in range(kept_tokens):
        engine.step()
    session.close()
    store.close()

    store = SessionStore(tmp_path)
    hello = msgspec.structs.replace(HELLO, heard=2, chunks=((3, 0, 40, 12),))
    frames: list[list[Event]] = []
    session = Session(model, frames.append, log=attach(store, hello, ""))
    session.handle([stream])
    await until(lambda: bool(frames))
    ((failed,),) = frames
    assert isinstance(failed, Failed) and failed.code == "state_lost"
    session.close()
    model.close()
    store.close()


def test_what_is_of_another_model_is_lost(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    attach(store, HELLO, "", "one")
    store.close()
    store = SessionStore(tmp_path)
    again = msgspec.structs.replace(HELLO, heard=0)
    with pytest.raises(StateLost, match="'one'"):
        attach(store, again, "", "two")
    assert attach(store, again, "", "one") is not None
    store.close()


def test_a_client_that_never_says_what_it_has_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_log, "MAX_UNHEARD", 10)
    store = SessionStore(tmp_path)
    log = attach(store, HELLO, "")
    assert log is not None
    for op in range(1, 10):
        log.emitted(Done(op))
    log.heard(5)
    for op in range(10, 16):
        log.emitted(Done(op))
    assert store.find("s") is not None
    log.emitted(Done(16))
    assert store.find("s") is None
    store.close()


async def test_a_branch_that_a_refusal_broke_stays_broken(demo_model: Path, tmp_path: Path) -> None:
    model, _ = make_model(read_tokenizer(demo_model), max_message_bytes=4000)
    store = SessionStore(tmp_path)
    frames: list[list[Event]] = []
    session = Session(model, frames.append, log=attach(store, HELLO, ""))
    session.handle([Open(1, 1), Append(2, 1, (Text("too much " * 2000),))])
    await until(lambda: bool(frames))
    session.close()
    store.close()

    store = SessionStore(tmp_path)
    hello = msgspec.structs.replace(HELLO, heard=2)
    session = Session(model, frames.append, log=attach(store, hello, ""))
    session.handle([Append(3, 1, (Text("Once"),))])
    await until(lambda: len(frames) == 2)
    refused, failed = (frame[-1] for frame in frames)
    assert isinstance(refused, Failed) and refused.code == "overloaded"
    assert isinstance(failed, Failed) and failed.code == "cancelled"
    session.close()
    model.close()
    store.close()


async def test_a_branch_whose_adapter_is_not_there_any_more_is_broken(
    demo_model: Path, tmp_path: Path
) -> None:
    tokenizer = read_tokenizer(demo_model)
    frames: list[list[Event]] = []
    for adapters, heard in ((("formal",), None), ((), 2)):
        model, _ = make_model(tokenizer, FakeEngine(tokenizer.vocab_size, adapters=adapters))
        store = SessionStore(tmp_path)
        hello = msgspec.structs.replace(HELLO, heard=heard)
        session = Session(model, frames.append, log=attach(store, hello, ""))
        if heard is None:
            session.handle([Open(1, 1, adapter="formal"), Append(2, 1, (Text("Once"),))])
        else:
            session.handle([Generate(3, 1), Open(4, 2, parent=1)])
        await until(lambda heard=heard: sum(map(len, frames)) == 2 + 2 * bool(heard))
        session.close()
        model.close()
        store.close()
    *_, generated, forked = (event for frame in frames for event in frame)
    for event in (generated, forked):
        assert isinstance(event, Failed) and "formal" in event.message, event
