"""Clients whose server goes away and comes back, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from rootlace.client.connection import Connection
from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.runtime.server.programs import ProgramServer
from rootlace.runtime.server.session_store import SessionStore
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.protocol import (
    Append,
    Chunk,
    Event,
    Failed,
    Generate,
    Generated,
    Op,
    Open,
    SamplingParams,
    Text,
)
from tests.server.conftest import make_model
from tests.server.fake_engine import FakeEngine
from tests.waiting import until


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.read(FolderSource(demo_model))


@asynccontextmanager
async def server(tokenizer: Tokenizer, folder: Path, state: bool) -> AsyncIterator[FakeEngine]:
    """Run a server whose engine waits to be stepped."""
    engine = FakeEngine(tokenizer.vocab_size, paused=True)
    model, _ = make_model(tokenizer, engine, program_address=f"ipc://{folder}/programs")
    store = SessionStore(folder / "state") if state else None
    programs = ProgramServer(model, store)
    programs.start()
    yield engine
    await programs.stop()
    model.close()
    if store is not None:
        store.close()


class Client:
    """The product's connection, and the events that it received."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.events: list[Event] = []

    @classmethod
    async def to(cls, folder: Path, patience: float = 300.0) -> Client:
        make = partial(Connection, f"ipc://{folder}/programs", patience=patience)
        return cls(await asyncio.to_thread(make))

    def send(self, *ops: Op) -> None:
        for op in ops:
            self.connection.send(op, self.events.append)

    def end(self, op: int) -> Event | None:
        ended = [e for e in self.events if e.op == op and not isinstance(e, Chunk)]
        assert len(ended) < 2
        return ended[0] if ended else None


PROGRAM = (
    Open(1, 1),
    Append(2, 1, (Text("Once"),)),
    Generate(3, 1, params=SamplingParams(max_tokens=6, seed=3), stream=True),
)


async def test_a_stream_goes_on_when_its_server_is_back(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with server(tokenizer, tmp_path, state=True) as engine:
        client = await Client.to(tmp_path)
        client.send(*PROGRAM)
        await until(lambda: bool(engine.running))
        engine.step()
        engine.step()
        await until(lambda: sum(isinstance(e, Chunk) for e in client.events) == 2)
    await asyncio.sleep(0.3)  # no server answers meanwhile
    assert client.connection.lost is None
    async with server(tokenizer, tmp_path, state=True) as engine:
        await until(lambda: bool(engine.running))
        (again,) = engine.submitted
        assert len(again.output_ids) == 2 and again.resumed
        while engine.running:
            engine.step()
        await until(lambda: client.end(3) is not None)
        ended = client.end(3)
        assert isinstance(ended, Generated)
        chunks = [e for e in client.events if isinstance(e, Chunk)]
        assert "".join(chunk.text for chunk in chunks) == ended.outputs[0].text
        assert sum((chunk.token_ids for chunk in chunks), ()) == ended.outputs[0].token_ids
        await asyncio.to_thread(client.connection.close)


async def test_patience_with_a_server_that_answers_nothing_ends(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A client stops resending to servers that die: its message may be what kills them."""
    client: Client | None = None
    for _ in range(50):
        async with server(tokenizer, tmp_path, state=True) as engine:
            if client is None:
                client = await Client.to(tmp_path, patience=0.5)
                client.send(*PROGRAM)
            lives = client.connection
            await until(lambda: bool(engine.running or lives.lost))  # noqa: B023
        if lives.lost is not None:
            break
    assert client is not None
    assert isinstance(client.end(3), Failed)


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, False), (False, True)])
async def test_what_is_not_kept_is_lost_with_an_error_that_says_so(
    tokenizer: Tokenizer, tmp_path: Path, before: bool, after: bool
) -> None:
    async with server(tokenizer, tmp_path, state=before) as engine:
        client = await Client.to(tmp_path)
        client.send(*PROGRAM)
        await until(lambda: bool(engine.running))
    async with server(tokenizer, tmp_path, state=after):
        await until(lambda: client.end(3) is not None)
        failed = client.end(3)
        assert isinstance(failed, Failed)
        assert failed.code == ("state_lost" if before else "unavailable")
        assert "--state" in failed.message
        await asyncio.to_thread(client.connection.close)


async def test_names_of_programs_do_not_tell_the_name_of_the_session(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Cache reports show programs' names to others, who could continue a session by its name."""
    async with server(tokenizer, tmp_path, state=True):
        client = await Client.to(tmp_path)
        assert client.connection._session not in client.connection.next_program()
        await asyncio.to_thread(client.connection.close)
