"""Requests in flight at an engine, and the requests that end when the engine dies.

engine dies --> died: end aborted requests, and requests that kill engines
                  |--> leave: replicas continue requests
                  +--> resume: the next engine continues the rest
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import numpy as np

from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest
from rootlace.wire.errors import (
    ClientSuspended,
    EndsEngine,
    InternalError,
    Overloaded,
    RootlaceError,
    ServerUnavailable,
)

MAX_GUILTY = 3
GUILTY_SECONDS = 600.0
"""Seconds within which `MAX_GUILTY` requests that killed engines suspend their client."""
MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 300.0
"""Seconds within which more than `MAX_RESTARTS` unexplained deaths keep the engine down."""
MAX_LOST = 8
"""Most engines of a request that were lost with their machines, without a report of their last
step."""


class Suspensions:
    """Clients whose requests killed engines of one model, shared by all replicas. Each such request
    costs all other requests two restarts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[str, list[float]] = {}
        """Map from client to the times when its guilty requests were found."""

    def note(self, client: str) -> None:
        """Note one or more guilty requests of a client, found at once."""
        oldest = self._clock() - GUILTY_SECONDS
        recent = {who: [at for at in times if at > oldest] for who, times in self._times.items()}
        self._times = {who: times for who, times in recent.items() if times}
        self._times.setdefault(client, []).append(self._clock())

    def refusal(self, client: str) -> ClientSuspended | None:
        """Return the error of a suspended client's requests; None if it is not suspended."""
        if client not in self._times:
            return None
        now = self._clock()
        times = [at for at in self._times[client] if at > now - GUILTY_SECONDS]
        if len(times) < MAX_GUILTY:
            return None
        left = max(times[-MAX_GUILTY] + GUILTY_SECONDS - now, 1.0)
        refusal = ClientSuspended(
            f"requests of this client ended the engine {len(times)} times within the last "
            f"{GUILTY_SECONDS / 60:.0f} minutes: it is suspended for {left:.0f} s"
        )
        refusal.retry_after = left
        return refusal


@dataclass(eq=False)
class Death:
    """Death of an engine at time `at`; `explained` once a request of its step is found guilty."""

    at: float = field(default_factory=time.monotonic)
    explained: bool = False


@dataclass
class PendingRequest:
    """Unfinished request, with the state that the next engine needs."""

    request: EngineRequest
    on_update: Callable[[EngineOutput], None]
    output_ids: list[int] = field(default_factory=list)
    engines: int = 0
    """Count of engines that received the request."""
    heard: bool = False
    """Whether an engine sent an update of the request."""
    suspected: int = 0
    """Planned context length in the step in which the last engine died; 0 outside of that step."""
    deaths: list[Death] = field(default_factory=list)
    """Deaths of engines in a step with the request."""
    aborted: bool = False
    stays: bool = False
    """Whether the request may not continue at another replica."""

    def resumed(self) -> EngineRequest:
        """Return the request as sent to the next engine, which continues after the known tokens."""
        request = self.request
        output_ids = np.concatenate((request.output_ids, np.array(self.output_ids, np.int32)))
        return msgspec.structs.replace(
            request, output_ids=output_ids, suspected=self.suspected, resumed=self.engines > 0
        )


class RestartPolicy:
    """Unfinished requests of one engine client, across the deaths of its engines.

    Every request continues at the next engine. Requests of the dying step are computed alone there,
    up to the length that the step planned. So a request that kills engines is alone in the step in
    which the second engine dies, and fails. A failure that needs several requests together ends the
    requests that were in three dying steps.
    """

    def __init__(self, suspensions: Suspensions | None = None, max_waiting: int = 1 << 60) -> None:
        """Make a policy. With `max_waiting` requests waiting for the next engine, further ones are
        refused."""
        self._suspensions = Suspensions() if suspensions is None else suspensions
        self._max_waiting = max_waiting
        self._unexplained: list[Death] = []
        self.deaths = 0
        """Count of engines that died."""
        self.requests: dict[int, PendingRequest] = {}
        """Unfinished requests by number; the client notes the engine's messages in them."""

    def add(
        self,
        request: EngineRequest,
        on_update: Callable[[EngineOutput], None],
        sent: bool,
        stays: bool = False,
    ) -> None:
        """Keep a request that was `sent` to the engine, or waits for the next one.

        Raises ClientSuspended, or Overloaded if too many requests wait.
        """
        if (refusal := self._suspensions.refusal(request.client)) is not None:
            raise refusal
        if not sent and len(self.requests) >= self._max_waiting:
            raise Overloaded(f"at most {self._max_waiting} requests may wait for an engine")
        pending = PendingRequest(request, on_update, engines=int(sent), stays=stays)
        self.requests[request.rid] = pending

    def abort(self, rids: Iterable[int], up: bool) -> tuple[int, ...]:
        """End requests for good; return those that the engine, if `up`, must end."""
        known = tuple(rid for rid in rids if rid in self.requests)
        for rid in known:
            if up:
                self.requests[rid].aborted = True
            else:
                self._end(rid, None)
        return known if up else ()

    def died(self, in_step: Mapping[int, int] | None) -> None:
        """Note the engine's death, and end requests that will not continue.

        `in_step` maps the requests of the dying steps to their planned context lengths. None: the
        machine was lost, without knowledge of its last step. If an engine died in no step, any
        request without an update may be the cause.
        """
        death = self.note_death()
        if in_step is not None and not in_step:
            in_step = {rid: 1 for rid, pending in self.requests.items() if not pending.heard}
        guilty: list[PendingRequest] = []
        for rid, pending in list(self.requests.items()):
            pending.suspected = (in_step or {}).get(rid, 0)
            if pending.suspected:
                pending.deaths.append(death)
            unexplained = sum(not one.explained for one in pending.deaths)
            if pending.aborted:
                self._end(rid, None)
            elif pending.suspected and unexplained > (1 if len(in_step or ()) == 1 else 2):
                guilty.append(pending)
                self._end(rid, EndsEngine("the engine died twice while running this request"))
            elif in_step is None and pending.engines >= MAX_LOST:
                error = f"{pending.engines} engines were lost while running this request"
                self._end(rid, InternalError(error))
        for pending in guilty:
            for one in pending.deaths:
                one.explained = True
        for client in {pending.request.client for pending in guilty}:
            self._suspensions.note(client)
        for rid in list(self.requests):
            self._end_suspended(rid)

    def note_death(self) -> Death:
        """Count the death of an engine, even at its start."""
        self.deaths += 1
        self._unexplained.append(Death())
        return self._unexplained[-1]

    def check_restart(self, code: int | None) -> None:
        """Raise ServerUnavailable, with the last exit `code`, after too many unexplained deaths."""
        oldest = time.monotonic() - RESTART_WINDOW_SECONDS
        self._unexplained = [
            one for one in self._unexplained if not one.explained and one.at > oldest
        ]
        if len(self._unexplained) > MAX_RESTARTS:
            count = len(self._unexplained)
            raise ServerUnavailable(f"the engine died {count} times, last code {code}")

    def resume(self) -> list[EngineRequest]:
        """Return the requests to send to the engine that has just started, in `soonest`'s order."""
        sent = [self._sent(rid) for rid in list(self.requests) if not self._end_suspended(rid)]
        return soonest(sent[:MOST_ORDERED]) + sent[MOST_ORDERED:]

    def leave(self) -> list[PendingRequest]:
        """Take out the requests that another replica may continue while no engine is here."""
        left = [pending for pending in self.requests.values() if not pending.stays]
        for pending in left:
            del self.requests[pending.request.rid]
        return left

    def adopt(self, pending: PendingRequest, up: bool) -> EngineRequest | None:
        """Continue a request of another replica; return the request to send to the engine if it is
        up."""
        rid = pending.request.rid
        self.requests[rid] = pending
        return None if self._end_suspended(rid) or not up else self._sent(rid)

    def fail(self, error: RootlaceError) -> None:
        """End every request with `error`."""
        for rid in list(self.requests):
            self._end(rid, error)

    def _sent(self, rid: int) -> EngineRequest:
        request = self.requests[rid].resumed()
        self.requests[rid].engines += 1
        return request

    def _end_suspended(self, rid: int) -> bool:
        """Return whether a request belonged to a suspended client, and was ended."""
        error = self._suspensions.refusal(self.requests[rid].request.client)
        if error is not None:
            self._end(rid, error)
        return error is not None

    def _end(self, rid: int, error: RootlaceError | None) -> None:
        """End a request with an error, or as aborted."""
        pending = self.requests.pop(rid)
        update = EngineOutput(rid, finish="abort")
        if error is not None:
            update = EngineOutput(rid, finish="error", code=error.code, error=str(error))
        pending.on_update(update)


# Order --------------------------------------------------------------------------------------------


MOST_ORDERED = 1024
"""Most requests ordered: each may begin with the one before it, which takes quadratic time."""


def soonest(requests: list[EngineRequest]) -> list[EngineRequest]:
    """Return an order with the least mean time until requests begin, if computed one after another.

    The first of several requests computes their shared prefix for all. So the tokens between two
    branching points of the prompts are a job, which must follow the job before it. The job's weight
    is the number of requests that end with it. The order of least weighted completion time is that
    of Horn ("Single-machine job sequencing with treelike precedence ordering and linear delay
    penalties", 1972): a job that costs more per request than the job behind it is joined with that
    job.
    """
    texts = [np.concatenate((one.token_ids, one.output_ids)).astype(">i4") for one in requests]
    keys = [
        (one.adapter, one.namespace, text.tobytes())
        for one, text in zip(requests, texts, strict=True)
    ]
    order = sorted(range(len(requests)), key=lambda at: (keys[at], at))
    path: list[tuple[int, list[_Part]]] = [(0, [])]
    """Branching points on the way to the last request: tokens before each, and the parts behind it.
    """
    for place, at in enumerate(order):
        length = len(texts[at])
        following = order[place + 1] if place + 1 < len(order) else None
        shared = 0 if following is None else _shared(keys, texts, at, following)
        if path[-1][0] < length:
            path.append((length, []))
        path[-1][1].append(_Part(0, 1, [at]))
        while path[-1][0] > shared:
            end, behind = path.pop()
            start = max(path[-1][0], shared)
            if path[-1][0] < start:
                path.append((start, []))
            path[-1][1].extend(_joined(end - start, sorted(behind, key=_PRICE)))
    return [requests[at] for part in sorted(path[0][1], key=_PRICE) for at in part.requests]


class _Part(msgspec.Struct, frozen=True):
    """Requests computed one after the other: total tokens, and `weight`, the number of requests."""

    tokens: int
    weight: int
    requests: list[int]

    @property
    def price(self) -> float:
        """Return the tokens per request; the cheapest part comes first."""
        return self.tokens / self.weight if self.weight else float("inf")


_PRICE = attrgetter("price")


def _joined(tokens: int, behind: list[_Part]) -> list[_Part]:
    """Return parts in order of their price: the parts of `behind`, in this order, after `tokens`
    more."""
    first = _Part(tokens, 0, [])
    for at, part in enumerate(behind):
        if first.price <= part.price:
            return [first, *behind[at:]]
        first = _Part(
            first.tokens + part.tokens, first.weight + part.weight, first.requests + part.requests
        )
    return [first]


def _shared(
    keys: list[tuple[str, str, bytes]], texts: list[np.ndarray], one: int, other: int
) -> int:
    """Count the leading tokens that two requests share."""
    if keys[one][:2] != keys[other][:2]:
        return 0
    length = min(len(texts[one]), len(texts[other]))
    differ = np.flatnonzero(texts[one][:length] != texts[other][:length])
    return int(differ[0]) if len(differ) else length
