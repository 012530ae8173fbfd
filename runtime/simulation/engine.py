"""An engine without a model: the real scheduler and tree, on its own clock, by named policies."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from rootlace.runtime.cache.tier import Tier
from rootlace.runtime.config import CacheConfig, Eviction, Policy, SchedulerConfig
from rootlace.runtime.contracts.block_store import PASS, SAVE, Done, StoreState
from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest
from rootlace.runtime.contracts.plan import StepCost, StepPlan, StepResult
from rootlace.runtime.scheduler.admission import Headroom
from rootlace.runtime.scheduler.offload.levels import Level, Tiers
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.runtime.simulation.trace import FIRST_OUTPUT, Workload
from rootlace.wire.protocol import SamplingParams

UNBOUNDED = 1 << 60


class BadPolicy(ValueError):
    """Error of an unknown policy; the message lists the policies."""


class NamedPolicy(msgspec.Struct, frozen=True):
    """A policy of the scheduler with its bounds of overtaking and its eviction policy."""

    name: str
    policy: Policy
    max_overtaken: int
    max_delay: float
    eviction: Eviction


def parse_policy(text: str) -> NamedPolicy:
    """Parse a policy: `POLICY` has the scheduler's defaults; `POLICY-no-aging` lets requests be
    overtaken without bound; `POLICY:N` by at most N later requests; `POLICY:N:X` also by more that
    delay it by X of the work before it. `+EVICTION` at the end names an eviction policy other than
    the cache's default."""
    config = SchedulerConfig()
    order, plus, evicted = text.partition("+")
    evictions: dict[str, Eviction] = {name: name for name in get_args(Eviction)}
    eviction = evictions.get(evicted) if plus else CacheConfig().eviction
    for policy in get_args(Policy):
        limits = None
        match = re.fullmatch(r"(\w+):(\d+)(?::(\d+(?:\.\d+)?))?", order, re.ASCII)
        if order == policy:
            limits = config.max_overtaken, config.max_delay
        elif order == f"{policy}-no-aging" and policy != "fcfs":
            limits = UNBOUNDED, 0.0
        elif match is not None and match[1] == policy:
            limits = int(match[2]), float(match[3] or 0)
        if limits is not None and eviction is not None:
            return NamedPolicy(text, policy, *limits, eviction)
    known = ", ".join(policy.name for policy in all_policies())
    raise BadPolicy(
        f"there is no policy {text!r}; there are {known}, and "
        "POLICY:MAX_OVERTAKEN[:MAX_DELAY][+EVICTION]"
    )


def all_policies() -> list[NamedPolicy]:
    """Every order of scheduling, and every other eviction beside the default order."""
    names = [*get_args(Policy), *(f"{p}-no-aging" for p in get_args(Policy) if p != "fcfs")]
    order, default = SchedulerConfig().policy, CacheConfig().eviction
    names += [f"{order}+{name}" for name in get_args(Eviction) if name != default]
    return [parse_policy(name) for name in names]


# Below --------------------------------------------------------------------------------------------
#
# Level below a simulated pool: a disk, or memory beside a GPU. It simulates only times.


_ROOM = 8192
"""Tokens that may wait to be written."""


class Below(msgspec.Struct, frozen=True):
    """A level below the pool: `tokens` of room, and `token_seconds` to read or write a token."""

    name: str
    tokens: int
    token_seconds: float


class TimedStore(StoreState):
    """See `StoreState`. Blocks are read and written one after the other, at one speed; the clock
    says what is done."""

    writable_slots = 0

    def __init__(
        self, slots: int, writable_slots: int, seconds: float, clock: Callable[[], float]
    ) -> None:
        self.num_slots = slots
        self.writable_slots = writable_slots
        self._seconds = seconds
        self._clock = clock
        self._under_way: deque[tuple[float, Done]] = deque()
        """When each is done."""

    @property
    def next_done(self) -> float:
        """When something is; inf: nothing is under way."""
        return self._under_way[0][0] if self._under_way else math.inf

    def reserve(self, slot: int, key: bytes) -> None:
        self.writable_slots -= 1

    def cancel(self, slot: int) -> None:
        self.writable_slots += 1

    def write(self, slot: int) -> None:
        """Start the write of a reserved slot."""
        self._begin(Done(slot, read=False, ok=True))

    def fetch(self, slot: int, key: bytes) -> None:
        self._begin(Done(slot, read=True, ok=True))

    def poll(self) -> list[Done]:
        now, done = self._clock(), list[Done]()
        while self.next_done <= now:
            done.append(self._under_way.popleft()[1])
            self.writable_slots += not done[-1].read
        return done

    def seconds(self, blocks: int) -> float:
        return self._seconds * blocks

    def _begin(self, done: Done) -> None:
        last = self._under_way[-1][0] if self._under_way else 0.0
        self._under_way.append((max(last, self._clock()) + self._seconds, done))


# Cost ---------------------------------------------------------------------------------------------
#
# Cost models of engines, and how long a simulated step takes by one.


class BadCost(ValueError):
    """A cost model that cannot be used; the message names the figure and the reason."""


_FOLDER = Path(__file__).parent / "costs"

DEFAULT_COST = "h200_8b_roofline"


def known_costs() -> list[str]:
    """Names of the built-in models."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def read_cost(name: str) -> StepCost:
    """Return the cost model of a name (`known_costs`) or of a JSON file; further keys are ignored.
    Raises BadCost, or OSError if the file cannot be read."""
    path = Path(name)
    if name in known_costs():
        path = _FOLDER / f"{name}.json"
    elif not path.is_file():
        known = ", ".join(known_costs())
        raise BadCost(f"{name} is neither a file nor a known cost model ({known})")
    try:
        cost = msgspec.json.decode(path.read_bytes(), type=StepCost)
    except msgspec.MsgspecError as error:
        raise BadCost(f"{path}: {error}") from error
    if not cost.step + cost.prefill:
        raise BadCost(f"{path}: a step must take time")
    return cost


class StepTimes(msgspec.Struct, frozen=True):
    """When each part of a step is ready, in seconds from its beginning."""

    total: float
    chunks: np.ndarray
    rows: np.ndarray
    steps: int
    """Steps of the engine that the simulated one stands for."""


def time_step(
    cost: StepCost,
    chunk_tokens: np.ndarray,
    chunk_ends: np.ndarray,
    row_tokens: np.ndarray,
    row_contexts: np.ndarray,
) -> StepTimes:
    """Return a simulated step: a run of as many engine steps as it takes.

    Chunks of `chunk_tokens` that end at position `chunk_ends` are computed one after the other in
    what decode rows leave of the budget; decode row i takes part in the first `row_tokens[i]` steps
    and has about `row_contexts[i]` tokens of context. Where every entry of `row_tokens` is 1 and
    the chunks fit the budget, this is one engine step and nothing is approximate. Otherwise the
    cost of decode rows is spread evenly over the run.
    """
    decoding = float(np.dot(row_tokens, cost.decode + cost.context * row_contexts))
    longest = int(row_tokens.max(initial=0))
    if not len(chunk_tokens):
        steps = max(longest, 1)
        total = cost.step * steps + decoding
        return StepTimes(total, np.empty(0), row_tokens * (total / steps), steps)
    step_tokens = max(cost.max_step_tokens - len(row_tokens), 1)
    computed = np.cumsum(chunk_tokens)
    spent = np.cumsum(chunk_tokens * (cost.prefill + cost.pair * (chunk_ends - chunk_tokens / 2)))
    needed = -(-computed // step_tokens)
    steps = max(int(needed[-1]), longest)
    tokens_by, spent_by = np.append(0, computed), np.append(0.0, spent)

    def until(step: np.ndarray) -> np.ndarray:
        """Seconds that the first `step` steps take."""
        prompts = np.interp(step * step_tokens, tokens_by, spent_by)
        return cost.step * step + decoding * (step / steps) + prompts

    total = float(until(np.array([steps]))[0])
    return StepTimes(total, until(needed), until(row_tokens), steps)


# Engine -------------------------------------------------------------------------------------------


BLOCK_TOKENS = CacheConfig().block_size

_TICK = 1e-7
"""Seconds that each reading of the clock adds: so requests admitted in one step have different,
ascending times."""

_NEVER = 1 << 60
STOP = 2**31 - 1
"""The unit that ends a request."""


class Machine(msgspec.Struct, frozen=True):
    """Hardware of a run: tokens of KV memory, rows, costs of steps, and the levels below the KV
    memory, the fastest first."""

    cache_tokens: int
    cost: StepCost
    max_running: int = 256
    below: tuple[Below, ...] = ()


class Times:
    """Times of each request's events in a run, on the run's clock (NaN: not yet), and the units of
    its prompt that were cached (-1: not yet)."""

    def __init__(self, count: int) -> None:
        self.admitted = np.full(count, np.nan)
        self.first = np.full(count, np.nan)
        self.decodes_from = np.full(count, np.nan)
        self.last = np.full(count, np.nan)
        self.cached = np.full(count, -1, np.int64)


class SimulatedEngine:
    """Takes requests of a workload by their numbers, and computes step by step.

    It computes nothing but times, and samples as many units per request as its output takes, the
    last of them `STOP`. A request's number is its seed. Its first unit, sampled where the prompt
    ends, is one token; each further one is `granularity` tokens, sampled in a step that stands for
    as many of the engine's (the last one: for what is left). There is no KV memory and nothing is
    verified, so simulating a step takes no longer where contexts are long.
    """

    def __init__(
        self, workload: Workload, policy: NamedPolicy, machine: Machine, times: Times
    ) -> None:
        size = workload.granularity
        self._workload = workload
        self._cost = machine.cost
        self._times = times
        self._last = workload.output_units - 1
        self.block = max(BLOCK_TOKENS // size, 1)
        """Units of a block."""
        blocks = max(machine.cache_tokens // (self.block * size), 1)
        fitting = workload.fitting(self.block * blocks)
        self.fits = np.zeros(len(workload), bool)
        """Which requests do: others must not be submitted."""
        self.fits[fitting] = True
        # A client asks for no more than the longest output of all: the scheduler does not learn
        # from `max_tokens` how long this one is.
        self._most_units = int(workload.output_units[fitting].max(initial=1))
        default = Headroom()
        self.now = 0.0
        block_tokens = self.block * size
        self._stores = [
            TimedStore(
                max(one.tokens // block_tokens, 1),
                max(_ROOM // block_tokens, 1),
                one.token_seconds * block_tokens,
                lambda: self.now,
            )
            for one in machine.below
        ]
        levels = tuple(
            Level(one.name, Tier(store.num_slots), store)
            for one, store in zip(machine.below, self._stores, strict=True)
        )
        each = machine.cost.prefill + machine.cost.step / machine.cost.max_step_tokens
        self.scheduler = Scheduler(
            SchedulerConfig(
                policy=policy.policy,
                max_overtaken=policy.max_overtaken,
                max_delay=policy.max_delay,
                # As many units here as tokens there: a simulated step stands for `granularity`
                # of the engine's.
                max_step_tokens=machine.cost.max_step_tokens,
                max_running=machine.max_running,
                max_waiting=_NEVER,
            ),
            CacheConfig(block_size=self.block, num_blocks=blocks, eviction=policy.eviction),
            _NEVER,
            self._read_clock,
            headroom=Headroom(default.least / size, default.most / size, default.decay**size),
            # Steps take no time before they are committed here, so none can be measured.
            tiers=Tiers(levels, prefill_seconds=lambda units: each * size * units),
        )
        self.busy = 0.0
        self.steps = 0
        self.begun: list[int] = []
        """Requests that had their first token in the last step."""

    def submit(self, number: int) -> None:
        """Request `number` has arrived, at the latest now."""
        workload = self._workload
        params = SamplingParams(max_tokens=self._most_units, stop_token_ids=(STOP,), seed=number)
        waited = self.now - float(workload.arrivals[number])
        request = EngineRequest(number, workload.prompt(number), params, emit_every=_NEVER)
        self.scheduler.add(request, waited=waited)

    def step(self) -> list[EngineOutput] | None:
        """Run one simulated step and move the clock to its end; return None if there is nothing to
        compute."""
        plan = self.scheduler.plan()
        # Saves are written from now on; finished reads are in the pool.
        for kind, at, slot, other in self.scheduler.kv.tiering.moves.take().tolist():
            if kind == SAVE:
                self._stores[at].write(slot)
            elif kind == PASS:
                self._stores[at + 1].write(other)
        if plan is None:
            return None
        samples = plan.samples
        requests = np.array([sample.params.seed for sample in samples], np.int64)
        made = np.array([len(sample.token_ids) - sample.prompt_len for sample in samples], np.int64)
        tokens = np.where(self._last[requests] == made, STOP, FIRST_OUTPUT + requests)
        result = StepResult(tokens.astype(np.int32), [None] * len(tokens), [])
        updates = self.scheduler.commit(plan, result)
        self._take(plan, requests, made, updates)
        return updates

    @property
    def next_read(self) -> float:
        """Time of the next end of a read or write for waiting requests; inf if no request waits."""
        waits = self._stores if self.scheduler.kv.tiering.waiting else []
        return min((store.next_done for store in waits), default=math.inf)

    @property
    def restored_units(self) -> int:
        """Units of prompts that were read from below the pool."""
        return self.scheduler.kv.tiering.fetching.restored_tokens

    def _read_clock(self) -> float:
        self.now += _TICK
        return self.now

    def _take(
        self, plan: StepPlan, requests: np.ndarray, made: np.ndarray, updates: list[EngineOutput]
    ) -> None:
        """Record a step's results and move the clock. The sampled rows belong to `requests`, which
        had `made` units of output."""
        times, size = self._times, self._workload.granularity
        for update in updates:
            if update.facts is not None:
                at = self._workload.arrivals[update.rid] + update.facts.queued
                times.admitted[update.rid] = at
                times.cached[update.rid] = update.facts.cached_tokens
        counts = np.diff(plan.row_start).astype(np.int64)
        sampled = np.array([sample.row for sample in plan.samples], np.int64)
        number_of = np.full(len(counts), -1, np.int64)  # of a chunk that was cut
        number_of[sampled] = requests
        made_of = np.zeros(len(counts), np.int64)
        made_of[sampled] = made
        # A sequence that comes back after a preemption has outputs and is prefilled all the same.
        rows = np.flatnonzero((made_of > 0) & (counts == 1))
        chunks = np.flatnonzero((made_of == 0) | (counts != 1))
        if len(chunks) > 1:
            # In order of admission; a cut one is the last of its step.
            prompts = number_of[chunks]
            admitted = np.where(prompts >= 0, times.admitted[prompts], np.inf)
            chunks = chunks[np.argsort(admitted, kind="stable")]
        decoding, prefilled = number_of[rows], number_of[chunks]
        left = self._workload.outputs[decoding] - 1 - (made_of[rows] - 1) * size
        tokens = np.minimum(left, size)
        contexts = np.multiply(plan.context_len, size, dtype=np.int64)
        took = time_step(
            self._cost, counts[chunks] * size, contexts[chunks], tokens, contexts[rows]
        )
        self.begun = []
        if len(chunks):
            complete = prefilled >= 0
            prefilled, ready = prefilled[complete], self.now + took.chunks[complete]
            # One that comes back after a preemption had its first token before.
            fresh = np.isnan(times.first[prefilled])
            times.first[prefilled[fresh]] = ready[fresh]
            times.decodes_from[prefilled[fresh]] = self.now + took.total
            self.begun = prefilled[fresh].tolist()
        if any(update.finish is not None for update in updates):
            if len(prefilled):
                times.last[prefilled] = ready
            times.last[decoding] = self.now + took.rows
        self.now += took.total
        self.busy += took.total
        self.steps += took.steps
