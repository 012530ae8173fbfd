"""The engine's loop: receive, plan, run, commit, send."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from rootlace.runtime.constrained import Grammar
from rootlace.runtime.contracts import messages
from rootlace.runtime.contracts.messages import (
    Abort,
    Flush,
    Flushed,
    GetStats,
    Heartbeat,
    ReleaseProgram,
    Stats,
    Stop,
    Submit,
    ToEngine,
    TokenScore,
    unpack_ids,
)
from rootlace.runtime.contracts.plan import Executor, TokenScores
from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.engine.compiling import Compiler, CompilingRequests
from rootlace.runtime.engine.steps import Steps
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.errors import (
    InternalError,
    InvalidConstraint,
    InvalidRequest,
    Overloaded,
    RootlaceError,
)

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
COMPILING_SECONDS = 0.005
"""How long messages may lie while the loop has nothing to do but wait for a compilation."""


class EngineLoop:
    """Owns the scheduler and the executor; single-threaded.

    `receive(timeout_ms)` returns the messages that are there (waiting at most that long for a
    first one), `send` takes what there is to say. `compiler` compiles constraints on threads of its
    own; a request waits for its grammar aside, while others go on. `jump_forward` allows what a
    constraint forces to be appended without sampling, where the constraint allows it, too.
    `overlap`: see `Steps`. `prepare` is called while there is no work, as long as it says that it
    did something for the work to come; it should return soon. `executor_stats` adds to `stats`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        compiler: Compiler,
        receive: Callable[[int], list[ToEngine]],
        send: Callable[[list[messages.FromEngine]], None],
        jump_forward: bool = True,
        overlap: bool = False,
        *,
        prepare: Callable[[], bool] = lambda: False,
        executor_stats: Callable[[], dict[str, int | float]] = dict,
    ) -> None:
        self._scheduler = scheduler
        self._steps = Steps(scheduler, executor, overlap, self._tell)
        self._compiler = compiler
        self._compiling = CompilingRequests(compiler)
        self._jump_forward = jump_forward
        self._prepare = prepare
        self._executor_stats = executor_stats
        self._receive = receive
        self._send = send
        self._outgoing: list[messages.FromEngine] = []
        self._first_tokens: dict[int, int] = {}
        """Requests whose prompt is scored from its first token on, which has no log-probability."""
        self._beat = 0.0
        self._stopping = False

    def run(self) -> None:
        """Until a `Stop` comes."""
        idle_ms = int(HEARTBEAT_SECONDS * 1000)
        while not self._stopping:
            # With work to do, only look; without, sleep until something comes or a beat is due.
            idle = not self._scheduler.has_work
            if idle and len(self._compiling):
                self._compiling.wait(COMPILING_SECONDS)
                idle = False
            wait = idle and not self._prepare()
            for message in self._receive(idle_ms if wait else 0):
                self._handle(message)
            for waiting in self._compiling.take():
                self._add(waiting.message, waiting.grammar.result, waiting.waited)
            self._report(self._steps.step())
            self._say()
        self._report(self._steps.finish())
        self._say()

    # ------------------------------------------------------------ what there is to say

    def _report(self, updates: list[Update]) -> None:
        for update in updates:
            # The first update of such a request comes with its last prompt chunk.
            first = self._first_tokens.pop(update.rid, None)
            self._outgoing.append(_to_wire(update, first))

    def _tell(self, updates: list[Update]) -> None:
        """Send news at once, in the middle of a step."""
        self._report(updates)
        self._say()

    def _say(self) -> None:
        now = time.monotonic()
        if now - self._beat >= HEARTBEAT_SECONDS:
            self._beat = now
            self._outgoing.append(Heartbeat(self._steps.count))
        if self._outgoing:
            self._send(self._outgoing)
            self._outgoing = []

    # ------------------------------------------------------------ messages

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            for rid in message.rids:
                if self._compiling.remove(rid):
                    update: Update | None = Update(rid, finish="abort")
                else:
                    update = self._scheduler.abort(rid)
                if update is not None:
                    self._report([update])
        elif isinstance(message, ReleaseProgram):
            self._scheduler.release_program(message.program)
        elif isinstance(message, Flush):
            self._scheduler.flush()
            self._outgoing.append(Flushed(message.ticket))
        elif isinstance(message, GetStats):
            self._outgoing.append(Stats(message.ticket, self.stats()))
        else:
            assert isinstance(message, Stop)
            self._stopping = True

    def _submit(self, message: Submit) -> None:
        constraint = message.constraint
        if message.rid in self._compiling:
            self._refuse(message.rid, InvalidRequest(f"request id {message.rid} is in use"))
            return
        if constraint is None:
            self._add(message, None)
            return
        grammar = self._compiler.cached(constraint)
        if grammar is not None:
            self._add(message, lambda: grammar)
        elif len(self._compiling) >= self._scheduler.config.max_waiting:
            count = len(self._compiling)
            self._refuse(message.rid, Overloaded(f"{count} constraints are being compiled"))
        else:
            self._compiling.add(message)

    def _add(
        self, message: Submit, grammar: Callable[[], Grammar] | None, waited: float = 0.0
    ) -> None:
        """Give the request to the scheduler; what `grammar` raises ends it alone."""
        try:
            request = self._request(message, None if grammar is None else grammar(), waited)
            self._scheduler.add(request)
            if message.params.prompt_logprobs_from == 0 and not message.output_ids:
                self._first_tokens[message.rid] = int(unpack_ids(message.token_ids)[0])
        except RootlaceError as error:
            self._refuse(message.rid, error)
        except Exception as error:
            log.exception("request %d could not be added", message.rid)
            self._refuse(message.rid, InternalError(repr(error)))

    def _refuse(self, rid: int, error: RootlaceError) -> None:
        self._outgoing.append(
            messages.Update(rid, finish="error", code=error.code, error=str(error))
        )

    def _request(self, message: Submit, grammar: Grammar | None, waited: float) -> Request:
        output = unpack_ids(message.output_ids) if message.output_ids else None
        matcher = None if grammar is None else grammar.matcher()
        if matcher is not None and output is not None:
            for token in output.tolist():
                if not matcher.advance(token):
                    raise InvalidConstraint("the tokens to resume from violate the constraint")
        constraint = message.constraint
        jumps = constraint is not None and constraint.jump_forward != "off"
        return Request(
            rid=message.rid,
            token_ids=unpack_ids(message.token_ids),
            params=message.params,
            output_ids=output,
            namespace=message.namespace,
            program=message.program,
            matcher=matcher,
            jump_forward=jumps and self._jump_forward,
            waited=waited,
            emit_every=message.emit_every,
            emit_seconds=message.emit_seconds,
        )

    def stats(self) -> dict[str, int | float]:
        """The scheduler's counters, where the loop's seconds went, and the executor's counters."""
        counters = self._scheduler.stats()
        return {
            **counters,
            "waiting": counters["waiting"] + len(self._compiling),
            "compiling": len(self._compiling),
            "engine_busy_seconds": self._steps.busy,
            "engine_model_seconds": self._steps.waited,
            **self._executor_stats(),
        }


def _to_wire(update: Update, first_token: int | None) -> messages.Update:
    if update.cached_tokens is None and update.finish is None and first_token is None:
        # As most are: neither the first nor the last of a request.
        scored = () if update.scores is None else _token_scores(update.token_ids, update.scores)
        return messages.Update(update.rid, update.token_ids, scored, forced=update.forced)
    scores: tuple[TokenScore, ...] = ()
    if update.scores is not None:
        scores = _token_scores(update.token_ids, update.scores)
    prompt: tuple[TokenScore, ...] = ()
    if update.prompt_scores is not None:
        assert update.prompt_targets is not None
        prompt = _token_scores(update.prompt_targets.tolist(), update.prompt_scores)
    if first_token is not None:
        prompt = (TokenScore(first_token, None), *prompt)
    return messages.Update(
        rid=update.rid,
        token_ids=update.token_ids,
        scores=scores,
        prompt_scores=prompt,
        cached_tokens=update.cached_tokens,
        forced=update.forced,
        queued=update.queued,
        finish=update.finish,
        matched=update.matched,
        code=update.code,
        error=update.error,
    )


def _token_scores(token_ids: Sequence[int], scores: TokenScores) -> tuple[TokenScore, ...]:
    top_ids = scores.top_ids.tolist()
    top_logprobs = scores.top_logprobs.tolist()
    return tuple(
        TokenScore(token, logprob, tuple(zip(top_ids[i], top_logprobs[i], strict=True)))
        for i, (token, logprob) in enumerate(zip(token_ids, scores.logprobs.tolist(), strict=True))
    )
