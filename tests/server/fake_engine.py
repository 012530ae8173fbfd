"""An engine without a model: scripted or pseudo-random tokens, pauses and faults on demand."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rootlace.runtime.contracts.messages import (
    EngineOutput,
    EngineRequest,
    Explain,
    GetPins,
    PinnedPrefix,
    Ready,
    ToEngine,
    TreeNode,
    TreePage,
    Unpin,
)
from rootlace.runtime.contracts.plan import TokenScores
from rootlace.wire.protocol import CacheReport, RequestFacts

Script = Callable[[EngineRequest], "list[int] | Exception"]


def score(context: tuple[int, ...]) -> float:
    """A log-probability for the last token of `context` that depends on all of it."""
    digest = hashlib.blake2b(repr(context).encode(), digest_size=4).digest()
    return float(np.float32(-(int.from_bytes(digest, "little") % 100_000) / 10_000 - 0.001))


def made_up_vector(ids: tuple[int, ...], pooling: str) -> np.ndarray:
    """Make up an embedding, float32 [3], of a whole prompt."""
    return np.array([score(ids), len(ids), len(pooling)], np.float32)


@dataclass
class Running:
    request: EngineRequest
    on_update: Callable[[EngineOutput], None]
    tokens: list[int]
    given: int = 0
    failure: Exception | None = None


@dataclass
class FakeEngine:
    """`script` says what a request generates; by default 8 pseudo-random tokens.

    With `paused` nothing happens until `step` is called; otherwise every turn of the event loop
    gives each request `tokens_per_step` tokens.
    """

    vocab_size: int
    context_length: int = 4096
    capacity_tokens: int = 65536
    script: Script | None = None
    paused: bool = False
    tokens_per_step: int = 1
    forced: frozenset[int] = frozenset()
    """Which places of every output count as forced."""
    accepted: frozenset[int] = frozenset()
    """Which ones came because they were predicted; as many did not come with each update."""
    adapters: tuple[str, ...] = ()
    healthy: bool = True
    submitted: list[EngineRequest] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    running: dict[int, Running] = field(default_factory=dict)
    explained: list[tuple[list[int], str, str]] = field(default_factory=list)
    flushes: int = 0
    _rid: int = 0
    _ticking: bool = False

    @property
    def info(self) -> Ready:
        return Ready(
            pid=0,
            num_blocks=self.capacity_tokens // 16,
            block_size=16,
            context_length=self.context_length,
            capacity_tokens=self.capacity_tokens,
            vocab_size=self.vocab_size,
            device="none",
            dtype="float32",
            hidden_size=3,
            adapters=self.adapters,
        )

    def next_rid(self) -> int:
        self._rid += 1
        return self._rid

    def submit(self, request: EngineRequest, on_update: Callable[[EngineOutput], None]) -> None:
        assert request.rid not in self.running
        assert request.params.n == 1 and request.params.max_tokens is not None
        assert request.params.seed is not None and request.params.stop == ()
        self.submitted.append(request)
        wanted: list[int] | Exception
        wanted = self.script(request) if self.script is not None else self._random(request)
        running = Running(request, on_update, [], len(request.output_ids))
        if isinstance(wanted, Exception):
            running.failure = wanted
        else:
            running.tokens = wanted[: request.params.max_tokens]
        self.running[request.rid] = running
        self._schedule()

    def abort(self, rids: Iterable[int]) -> None:
        for rid in list(rids):
            running = self.running.pop(rid, None)
            if running is not None:
                self.aborted.append(rid)
                running.on_update(EngineOutput(rid, finish="abort"))

    def release_program(self, program: str, wanted: bool = False) -> None:
        self.released.append(program)

    def forget_namespace(self, namespace: str) -> None:
        self.forgotten.append(namespace)

    def pause(self, paused: bool) -> None:
        self.paused = paused
        self._schedule()

    async def stop(self) -> None:
        self.abort(list(self.running))

    async def flush(self) -> None:
        await asyncio.sleep(0)
        self.flushes += 1

    async def ask(self, kind: Callable[..., ToEngine], *fields: Any) -> Any:
        if kind is GetPins:
            return (PinnedPrefix("p1", "", "", 5, 1, 60.0),)
        if kind is Unpin:
            return fields[0] == "p1"
        return await (self._explain if kind is Explain else self._tree)(*fields)

    async def _explain(
        self, token_ids: np.ndarray, namespace: str, adapter: str, scope: Literal["own", "all"]
    ) -> CacheReport:
        """Report half of any prompt as cached, with token 1 behind that half."""
        await asyncio.sleep(0)
        self.explained.append((token_ids.tolist(), namespace, scope))
        return made_up_report(token_ids)

    async def _tree(self, namespace: str | None, under: int, limit: int) -> TreePage:
        """Report a tree of one node: the prompt of the last request."""
        await asyncio.sleep(0)
        tokens = self.submitted[-1].token_ids.tolist()
        node = TreeNode(1, 0, namespace or "", "", 0, len(tokens), tuple(tokens))
        return TreePage((node,), True, 1, len(tokens))

    async def stats(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"submitted": len(self.submitted)}

    def step(self, rid: int | None = None) -> None:
        """Advance every request (or one)."""
        for running in [r for i, r in self.running.items() if rid is None or i == rid]:
            if running.request.rid in self.running:
                self._advance(running)

    # ------------------------------------------------------------ inside

    def _schedule(self) -> None:
        if not self.paused and not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if self.paused:
            return
        self.step()
        if self.running:
            self._schedule()

    def _advance(self, running: Running) -> None:
        request, params = running.request, running.request.params
        first = running.given == 0
        if running.failure is not None:
            del self.running[request.rid]
            code = getattr(running.failure, "code", "internal")
            update = EngineOutput(
                request.rid, finish="error", code=code, error=str(running.failure)
            )
            running.on_update(update)
            return
        new = running.tokens[running.given : running.given + self.tokens_per_step]
        finish, matched = None, None
        for i, token in enumerate(new):
            count = running.given + i + 1
            if token in params.stop_token_ids and count > params.min_tokens:
                new, finish, matched = new[: i + 1], "stop", token
                break
        forced = tuple(i for i in range(len(new)) if running.given + i in self.forced)
        accepted = tuple((i, 0) for i in range(len(new)) if running.given + i in self.accepted)
        running.given += len(new)
        if finish is None and running.given >= len(running.tokens):
            finish = "length"
        prompt = tuple(request.token_ids.tolist())
        start = params.prompt_logprobs_from if first else None
        update = EngineOutput(
            request.rid,
            token_ids=tuple(new),
            scores=_made_up(new) if params.logprobs else None,
            prompt_scores=None if start is None else _prompt_scores(prompt, start),
            prompt_targets=None if start is None else request.token_ids[start:],
            forced=forced,
            accepted=accepted,
            rejected=(len(accepted), 0, 0),
            facts=_facts(request, prompt) if first or finish else None,
            finish=finish,
            matched=matched,
            vector=None if request.pooling == "none" else made_up_vector(prompt, request.pooling),
        )
        if finish is not None:
            del self.running[request.rid]
        running.on_update(update)

    def _random(self, request: EngineRequest) -> list[int]:
        key = (request.token_ids.tobytes(), request.params.seed)
        digest = hashlib.blake2b(repr(key).encode()).digest()
        return [
            int.from_bytes(digest[i : i + 4], "little") % self.vocab_size for i in range(0, 32, 4)
        ]


def _facts(request: EngineRequest, prompt: Sequence[int]) -> RequestFacts:
    return RequestFacts(
        cached_tokens=len(prompt) // 2,
        queued=0.001,
        report=made_up_report(request.token_ids) if request.report else None,
        pin="p1" if request.handling.cache.pin is True else "",
    )


def made_up_report(prompt: np.ndarray) -> CacheReport:
    limit = len(prompt) - 1
    return CacheReport(limit // 2, limit, "differs", instead=(1,), continuations=1)


def _made_up(tokens: list[int]) -> TokenScores:
    """Make up log-probabilities: -0.5 for each token, as the best one."""
    values = np.full(len(tokens), -0.5, np.float32)
    return TokenScores(values, np.array(tokens, np.int32)[:, None], values[:, None])


def _prompt_scores(ids: tuple[int, ...], start: int) -> TokenScores:
    values = [score(ids[: i + 1]) for i in range(max(start, 1), len(ids))]
    none = np.empty((len(values), 0))
    return TokenScores(np.array(values, np.float32), none.astype(np.int32), none.astype(np.float32))
