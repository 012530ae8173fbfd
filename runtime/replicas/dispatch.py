"""Which engine has which request, and which one is to have the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from rootlace.runtime.cache.journal import Change
from rootlace.runtime.contracts.messages import (
    CacheChanged,
    CostMeasured,
    EngineOutput,
    EngineRequest,
    Ready,
    kv_namespace,
    kv_space,
)
from rootlace.runtime.contracts.plan import PRIOR, StepCost, mean_cost
from rootlace.runtime.routing.router import Router, RouterConfig

# Hearing ------------------------------------------------------------------------------------------
#
# Reports of engines about their caches, checked for lost messages.


_PATIENCE = 64
"""Ignored changes after which the gateway asks an engine again for its whole cache."""


class Hearing:
    """Receiver of one engine's cache reports, passed on in their order. After a missing change, it
    asks for the engine's whole cache, and passes nothing on until the answer."""

    def __init__(self, ask: Callable[[], None], heard: Callable[[CacheChanged], None]) -> None:
        self._ask = ask
        self._heard = heard
        self._last = 0
        self._ignored = 0
        self.gaps = 0
        """Number of times that changes were missing."""

    def hear(self, message: CacheChanged) -> None:
        if not message.fresh and (self._ignored or message.number != self._last + 1):
            self.gaps += not self._ignored
            if self._ignored % _PATIENCE == 0:
                self._ask()
            self._ignored += 1
            return
        self._ignored = 0
        self._last = message.number
        self._heard(message)


# Dispatch -----------------------------------------------------------------------------------------


_OUTPUT = 64.0
"""Tokens that a request is taken to generate, until some have ended."""
_OUTPUT_SHARE = 0.05
"""Weight of the last ended request in the mean."""
_MOST_HOMES = 65536
_SWEEP_SECONDS = 0.005


@dataclass
class _Running:
    """A request, its engine, and the facts that the router was told of the request."""

    replica: int
    routed: bool
    begun: bool = False
    tokens: int = 0


class Dispatch:
    """The router, fed with events of engines and requests. Belongs to one event loop."""

    def __init__(
        self,
        count: int,
        info: Ready,
        ask: Callable[[int], None],
        digest_key: bytes = b"",
        prefill: int = 0,
    ) -> None:
        """`ask` has an engine say all that its cache holds, in digests of this key. The last
        `prefill` ones compute prompts for the others, and requests only if no other one is up."""
        capacity = info.num_blocks * info.block_size
        self._router = Router(
            RouterConfig(
                count,
                info.block_size,
                capacity,
                PRIOR,
                digest_key=digest_key,
                space_of=partial(kv_space, contents=info.adapter_contents),
            )
        )
        self._count = count
        self._prefill = frozenset(range(count - prefill, count))
        self._ask = ask
        self._hearing = [self._new_hearing(at) for at in range(count)]
        self._gaps = 0
        """Gaps in the reports of engines that have died since."""
        self._costs: dict[int, StepCost] = {}
        self._down: set[int] = set()
        self._gone: set[int] = set()
        """Engines that are down for good."""
        self._running: dict[int, _Running] = {}
        self._homes: dict[str, int] = {}
        """Replica of each program's last request."""
        self._output = _OUTPUT
        self._moved = 0
        self._sweeping: asyncio.TimerHandle | None = None

    @property
    def can_prefill(self) -> bool:
        """Whether an engine that computes prompts for other engines is up."""
        return not self._prefill <= self._down

    def is_up(self, at: int) -> bool:
        return at not in self._down

    def held(self, request: EngineRequest) -> dict[int, int]:
        """Return the number of whole blocks of a request's tokens at each decoding engine that
        holds any."""
        namespace = kv_namespace(request.namespace, request.adapter)
        return {
            at: blocks
            for blocks, replicas in self._router.held(namespace, _tokens(request))
            for at in set(range(self._count)) - self._prefill
            if replicas >> at & 1
        }

    def place(self, request: EngineRequest, prefill: bool = False) -> int:
        """Place a request, which counts at its engine from now on and no longer at an earlier one;
        return the engine. `prefill`: only the prompt is to be computed."""
        rid, program = request.rid, request.program
        if len(self._down) == self._count:  # it waits for one that is started again
            at = min(set(range(self._count)) - self._gone, default=0)
            self._put(rid, _Running(at, routed=False))
            return at
        max_tokens = request.params.max_tokens
        up = set(range(self._count)) - self._down
        avoid = up - self._prefill if prefill else up & self._prefill
        at = self._router.route(
            rid,
            kv_namespace(request.namespace, request.adapter),
            _tokens(request),
            int(self._output if max_tokens is None else min(max_tokens, self._output)),
            time.monotonic(),
            self._homes.get(program),
            avoid=() if avoid == up else sorted(avoid),
        )
        self._put(rid, _Running(at, routed=True))
        if program and not prefill:
            self._homes.pop(program, None)
            self._homes[program] = at
            if len(self._homes) > _MOST_HOMES:  # the program without requests for the longest time
                del self._homes[next(iter(self._homes))]
        return at

    def where(self, rid: int) -> int | None:
        """Return the engine that has a request; None if it is over."""
        running = self._running.get(rid)
        return None if running is None else running.replica

    def holds(self, at: int) -> bool:
        """Return whether an engine has a request, or gets one when the engine is up."""
        return any(running.replica == at for running in self._running.values())

    def hear(self, update: EngineOutput) -> None:
        """Process an update of a request."""
        running, rid = self._running.get(update.rid), update.rid
        if running is None:
            return
        running.tokens += len(update.token_ids)
        computed = update.finish not in ("abort", "error")
        if running.routed and not running.begun and computed:
            running.begun = True
            self._router.first_token(rid, time.monotonic())
        if update.finish is None:
            return
        del self._running[rid]
        if computed and running.tokens:
            self._output += _OUTPUT_SHARE * (running.tokens - self._output)
        if running.routed:
            self._router.ended(rid, time.monotonic())

    def program_ended(self, program: str) -> None:
        self._homes.pop(program, None)

    def reported(self, at: int, message: CacheChanged | CostMeasured) -> None:
        """Process an engine's report of its cache or cost."""
        if isinstance(message, CacheChanged):
            self._hearing[at].hear(message)
            if message.fresh:
                self._sweep_soon()
        else:
            self._costs[at] = message.cost
            self._router.learn(mean_cost(list(self._costs.values())))

    def down(self, at: int, for_good: bool = False) -> None:
        """Record an engine's death: its cache is lost; it gets no requests until it is `back`."""
        self._down.add(at)
        if for_good:
            self._gone.add(at)
        self._gaps += self._hearing[at].gaps
        self._hearing[at] = self._new_hearing(at)
        self._router.lost(at)
        self._sweep_soon()
        for running in self._running.values():
            if running.replica == at:  # the router no longer counts requests that stay there
                running.routed = False

    def back(self, at: int) -> None:
        self._down.discard(at)
        self._router.back(at)

    def counters(self) -> dict[str, int]:
        """Counters for `GetStatus`."""
        return {
            "prefixes_known": len(self._router),
            "prefixes_below": self._router.known_below,
            "requests_moved": self._moved,
            "cache_gaps": self._gaps + sum(hearing.gaps for hearing in self._hearing),
        }

    def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()

    def _put(self, rid: int, running: _Running) -> None:
        before = self._running.get(rid)
        if before is not None:
            running.tokens = before.tokens
            self._moved += running.replica != before.replica
        self._running[rid] = running

    def _new_hearing(self, at: int) -> Hearing:
        return Hearing(partial(self._ask, at), partial(self._heard, at))

    def _heard(self, at: int, message: CacheChanged) -> None:
        change = Change(message.added, message.removed, message.fresh, message.blocks)
        self._router.heard(at, change, message.below)

    def _sweep_soon(self) -> None:
        """Remove lost engines' prefixes from the table, a little at a time."""
        if self._sweeping is None and self._router.sweep():
            loop = asyncio.get_running_loop()
            self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        self._sweep_soon()


def _tokens(request: EngineRequest) -> np.ndarray:
    """Return a request's prompt and output so far (int32)."""
    if not len(request.output_ids):
        return request.token_ids
    return np.concatenate((request.token_ids, request.output_ids))
