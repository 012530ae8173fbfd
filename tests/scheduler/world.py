"""A scheduler over the simulated executor whose memory is verified, and what should come out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rootlace.errors import RootlaceError
from rootlace.protocol import SamplingParams
from rootlace.runtime.config import CacheConfig, SchedulerConfig
from rootlace.runtime.engine.simulated import SimulatedExecutor, history_hash
from rootlace.runtime.scheduler.plan import SampleRow, StepPlan
from rootlace.runtime.scheduler.request import Matcher, Request
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.scheduler.update import Update


@dataclass
class Job:
    prompt: list[int]
    params: SamplingParams
    namespace: str
    updates: list[Update] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return [token for update in self.updates for token in update.token_ids]

    @property
    def finish(self) -> str | None:
        return self.updates[-1].finish if self.updates else None

    @property
    def cached(self) -> int | None:
        values = [u.cached_tokens for u in self.updates if u.cached_tokens is not None]
        assert len(values) <= 1, "cached_tokens was told twice"
        return values[0] if values else None

    @property
    def stored(self) -> list[int]:
        """The tokens that had their KV computed, once finished by itself."""
        tokens = self.prompt + self.output
        return tokens[:-1] if self.output else tokens


class World:
    """Every invariant is checked after every action, every plan by the executor's memory."""

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 256,
        context_length: int = 1000,
        vocab_size: int = 100,
        enabled: bool = True,
        **config: Any,
    ) -> None:
        self.executor = SimulatedExecutor(
            num_blocks, block_size, context_length, vocab_size, verify=True
        )
        self.scheduler = Scheduler(
            SchedulerConfig(check_invariants=True, **config),
            CacheConfig(block_size=block_size, num_blocks=num_blocks, enabled=enabled),
            context_length,
            self.executor.clock,
            vocab_size=vocab_size,
        )
        self.max_length = min(context_length, num_blocks * block_size + 1)
        self.jobs: dict[int, Job] = {}

    # ------------------------------------------------------------ doing

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        namespace: str = "",
        program: str = "",
        matcher: Matcher | None = None,
        output: list[int] | None = None,
        **params: Any,
    ) -> int:
        rid = len(self.jobs)
        wanted = SamplingParams(max_tokens=max_tokens, seed=0, **params)
        ids = np.array(prompt, np.int32)
        before = None if output is None else np.array(output, np.int32)
        self.scheduler.add(Request(rid, ids, wanted, before, namespace, program, matcher))
        self.jobs[rid] = Job(list(prompt), wanted, namespace)
        return rid

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        self.take(self.scheduler.take_updates())
        if plan is not None:
            self.take(self.scheduler.commit(plan, self.executor.run(plan)))
        return plan

    def fail(self, error: RootlaceError) -> StepPlan | None:
        plan = self.scheduler.plan()
        self.take(self.scheduler.take_updates())
        if plan is not None:
            self.take(self.scheduler.fail(plan, error))
        return plan

    def abort(self, rid: int) -> None:
        update = self.scheduler.abort(rid)
        if update is not None:
            self.take([update])

    def take(self, updates: list[Update]) -> None:
        for update in updates:
            job = self.jobs[update.rid]
            assert job.finish is None, "an update after the last one"
            job.updates.append(update)

    def drain(self, limit: int = 20000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("no end")

    def run(self, prompt: list[int], max_tokens: int = 4, **more: Any) -> Job:
        """One request, alone or not, to its end."""
        rid = self.submit(prompt, max_tokens, **more)
        while self.jobs[rid].finish is None:
            self.step()
        return self.jobs[rid]

    # ------------------------------------------------------------ asking

    @property
    def stats(self) -> dict[str, int | float]:
        return self.scheduler.stats()

    def open_rids(self) -> list[int]:
        return [rid for rid, job in self.jobs.items() if job.finish is None]

    def match(self, tokens: list[int], namespace: str = "") -> int:
        return self.scheduler.kv.tree.match(namespace, np.array(tokens, np.int32))

    def expect_cold(self, job: Job) -> None:
        """The output is what the request would have got with nobody else there."""
        tokens, finish = self.cold(job.prompt, job.params)
        assert (job.output, job.finish) == (tokens, finish)

    def cold(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], str]:
        """Output and finish reason, from the definition of the simulated model alone."""
        tokens = list(prompt)
        while len(tokens) - len(prompt) < (params.max_tokens or 0):
            output = len(tokens) - len(prompt)
            if output and len(tokens) >= self.max_length:
                break
            banned = params.stop_token_ids if output < params.min_tokens else ()
            row = SampleRow(0, params, np.array(tokens), len(prompt), banned=banned)
            history = int(history_hash(np.array(tokens))[-1])
            tokens.append(self.executor.next_token(history, row))
            if tokens[-1] in params.stop_token_ids and not banned:
                return tokens[len(prompt) :], "stop"
        return tokens[len(prompt) :], "length"

    def expect_empty(self) -> None:
        """With nothing running, a flush gives every block back."""
        assert not self.scheduler.has_work
        self.scheduler.flush()
        stats = self.stats
        assert stats["blocks_free"] == stats["blocks_total"]
        assert stats["nodes"] == 0 and stats["tree_tokens"] == 0
