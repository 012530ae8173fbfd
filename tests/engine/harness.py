"""Drives a scheduler and an executor without processes, as the engine's loop does."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rootlace.runtime.config import CacheConfig, ConstraintConfig, SchedulerConfig
from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest, Pooling, TokenScore
from rootlace.runtime.contracts.plan import Executor
from rootlace.runtime.engine.constraints import LateCompiler
from rootlace.runtime.engine.core import Steps
from rootlace.runtime.scheduler.masks import SPOT_SECONDS, MaskThreads, StepMasks
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.sandbox import CompileService
from rootlace.wire.protocol import SamplingParams


def compiling_with(compiler: GrammarCompiler) -> LateCompiler:
    """Return the compiler that an engine uses once a constraint has come."""
    late = LateCompiler(None, ConstraintConfig())  # type: ignore[arg-type]
    late._service = CompileService(compiler, ConstraintConfig())
    return late


@dataclass
class Outcome:
    """Outcome of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    """Indices of the tokens that were not sampled."""
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    prompt: list[TokenScore] = field(default_factory=list)
    """Requested scores of the prompt's tokens."""
    cached_tokens: int = 0
    vector: np.ndarray | None = None
    finish: str | None = None
    error: str = ""

    def add(self, update: EngineOutput) -> None:
        assert self.finish is None, "an update after the final one"
        self.forced.extend(len(self.token_ids) + at for at in update.forced)
        self.token_ids.extend(update.token_ids)
        if update.scores is not None:
            self.logprobs.extend(update.scores.logprobs.tolist())
            top_ids, top = update.scores.top_ids.tolist(), update.scores.top_logprobs.tolist()
            self.top.extend(zip(top_ids, top, strict=True))
        self.prompt += update.prompt_token_scores()
        if update.facts is not None:
            self.cached_tokens = update.facts.cached_tokens
        self.vector = update.vector
        self.finish = update.finish
        self.error = update.error


class Harness:
    """Scheduler over an executor; every invariant is checked after every step. With `overlap`, the
    steps are the engine's own: faults of the executor end requests."""

    def __init__(
        self,
        executor: Executor,
        *,
        block_size: int,
        num_blocks: int | None = None,
        max_step_tokens: int = 512,
        max_running: int = 64,
        enabled: bool = True,
        labels: int | None = None,
        filler: MaskThreads | None = None,
        overlap: bool = False,
        automata: bool = False,
        spot_seconds: float = SPOT_SECONDS,
        speculation_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
        drafts: bool = True,
    ) -> None:
        self.executor = executor
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_step_tokens=max_step_tokens,
                max_running=max_running,
                check_invariants=True,
                speculation_tokens=speculation_tokens,
            ),
            CacheConfig(
                block_size=block_size,
                num_blocks=executor.num_blocks if num_blocks is None else num_blocks,
                enabled=enabled,
            ),
            executor.context_length,
            clock,
            vocab_size=executor.vocab_size,
            masks=StepMasks(executor.vocab_size, filler, spot_seconds, math.inf),
            automata=automata,
            labels=labels,
            adapters=getattr(executor, "adapters", ()),
            draft_model=getattr(executor, "draft", None) if drafts else None,
        )
        self.steps = Steps(self.scheduler, executor, overlap, self.take) if overlap else None
        self.outcomes: dict[int, Outcome] = {}

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        program: str = "",
        *,
        matcher: Matcher | None = None,
        jump: bool = False,
        output: list[int] | None = None,
        pooling: Pooling = "none",
        adapter: str = "",
        prediction: list[int] | None = None,
    ) -> int:
        """`matcher` is at its beginning; it takes `output`, what was generated before, in."""
        rid = len(self.outcomes)
        self.outcomes[rid] = Outcome()
        for token in output or [] if matcher is not None else []:
            assert matcher is not None and matcher.advance(token)
        request = EngineRequest(
            rid=rid,
            token_ids=np.asarray(prompt, dtype=np.int32),
            params=params,
            output_ids=np.array(output or [], np.int32),
            program=program,
            pooling=pooling,
            adapter=adapter,
            prediction=np.array(prediction or [], np.int32),
        )
        self.scheduler.add(request, matcher, jump_forward=jump)
        return rid

    def step(self) -> None:
        if self.steps is not None:
            updates = self.steps.step()
        else:
            plan = self.scheduler.plan()
            updates = self.scheduler.take_updates()
            if plan is not None:
                updates += self.scheduler.commit(
                    plan, self.executor.collect(self.executor.launch(plan))
                )
        self.take(updates)

    def take(self, updates: list[EngineOutput]) -> None:
        for update in updates:
            self.outcomes[update.rid].add(update)

    def finish(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")


def greedy(max_tokens: int, **extra: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, **extra)  # type: ignore[arg-type]
