"""Tree, pool and scheduler against a brute-force model, driven at random.

The model of the cache is a list of token lists; that of the memory is the simulated executor's (it
looks at every slot that a row attends to); that of the output is what a request gets when alone.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rootlace.runtime.config import Eviction
from rootlace.runtime.contracts.messages import pin_id
from rootlace.runtime.scheduler.admission import Headroom
from rootlace.wire.errors import (
    ConstraintNotMet,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    PinRefused,
)
from rootlace.wire.protocol import SamplingParams
from rootlace.wire.sampling import PIN_SECONDS, Cache, Handling
from tests.scheduler.matchers import Script, Stepped
from tests.scheduler.world import World

VOCAB = 3
NAMESPACES = st.sampled_from(["", "", "tenant"])
PROGRAMS = st.sampled_from(["", "p", "q"])
SUFFIX = st.lists(st.integers(0, VOCAB - 1), max_size=9)


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class Machine(RuleBasedStateMachine):
    """State machine of a scheduler.

    `stored` lists, per namespace, the prefixes that must be cached while nothing was lost
    (`lossless`). `partial` lists prefixes that may also be cached: requests that were preempted and
    then aborted. With `overlap`, steps are planned while others run, in every interleaving.
    """

    block_size = 4
    overlap = False

    @initialize(
        blocks=st.sampled_from([6, 12, 40]),
        policy=st.sampled_from(["lpm", "fcfs", "dfs"]),
        step_tokens=st.sampled_from([3, 7, 64]),
        rows=st.sampled_from([2, 8]),
        overtaken=st.sampled_from([0, 3]),
        context=st.sampled_from([30, 200]),
        enabled=st.sampled_from([True, True, True, False]),
        eviction=st.sampled_from(get_args(Eviction)),
        reserve=st.sampled_from([0.0, 8.0]),
        pinned=st.sampled_from([0.3, 1.0]),
        automata=st.booleans(),
        telling=st.randoms(use_true_random=False),
    )
    def start(
        self, blocks, policy, step_tokens, rows, overtaken, context, enabled, eviction, reserve,
        pinned, automata, telling,
    ) -> None:  # fmt: skip
        self.telling = telling
        self.world = World(
            block_size=self.block_size,
            num_blocks=-(-4 * blocks // self.block_size),
            context_length=context,
            vocab_size=VOCAB,
            enabled=enabled,
            eviction=eviction,
            max_pinned=pinned,
            overlap=self.overlap,
            automata=automata,
            policy=policy,
            max_step_tokens=step_tokens,
            max_running=rows,
            max_overtaken=overtaken,
            max_delay=0.5,
            headroom=Headroom(least=0.0),
        )
        # With little headroom kept free, preemptions are frequent.
        self.world.scheduler._running.reserve = reserve
        self.enabled = enabled
        self.lossless = True
        self.stored: list[tuple[str, list[int]]] = []
        self.partial: list[tuple[str, list[int]]] = []
        self.counted: set[int] = set()
        self.pinned: dict[int, float] = {}
        """Requests that pin their prompts, and for how long."""

    # ------------------------------------------------------------ requests

    def submit(self, prompt: list[int], namespace: str, program: str, **params: object) -> None:
        """Submit a request. The intervals of its updates must not change its output."""
        every, seconds = self.telling.choice([(1, 0.0), (3, 0.0), (1, 0.02), (1, 1e9)])
        priority = self.telling.choice([0, 0, 1, -2])
        cache = params.pop("cache", Cache())
        try:
            rid = self.world.submit(
                prompt,
                namespace=namespace,
                program=program,
                emit_every=every,
                emit_seconds=seconds,
                handling=Handling(priority, cache=cache),
                **params,
            )
        except ContextLengthExceeded:
            pinned = self.world.scheduler.kv.retention.pins.blocks * self.block_size
            assert len(prompt) + pinned >= self.world.max_length - 1
        except PinRefused:
            assert cache.pin
        except InvalidRequest:
            assert cache.pin and not self.enabled
        else:
            if cache.pin:
                self.pinned[rid] = cache.ttl or PIN_SECONDS

    @rule(
        prompt=SUFFIX.filter(len),
        namespace=NAMESPACES,
        program=PROGRAMS,
        max_tokens=st.sampled_from([0, 1, 6, 40]),
        stop=st.booleans(),
        penalty=st.sampled_from([0.0, 0.0, 1.0]),
    )
    def submit_fresh(self, prompt, namespace, program, max_tokens, stop, penalty) -> None:
        self.submit(
            prompt,
            namespace,
            program,
            max_tokens=max_tokens,
            stop_token_ids=(1,) if stop else (),
            frequency_penalty=penalty,
        )

    @rule(
        prompt=SUFFIX.filter(len),
        copies=st.sampled_from([1, 1, 3]),
        seed=st.integers(0, 5),
        length=st.sampled_from([1, 5, 30]),
        forcing=st.sampled_from([0, 0, 3, 8]),
        hidden=st.sampled_from([0, 0, 5]),
        jump=st.booleans(),
        max_tokens=st.sampled_from([1, 6, 40]),
        min_tokens=st.sampled_from([0, 0, 3]),
        stop=st.booleans(),
        penalty=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
        logprobs=st.booleans(),
    )
    def automaton(
        self, prompt, copies, seed, length, forcing, hidden, jump, max_tokens, min_tokens, stop,
        penalty, logprobs,
    ) -> None:  # fmt: skip
        for _ in range(copies):
            self.submit(
                prompt,
                "",
                "",
                constrain=lambda: Stepped(seed, length, VOCAB, forcing, hidden),
                jump=jump,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                stop_token_ids=(1,) if stop else (),
                frequency_penalty=penalty,
                logprobs=logprobs,
                top_logprobs=2 if logprobs else 0,
            )

    @rule(
        prompt=SUFFIX.filter(len),
        copies=st.sampled_from([1, 1, 3]),
        seed=st.integers(0, 5),
        length=st.sampled_from([0, 1, 5, 30]),
        forcing=st.sampled_from([0, 5, 8, 10]),
        checking=st.booleans(),
        jump=st.sampled_from([True, True, False]),
        program=PROGRAMS,
        max_tokens=st.sampled_from([0, 1, 6, 40]),
        min_tokens=st.sampled_from([0, 0, 3]),
        stop=st.booleans(),
        logprobs=st.booleans(),
        scores=st.sampled_from([None, None, 0, 3]),
    )
    def constrain(
        self, prompt, copies, seed, length, forcing, checking, jump, program, max_tokens,
        min_tokens, stop, logprobs, scores,
    ) -> None:  # fmt: skip
        for _ in range(copies):
            try:
                self.submit(
                    prompt,
                    "",
                    program,
                    constrain=lambda: Script(seed, length, VOCAB, forcing, checking),
                    jump=jump,
                    max_tokens=max_tokens,
                    min_tokens=min(min_tokens, max_tokens),
                    stop_token_ids=(1,) if stop else (),
                    logprobs=logprobs,
                    top_logprobs=2 if logprobs else 0,
                    prompt_logprobs_from=scores,
                )
            except ConstraintNotMet:  # what is forced from the start is refused at once
                params = SamplingParams(
                    max_tokens=max_tokens,
                    min_tokens=min(min_tokens, max_tokens),
                    stop_token_ids=(1,) if stop else (),
                    seed=0,
                )
                cold = self.world.cold(
                    prompt, params, lambda: Script(seed, length, VOCAB, forcing, checking)
                )
                assert cold.code == "constraint_not_met"

    @rule(
        prompt=SUFFIX.filter(len),
        namespace=NAMESPACES,
        program=PROGRAMS,
        max_tokens=st.sampled_from([0, 1, 6]),
        pin=st.booleans(),
        ttl=st.sampled_from([None, 0.2, 50.0]),
    )
    def keep_for_some_time(self, prompt, namespace, program, max_tokens, pin, ttl) -> None:
        cache = Cache(pin, ttl)
        self.lossless = self.lossless and (pin or ttl is None)
        self.submit(prompt, namespace, program, max_tokens=max_tokens, cache=cache)

    @rule(seconds=st.sampled_from([0.1, 1.0, 100.0]))
    def wait(self, seconds) -> None:
        self.world.executor._host += seconds
        self.world.stats  # noqa: B018  (pins end when somebody looks)

    @precondition(lambda self: self.world.scheduler.kv.retention.pins.all())
    @rule(data=st.data())
    def unpin(self, data) -> None:
        pin = data.draw(st.sampled_from(self.world.scheduler.kv.retention.pins.all()))
        cache = self.world.scheduler.cache
        assert cache.unpin(pin.id) and not cache.unpin(pin.id)

    @rule(namespace=NAMESPACES)
    def forget_namespace(self, namespace) -> None:
        self.world.scheduler.cache.forget_namespace(namespace)
        self.lossless = False

    @precondition(lambda self: self.world.jobs)
    @rule(
        data=st.data(),
        suffixes=st.lists(SUFFIX, min_size=1, max_size=4),
        program=PROGRAMS,
        max_tokens=st.sampled_from([0, 1, 6]),
        scores=st.booleans(),
    )
    def fork(self, data, suffixes, program, max_tokens, scores) -> None:
        """Submit requests that continue an earlier one, or branch off it (turns and forks)."""
        job = self.world.jobs[data.draw(st.sampled_from(sorted(self.world.jobs)))]
        whole = job.prompt + job.output
        cut = data.draw(st.integers(1, len(whole)))
        for suffix in suffixes:
            prompt = whole[:cut] + suffix
            self.submit(
                prompt,
                job.namespace,
                program,
                max_tokens=max_tokens,
                min_tokens=min(max_tokens, 2),
                stop_token_ids=(0,),
                prompt_logprobs_from=cut if scores else None,
            )

    @precondition(lambda self: self.world.open_rids())
    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data, in_flight) -> None:
        rid = data.draw(st.sampled_from(self.world.open_rids()))
        scheduler = self.world.scheduler
        if in_flight and len(self.world.flights) < 2:
            self.world.launch()
        sequence = scheduler.by_rid.get(rid)
        if sequence is not None:
            job = self.world.jobs[rid]
            known = min(sequence.computed, sequence.length)
            self.keep(job.namespace, sequence.tokens[:known].tolist())
            self.partial.append((job.namespace, sequence.tokens[: sequence.length].tolist()))
        self.world.abort(rid)
        assert self.world.jobs[rid].finish is not None
        if not self.overlap:
            self.world.land()

    # ------------------------------------------------------------ the rest

    @rule(count=st.integers(1, 12))
    def step(self, count) -> None:
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.overlap and len(self.world.flights) < 2)
    @rule()
    def launch(self) -> None:
        self.world.launch()

    @precondition(lambda self: self.world.flights)
    @rule()
    def land(self) -> None:
        self.world.land()

    @rule()
    def fail(self) -> None:
        plan = self.world.fail(InternalError("injected"))
        if plan is not None:
            self.lossless = False

    @rule()
    def flush(self) -> None:
        self.world.scheduler.cache.flush()
        self.lossless = False

    @rule(program=PROGRAMS)
    def release_program(self, program) -> None:
        self.world.scheduler.cache.release_program(program)

    @rule(count=st.integers(1, 5))
    def evict(self, count) -> None:
        before = self.world.scheduler.kv.pool.evictable
        freed = self.world.scheduler.kv.tree.evict(count)
        assert freed >= min(count, before)
        self.lossless = self.lossless and not freed

    @precondition(lambda self: self.world.scheduler._running.sequences[1:])
    @rule(data=st.data())
    def preempt(self, data) -> None:
        victims = self.world.scheduler._running.sequences[1:]
        self.world.scheduler._running.preempt(data.draw(st.sampled_from(victims)))
        self.world.scheduler.check()

    @precondition(lambda self: not self.world.scheduler.has_work)
    @rule(data=st.data(), suffix=SUFFIX.filter(len), namespace=NAMESPACES)
    def solo(self, data, suffix, namespace) -> None:
        """Run a request alone: it finds exactly the cached tokens of the model."""
        known = [tokens for where, tokens in self.stored if where == namespace] or [[]]
        base = data.draw(st.sampled_from(known))
        prompt = base[: data.draw(st.integers(0, len(base)))] + suffix
        if len(prompt) >= self.world.max_length:
            return
        least, most = self.bounds(prompt, namespace)
        cached = self.world.run(prompt, 1, namespace=namespace).cached
        assert cached is not None and cached <= min(most, len(prompt) - 1)
        if not self.world.stats["evicted_blocks"]:
            assert cached >= min(least, len(prompt) - 1)

    # ------------------------------------------------------------ the model

    def keep(self, namespace: str, tokens: list[int]) -> None:
        if self.enabled and tokens:
            self.stored.append((namespace, tokens))

    def bounds(self, tokens: list[int], namespace: str) -> tuple[int, int]:
        """Return the least number of cached tokens, if nothing was lost, and the largest."""

        def longest(lists: list[tuple[str, list[int]]]) -> int:
            mine = [stored for where, stored in lists if where == namespace]
            return max((common(tokens, stored) for stored in mine), default=0)

        lossless = self.lossless and not self.world.stats["evicted_blocks"]
        least = longest(self.stored)
        return (least if lossless else 0), max(least, longest(self.partial))

    @invariant()
    def outputs_are_those_of_cold_requests(self) -> None:
        for rid, job in self.world.jobs.items():
            if rid in self.counted or job.finish is None:
                continue
            self.counted.add(rid)
            if job.fails() and job.updates[-1].code == PinRefused.code:
                assert rid in self.pinned and not job.output
            elif job.finish in ("stop", "length") or job.fails():
                self.world.expect_cold(job)
        for namespace, tokens in self.world.released:
            self.keep(namespace, tokens)
        self.world.released.clear()

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        """Every pin is whole, and is that of a request which asked for one."""
        kv = self.world.scheduler.kv
        asked = {}
        for rid in self.pinned:
            job = self.world.jobs[rid]
            asked[pin_id(job.namespace, np.array(job.prompt, np.int32))] = job
        for pin in kv.retention.pins.all():
            job = asked[pin.id]
            assert pin.tokens == len(job.prompt) == self.world.match(job.prompt, job.namespace)
        ids = {pin.id for pin in kv.retention.pins.all()}
        if not ids:
            assert kv.retention.pins.blocks == 0
            assert self.world.scheduler.has_work or kv.pool.available == kv.pool.num_blocks

    @invariant()
    def what_is_cached_is_what_was_computed(self) -> None:
        self.outputs_are_those_of_cold_requests()
        if self.world.scheduler.has_work:
            return
        for namespace, tokens in self.stored[-6:]:
            for probe in (tokens, [*tokens, 0, 1], [*tokens[:-1], (tokens[-1] + 1) % VOCAB]):
                for where in {namespace, ""}:
                    least, most = self.bounds(probe, where)
                    assert least <= self.world.match(probe, where) <= most

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.drain()
        self.outputs_are_those_of_cold_requests()
        assert all(job.finish is not None for job in self.world.jobs.values())
        self.world.expect_empty()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_machine(block_size: int, overlap: bool) -> None:
    name = f"Machine{block_size}" + "Overlapped" * overlap
    machine = type(name, (Machine,), {"block_size": block_size, "overlap": overlap})
    case = machine.TestCase
    case.settings = settings(
        max_examples=18,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case("runTest").runTest()
