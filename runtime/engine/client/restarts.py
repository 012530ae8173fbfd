"""Requests in flight at an engine, and the search for requests that kill engines.

 engine dies -> judge(in_step): end aborted and guilty requests
             -> leave: siblings continue requests; resume: the next engine gets the rest

Sections: culprits, deaths, in flight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest
from rootlace.wire.errors import (
    ClientSuspended,
    InternalError,
    Overloaded,
    RootlaceError,
    ServerUnavailable,
)

# Culprits -----------------------------------------------------------------------------------------


MAX_CULPRITS = 3
WINDOW_SECONDS = 600.0


class Culprits:
    """Clients whose requests killed engines of a model.

    After `MAX_CULPRITS` such requests within `WINDOW_SECONDS` a client is suspended until the first
    is that old. Each such request costs all other requests two restarts.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: dict[str, list[float]] = {}
        """Client -> times of its guilty requests."""

    def note(self, client: str) -> None:
        """Note one or more guilty requests of a client, found at once."""
        self._forget_old()
        self._found.setdefault(client, []).append(self._clock())

    def refusal(self, client: str) -> ClientSuspended | None:
        """The error of a suspended client's requests; None if not suspended."""
        if client not in self._found:
            return None
        self._forget_old()
        found = self._found.get(client, [])
        if len(found) < MAX_CULPRITS:
            return None
        left = max(found[-MAX_CULPRITS] + WINDOW_SECONDS - self._clock(), 1.0)
        refusal = ClientSuspended(
            f"requests of this client ended the engine {len(found)} times within the last "
            f"{WINDOW_SECONDS / 60:.0f} minutes: it is suspended for {left:.0f} s"
        )
        refusal.retry_after = left
        return refusal

    def _forget_old(self) -> None:
        oldest = self._clock() - WINDOW_SECONDS
        late = {
            client: [at for at in found if at > oldest] for client, found in self._found.items()
        }
        self._found = {client: found for client, found in late.items() if found}


# Deaths -------------------------------------------------------------------------------------------


MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 300.0


@dataclass(eq=False)
class Death:
    """Death of an engine at time `at`.

    Requests of the engine keep a reference, whichever engine continues them. The death is
    `explained` once one of them is found to kill engines.
    """

    at: float
    explained: bool = False


class Deaths:
    """Deaths of the engines that one client started."""

    def __init__(self) -> None:
        self.count = 0
        self._open: list[Death] = []
        """Recent deaths without an explanation."""

    def note(self) -> Death:
        """Note the death of an engine."""
        death = Death(time.monotonic())
        self.count += 1
        self._open.append(death)
        return death

    def check(self, code: int | None) -> None:
        """Raise ServerUnavailable, with the last exit `code`, after too many unexplained deaths."""
        oldest = time.monotonic() - RESTART_WINDOW_SECONDS
        self._open = [one for one in self._open if not one.explained and one.at > oldest]
        if len(self._open) > MAX_RESTARTS:
            raise ServerUnavailable(f"the engine died {len(self._open)} times, last code {code}")


# In flight ----------------------------------------------------------------------------------------


MOST_LOST = 8
"""Engines per request, at most, whose machines or replicas were lost or left."""


@dataclass
class Submitted:
    """A request, and its state for a new start at another engine."""

    request: EngineRequest
    on_update: Callable[[EngineOutput], None]
    output_ids: list[int] = field(default_factory=list)
    engines: int = 0
    """Count of engines that received the request."""
    told: bool = False
    """Whether the last of these sent an update of the request."""
    deaths: int = 0
    """Count of engines that died in a step with the request."""
    lost: list[Death] = field(default_factory=list)
    """Deaths of engines that had the request."""
    aborted: bool = False
    stays: bool = False
    """Whether the request may not continue at another engine's client."""

    def resumed(self, suspected: int) -> EngineRequest:
        """The request as sent to the next engine."""
        request = self.request
        generated = np.array(self.output_ids, np.int32)
        output_ids = np.concatenate((request.output_ids, generated))
        return msgspec.structs.replace(
            request, output_ids=output_ids, suspected=suspected, resumed=self.engines > 0
        )


class InFlight:
    """Submitted and unfinished requests, and the receivers of their updates."""

    def __init__(self, culprits: Culprits | None = None, most_waiting: int = 1 << 60) -> None:
        """`culprits` records requests that kill engines.

        With `most_waiting` requests waiting for the next engine, further requests are refused.
        """
        self._culprits = Culprits() if culprits is None else culprits
        self._most_waiting = most_waiting
        self._submitted: dict[int, Submitted] = {}
        self._held: deque[int] = deque()
        """Quarantined requests, which the engine gets one by one."""
        self._late: deque[int] = deque()
        """Requests that came later and take turns with quarantined ones."""
        self._tried_late = False
        self._cleared: list[int] = []
        """Requests that continue when the quarantine is empty."""
        self._tried: int | None = None
        """The quarantined request that the engine has and has sent no update of."""
        self._bound: set[int] = set()
        """Requests that stayed here when the last engine died."""

    @property
    def quarantined(self) -> bool:
        """Whether new requests take turns with quarantined ones: see `judge`."""
        return self._tried is not None or bool(self._held)

    def add(
        self,
        request: EngineRequest,
        on_update: Callable[[EngineOutput], None],
        sent: bool,
        stays: bool = False,
    ) -> None:
        """Keep a request.

        A request that is not `sent` yet waits for the next engine, or for the quarantine. Raises
        Overloaded if too many requests wait.
        """
        if not sent and len(self._submitted) >= self._most_waiting:
            raise Overloaded(f"{len(self._submitted)} requests wait for an engine already")
        self._submitted[request.rid] = Submitted(request, on_update, engines=int(sent), stays=stays)
        if self.quarantined:
            self._late.append(request.rid)

    def died(self, death: Death) -> None:
        """Note the engine's death, before any other step."""
        waiting = {*self._held, *self._late, *self._cleared}
        for rid, submitted in self._submitted.items():
            if submitted.engines and rid not in waiting:
                submitted.lost.append(death)

    def abort(self, rids: Iterable[int], up: bool) -> tuple[int, ...]:
        """End requests for good; return those that the engine, if `up`, must end."""
        mine = [rid for rid in rids if rid in self._submitted]
        waiting = {*self._held, *self._late, *self._cleared} if up else frozenset(mine)
        for rid in mine:
            self._submitted[rid].aborted = True
            if rid in waiting:
                self._ends(rid)
        return tuple(rid for rid in mine if rid not in waiting)

    def request(self, rid: int) -> EngineRequest | None:
        """An unfinished request."""
        submitted = self._submitted.get(rid)
        return None if submitted is None else submitted.request

    def hear(self, update: EngineOutput) -> Sequence[EngineRequest]:
        """Hand on an engine's update; return requests to send now, as one left the quarantine."""
        submitted = self._submitted.get(update.rid)
        if submitted is None:
            return ()
        submitted.told = True
        submitted.output_ids.extend(update.token_ids)
        if update.finish is not None:
            del self._submitted[update.rid]
        submitted.on_update(update)
        return self._next() if update.rid == self._tried else ()

    def judge(self, in_step: Mapping[int, int]) -> None:
        """End requests after the engine's death: aborted, guilty, or of a suspended client.

        Called before any request continues, here or elsewhere. `in_step`: requests of the dying
        steps -> planned context lengths. These requests are computed alone up to their known
        tokens. If a second engine dies with them, they are computed alone up to the planned length.

        A request is guilty if alone in the step in which a second engine dies, or in the steps of
        three. If it was alone, it explains the earlier deaths.

        Without `in_step` the cause may be a signal from outside, or a request just received. If
        another engine died with some of the requests, all of them are quarantined. The next engine
        then gets one request without updates at a time, the next one after an update, and the
        others at the end. If an engine dies in no step with one of these, that request is guilty.
        """
        tried, self._tried = self._tried, None
        waiting = {*self._held, *self._late, *self._cleared}
        for rid, submitted in list(self._submitted.items()):
            if submitted.aborted:
                self._end(rid, None)
        given = {rid: one for rid, one in self._submitted.items() if one.engines}
        again = not in_step and any(one.engines > 1 for one in given.values())
        if again and tried is None and len(given) == 1:
            (tried,) = given
        fresh = [rid for rid in self._submitted if rid not in waiting]
        culprits: set[str] = set()
        for rid in fresh:
            submitted = self._submitted[rid]
            submitted.deaths += rid in in_step
            most = 1 if in_step.keys() == {rid} else 2
            if submitted.deaths > most or (not in_step and rid == tried):
                culprits.add(submitted.request.client)
                self._blame(rid)
        for client in culprits:
            self._culprits.note(client)
        for rid in list(self._submitted):
            self._ends(rid)
        if culprits and len(in_step) < 2:  # a request in the same step is not proven guilty
            for submitted in self._submitted.values():
                submitted.deaths = 0
        if tried is not None and tried in self._submitted:
            self._held.append(tried)
        elif again and tried is None:
            for rid in fresh:
                if rid in given and rid in self._submitted:
                    (self._cleared if given[rid].told else self._held).append(rid)

    def resume(self, in_step: Mapping[int, int]) -> Iterator[EngineRequest]:
        """Requests to send to the next engine, after `judge` of the same `in_step`.

        Also used when the fate of the last engine is unknown.
        """
        self._tried = None
        self._bound.clear()
        waiting = {*self._held, *self._late, *self._cleared}
        for rid in list(self._submitted):
            if rid not in waiting and not self._ends(rid):
                yield self._resumed(rid, in_step)
        yield from self._next()

    def leave(self, in_step: Mapping[int, int]) -> list[Submitted]:
        """Take out judged requests that another engine may continue after this one's death.

        Excluded are requests with which two engines died, and quarantined ones. These are for
        `resume` with the same `in_step`, or for `leave_lost` if no other engine comes.
        """
        stay = {*self._held, *self._late, *self._cleared}
        if not in_step and (
            self.quarantined or any(one.engines > 1 for one in self._submitted.values())
        ):
            stay |= {rid for rid, one in self._submitted.items() if one.engines}
        left: list[Submitted] = []
        for rid, submitted in list(self._submitted.items()):
            if submitted.aborted or submitted.stays or rid in stay or submitted.deaths > 1:
                self._bound.add(rid)
            else:
                left.append(self._submitted.pop(rid))
        return left

    def leave_free(self) -> list[Submitted]:
        """Take out requests that came since the last death and may continue elsewhere."""
        free = {
            rid: one
            for rid, one in self._submitted.items()
            if rid not in self._bound and not one.stays
        }
        self._late = deque(rid for rid in self._late if rid not in free)
        return [self._submitted.pop(rid) for rid in free]

    def leave_all(self) -> list[Submitted]:
        """Take out requests that another engine may continue, as no engine will follow here."""
        left = [one for one in self._submitted.values() if not one.aborted and not one.stays]
        for one in left:
            del self._submitted[one.request.rid]
        for waiting in (self._held, self._late, self._cleared, self._bound):
            waiting.clear()
        self._tried = None
        return left

    def leave_lost(self) -> list[Submitted]:
        """`leave_all` for an engine whose place may stay empty, after an unknown end.

        Ends requests that `judge` would end, and requests that many engines were lost with.
        """
        for rid, submitted in list(self._submitted.items()):
            if not self._ends(rid) and submitted.engines >= MOST_LOST:
                error = f"{submitted.engines} engines were lost while running this request"
                self._end(rid, InternalError(error))
        return self.leave_all()

    def adopt(
        self, submitted: Submitted, in_step: Mapping[int, int], sent: bool
    ) -> EngineRequest | None:
        """Continue a request of another engine that died in a step with `in_step`, or a returned
        one.

        Returns the request to send to the engine if it is up, unless the request is quarantined or
        ends here, as one of a suspended client does.
        """
        rid = submitted.request.rid
        self._submitted[rid] = submitted
        if self._ends(rid):
            return None
        if self.quarantined:
            self._late.append(rid)
            return None
        return self._resumed(rid, in_step) if sent else None

    def _next(self) -> list[EngineRequest]:
        """The next quarantined or later request, in turns; all waiting requests after the
        quarantine."""
        self._tried = None
        while self._held:
            late = bool(self._late) and not self._tried_late
            rid = (self._late if late else self._held).popleft()
            if (request := self._leaves(rid)) is not None:
                self._tried, self._tried_late = rid, late
                return [request]
        waiting = [*self._cleared, *self._late]
        self._cleared.clear()
        self._late.clear()
        return [one for rid in waiting if (one := self._leaves(rid)) is not None]

    def _leaves(self, rid: int) -> EngineRequest | None:
        """The request to send to the engine for one that waited, if any."""
        if rid not in self._submitted or self._ends(rid):
            return None
        return self._resumed(rid, {})

    def _ends(self, rid: int) -> bool:
        """End a request that was aborted or belongs to a suspended client."""
        submitted = self._submitted[rid]
        if submitted.aborted:
            self._end(rid, None)
            return True
        error = self._culprits.refusal(submitted.request.client)
        if error is not None:
            self._end(rid, error)
        return error is not None

    def _blame(self, rid: int) -> None:
        """End a request that kills engines, and explain the deaths."""
        submitted = self._submitted[rid]
        for death in submitted.lost:
            death.explained = True
        self._end(rid, InternalError("the engine died twice while running this request"))

    def _resumed(self, rid: int, in_step: Mapping[int, int]) -> EngineRequest:
        submitted = self._submitted[rid]
        suspected = in_step.get(rid, 0) if submitted.deaths > 1 else int(rid in in_step)
        request = submitted.resumed(suspected)
        submitted.engines += 1
        submitted.told = False
        return request

    def fail(self, error: RootlaceError) -> None:
        """End every request with `error`."""
        for rid in list(self._submitted):
            self._end(rid, error)

    def _end(self, rid: int, error: RootlaceError | None) -> None:
        """End a request with an error, or as aborted."""
        submitted = self._submitted.pop(rid)
        update = EngineOutput(rid, finish="abort")
        if error is not None:
            update = EngineOutput(rid, finish="error", code=error.code, error=str(error))
        submitted.on_update(update)
