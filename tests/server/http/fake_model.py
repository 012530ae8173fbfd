"""A gateway of bytes and scripts: what HTTP needs of the real one, without tokenizer or engine.

Tokens are bytes (0-255), 256 begins a prompt (BOS), 257 ends an output. What is generated is
decided by `script(prompt text, sample index)`; a script may hold "⏸", where generation stands still
until the session is closed.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.contracts.messages import Ready
from rootlace.runtime.server.auth import Account, Asker, Keys
from rootlace.runtime.server.http import generation
from rootlace.runtime.server.sequence import OpenSequences
from rootlace.runtime.server.served_model import Deliveries
from rootlace.runtime.server.server_state import Drain
from rootlace.runtime.server.telemetry import Metrics
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.errors import InvalidRequest, RootlaceError, from_code
from rootlace.wire.protocol import (
    Append,
    CacheReport,
    ChatFormat,
    Chunk,
    Done,
    Event,
    Explain,
    Explained,
    Generate,
    Generated,
    ModelInfo,
    Op,
    Open,
    Output,
    Prefill,
    RequestFacts,
    Select,
    Selected,
    Text,
    TokenLogprob,
    Tokens,
    Usage,
)
from rootlace.wire.sampling import Handling

Emit = Callable[[Event], None]

BOS, EOS, VOCAB = 256, 257, 258
PAUSE = "⏸"


class FakeTokenizer:
    token_bytes = {i: bytes([i]) for i in range(256)}  # noqa: RUF012
    bos_ids = (BOS,)
    config = {"eos_token": "</s>"}  # noqa: RUF012

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def encode_pieces(
        self, pieces: list[Piece], previous: int | None = None, begin: bool = False
    ) -> list[int]:
        return self.encode("".join(piece.text for piece in pieces), begin)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id >= BOS

    def token_text(self, token_id: int) -> str:
        return "<s>" if token_id == BOS else self.decode([token_id])


class FakeChat:
    """`<role>content` per message; tools are listed first, and calls are written as in `call`."""

    call = "$%"
    source = "{{ messages }}{# 'tool' #}"
    format = ChatFormat()
    tool_use = None

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kw: Any,
    ) -> tuple[Text, ...]:
        self.last = {"messages": messages, "tools": tools, "kw": kw}
        self.told.append(kw)
        if messages[-1]["content"] == "refuse me":
            raise InvalidRequest("the template refuses")
        parts = [Text(f"[{t['function']['name']}]", special=True) for t in tools or ()]
        for message in messages:
            parts += [Text(f"<{message['role']}>", special=True), Text(message["content"])]
            for made in message.get("tool_calls", ()):
                function = made["function"]
                arguments = json.dumps(function["arguments"])
                parts.append(Text(self.call.replace("$", function["name"]).replace("%", arguments)))
        if add_generation_prompt:
            parts.append(Text("<assistant>", special=True))
        return tuple(parts)


class FakeSequence:
    def __init__(self, session: FakeSession) -> None:
        self.session = session
        self.ids: list[int] = []
        self.stopped = asyncio.Event()
        self.stop: Callable[[], None] | None = None

    def check_handling(self, handling: Handling) -> None:
        pass


class FakeSession:
    """Stands for the sequences of an HTTP request; lists their operations in `ops`."""

    def __init__(self, model: FakeModel, end: Callable[[RootlaceError], None]) -> None:
        self._model = model
        self.end = end
        self.ops: list[Op] = []
        self.closed = False

    def begin(
        self, namespace: str = "", adapter: str = "", share: bool = True, program: str = ""
    ) -> FakeSequence:
        self.ops.append(
            Open(0, 0, namespace=namespace, adapter=adapter, share=share, program=program)
        )
        return FakeSequence(self)

    def release(self, sequence: FakeSequence) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    async def perform(
        self, op: Append | Prefill | Generate | Select | Explain, sequence: FakeSequence, emit: Emit
    ) -> Event:
        ids = sequence.ids
        match op:
            case Append():
                for part in op.parts:
                    if isinstance(part, Tokens):
                        ids += part.ids
                    elif isinstance(part, Text):
                        if not ids and not part.special:
                            ids.append(BOS)
                        ids += part.text.encode()
                return Done(op.op)
            case Prefill():
                # The first half of each prompt is known.
                return Done(op.op, Usage(prompt_tokens=len(ids), cached_tokens=len(ids) // 2))
            case Select():
                # The more often the prompt holds a choice, the likelier it is.
                text = self._model.tokenizer.decode(ids)
                found = tuple(float(text.count(choice) - 9) for choice in op.choices)
                best = found.index(max(found))
                usage = Usage(prompt_tokens=len(ids))
                return Selected(op.op, op.choices[best], best, found, usage)
            case Explain():
                return Explained(op.op, self._model.report or CacheReport(0, 1, "new"))
            case Generate():
                return await self._generate(op, sequence, emit)

    async def _generate(self, op: Generate, sequence: FakeSequence, emit: Emit) -> Generated:
        prompt = sequence.ids
        sequence.stop = sequence.stopped.set
        if self._model.fail is not None:
            raise from_code(self._model.fail.code, str(self._model.fail))
        text = self._model.tokenizer.decode(prompt)
        if "boom" in text:
            raise from_code("context_length_exceeded", "the prompt is too long")
        outputs = []
        for index in range(op.params.n):
            outputs.append(await self._sample(op, index, text, sequence, emit))
        params = op.params
        scored: tuple[TokenLogprob, ...] = ()
        if params.prompt_logprobs_from is not None:
            scored = tuple(
                _score(token, params.top_logprobs, first=i == 0) for i, token in enumerate(prompt)
            )[params.prompt_logprobs_from :]
        usage = Usage(
            prompt_tokens=len(prompt),
            cached_tokens=len(prompt) // 2,
            completion_tokens=sum(len(output.token_ids) for output in outputs),
            forced_tokens=sum(output.forced_tokens for output in outputs),
            accepted=len(op.prediction),
            rejected=params.n if op.prediction else 0,
        )
        report = self._model.report if op.cache_report else None
        pin = "p1" if op.handling.cache.pin else ""
        result = Generated(op.op, tuple(outputs), usage, prompt_logprobs=scored)
        return msgspec.structs.replace(result, facts=RequestFacts(report=report, pin=pin))

    async def _sample(
        self, op: Generate, index: int, prompt: str, sequence: FakeSequence, emit: Emit
    ) -> Output:
        params = op.params
        said: list[int] = []
        finish, matched = "stop", EOS
        for char in self._model.script(prompt, index):
            if params.max_tokens is not None and len(said) >= params.max_tokens:
                finish, matched = "length", None
                break
            if char == PAUSE:
                await sequence.stopped.wait()
                finish, matched = "abort", None
                break
            if char in params.stop:
                matched = char
                break
            ids = list(char.encode())
            said += ids
            logprobs = tuple(_score(i, params.top_logprobs) for i in ids) if params.logprobs else ()
            if op.stream:
                first = op.tell_cached and len(said) == len(ids) and index == 0
                about = (len(sequence.ids) // 2, len(sequence.ids)) if first else ()
                emit(Chunk(op.op, index, char, tuple(ids), logprobs, *about))
                await asyncio.sleep(0)
            self._model.generated += 1
        scores = tuple(_score(i, params.top_logprobs) for i in said) if params.logprobs else ()
        text = self._model.tokenizer.decode(said)
        forced = self._model.forced
        return Output(text, tuple(said), finish, matched, scores, forced)  # type: ignore[arg-type]


def _score(token: int, top: int, first: bool = False) -> TokenLogprob:
    def text_of(token: int) -> str:
        return "<s>" if token >= BOS else bytes([token]).decode(errors="replace")

    text = text_of(token)
    best = tuple((token + k, -float(k) - 0.5, text_of(token + k)) for k in range(top))
    return TokenLogprob(token, text, None if first else -0.5, () if first else best)


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Replace computing by made-up results for a `FakeGateway`; leave a real gateway as it is."""

    def open_(model: Any, end: Any, asker: Asker, stays_wanted: bool = False) -> Any:
        if not isinstance(model, FakeModel):
            return OpenSequences(model, end, asker, stays_wanted)
        model.sessions.append(FakeSession(model, end))
        model.accounts.append(asker.account)
        model.sources.append(asker.source)
        return model.sessions[-1]

    def done(real: Callable[..., Any]) -> Callable[..., Any]:
        def do(model: Any, sequence: Any, op: Any, emit: Emit = lambda event: None) -> Any:
            if not isinstance(model, FakeModel):
                return real(model, sequence, op)
            sequence.session.ops.append(op)
            return sequence.session.perform(op, sequence, emit)

        return do

    def run_of(real: Callable[..., Any]) -> Callable[..., Any]:
        def make(model: Any, *more: Any) -> Any:
            if not isinstance(model, FakeModel):
                return real(model, *more)
            return SimpleNamespace(run=lambda: done(real)(model, *more))

        return make

    patch.setattr(generation, "OpenSequences", open_)
    for name in ("append", "prefill", "explain"):
        patch.setattr(generation, name, done(getattr(generation, name)))
    for name in ("Generation", "Selection"):
        patch.setattr(generation, name, run_of(getattr(generation, name)))


class FakeModel:
    def __init__(self, **config: Any) -> None:
        self.config = GatewayConfig(model="/models/fake", program_address="inproc://x", **config)
        self.model_info = ModelInfo("fake", "/models/fake", 1000, VOCAB, 5000, 16)
        self.engine = SimpleNamespace(
            info=Ready(1, 10, 16, 1000, 5000, VOCAB, device="cpu", dtype="float32", hidden_size=8)
        )
        self.server_state = SimpleNamespace(program_address="tcp://127.0.0.1:1")
        self.tokenizer = FakeTokenizer()
        self.chat = FakeChat()
        self.healthy = True
        self.metrics = Metrics()
        self.keys = Keys(self.config.api_key, self.config.keys_file, self.metrics.key_used)
        self.drain = Drain()
        self.spans = None
        self.deliveries = Deliveries()
        self.last_token = -math.inf
        self.fail: RootlaceError | None = None
        self.report: CacheReport | None = None  # cache report for prompts that ask for one
        self.sessions: list[FakeSession] = []
        self.accounts: list[Account | None] = []  # the account of each session
        self.sources: list[str] = []  # the client address of each session
        self.flushed = 0
        self.generated = 0
        self.forced = 0  # forced tokens that each sample reports
        self.script: Callable[[str, int], str] = lambda prompt, index: "hello"[index:]

    async def tokenize(self, characters: int, call: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    def shown_path(self, account: Account | None) -> str:
        return self.model_info.path if account is None else self.model_info.name

    async def status(self, account: Account | None = None) -> dict[str, Any]:
        return {"running": 0, "blocks_total": 10}

    async def flush(self) -> None:
        self.flushed += 1

    @property
    def last_generate(self) -> Generate:
        ops = self.sessions[-1].ops
        return next(op for op in ops if isinstance(op, Generate))

    @property
    def last_parts(self) -> tuple[Any, ...]:
        return next(op for op in self.sessions[-1].ops if isinstance(op, Append)).parts
