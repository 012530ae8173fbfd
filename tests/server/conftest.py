"""Gateways over the fake engine, with the real tokenizers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.http.app import make_runner
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.session import Session
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.runtime.structured import GrammarCompiler
from rootlace.wire.protocol import Chunk, Event, Op, Welcome
from tests.server.fake_engine import FakeEngine
from tests.waiting import until

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
FOLDERS = {
    "qwen3": DATA / "tokenizers" / "qwen3",
    "gpt2": DATA / "tokenizers" / "gpt2",
    "stories3M": DATA / "models" / "stories3M",
}


def folder_of(name: str) -> Path:
    folder = FOLDERS[name]
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder


@cache
def load(name: str) -> Tokenizer:
    return Tokenizer.read(FolderSource(folder_of(name)))


@pytest.fixture(params=["stories3M", "gpt2", "qwen3"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load(request.param)


@pytest.fixture
def stories() -> Tokenizer:
    return load("stories3M")


@pytest.fixture(scope="session")
def compiler() -> GrammarCompiler:
    """Make a compiler for a vocabulary of one-byte tokens."""
    tokens = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = RawTokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return GrammarCompiler(tokenizer, eos_token_ids=[0])


@asynccontextmanager
async def served(tokenizer: Tokenizer) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield an HTTP client of a served gateway."""
    model, _ = make_model(tokenizer, eos=(2,))
    runner = make_runner(model)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession(address) as session:
        yield session
    await runner.cleanup()
    model.close()


@dataclass
class Client:
    """A session, with all events that it sent."""

    model: ServedModel
    engine: FakeEngine
    session: Session = field(init=False)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = Session(self.model, self.events.extend)

    def send(self, *ops: Op) -> None:
        self.session.handle(list(ops))

    def of(self, op: int) -> list[Event]:
        return [event for event in self.events if event.op == op]

    def terminal(self, op: int) -> Event | None:
        found = [e for e in self.of(op) if not isinstance(e, Chunk | Welcome)]
        assert len(found) <= 1, found
        return found[0] if found else None

    async def result(self, op: int) -> Event:
        for _ in range(1000):  # nearly every operation ends within this many turns of the loop
            if self.terminal(op) is not None:
                break
            await asyncio.sleep(0)
        else:
            await until(lambda: self.terminal(op) is not None)
        event = self.terminal(op)
        assert event is not None
        return event

    async def settle(self, turns: int = 50) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)


def make_model(
    tokenizer: Tokenizer,
    engine: FakeEngine | None = None,
    eos: Iterable[int] = (),
    **config: object,
) -> tuple[ServedModel, FakeEngine]:
    engine = engine or FakeEngine(tokenizer.vocab_size)
    settings = {"model": "some/model", "program_address": "", **config}
    gateway_config = GatewayConfig(**settings)  # type: ignore[arg-type]
    model = ServedModel(gateway_config, cast(Any, engine), tokenizer, ChatTemplate(None), eos)
    return model, engine


@pytest.fixture
def client(stories: Tokenizer) -> Callable[..., Client]:
    """Makes a client of a new gateway (stories3M's tokenizer, `</s>` ends a text)."""

    def make(**options: object) -> Client:
        model, engine = make_model(
            options.pop("tokenizer", stories),  # type: ignore[arg-type]
            options.pop("engine", None),  # type: ignore[arg-type]
            eos=(2,),
            **options,
        )
        return Client(model, engine)

    return make
