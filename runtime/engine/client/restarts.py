"""The requests an engine has, kept so that the next engine can go on with them."""

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
#
# Requests that were found to kill engines, by the client that sent them.


MAX_CULPRITS = 3
WINDOW_SECONDS = 600.0


class Culprits:
    """Of all engines of a model. A client whose requests killed engines `MAX_CULPRITS` times within
    `WINDOW_SECONDS` is suspended until the first time was so long ago: each costs all others two
    restarts, and the next would only cost them more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: dict[str, list[float]] = {}
        """When some of each client were found."""

    def note(self, client: str) -> None:
        """A request of this client was found, or several at once."""
        self._forget_old()
        self._found.setdefault(client, []).append(self._clock())

    def refusal(self, client: str) -> ClientSuspended | None:
        """What its requests fail with, if it is suspended."""
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
#
# How often an engine died, and which of its deaths have a reason.


MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 300.0


@dataclass(eq=False)
class Death:
    """Of one engine, `at` this time. The requests that it had take it along, to whichever engine
    goes on with them: if one of them is found to kill engines, it is `explained`."""

    at: float
    explained: bool = False


class Deaths:
    """Of the engines that one client started."""

    def __init__(self) -> None:
        self.count = 0
        self._open: list[Death] = []
        """Those that nothing explains, as far as they are not long ago."""

    def note(self) -> Death:
        """An engine died."""
        death = Death(time.monotonic())
        self.count += 1
        self._open.append(death)
        return death

    def check(self, code: int | None) -> None:
        """Raises ServerUnavailable, with the `code` of the last one, if too many have no reason."""
        oldest = time.monotonic() - RESTART_WINDOW_SECONDS
        self._open = [one for one in self._open if not one.explained and one.at > oldest]
        if len(self._open) > MAX_RESTARTS:
            raise ServerUnavailable(f"the engine died {len(self._open)} times, last code {code}")


# In flight ----------------------------------------------------------------------------------------


MOST_LOST = 8
"""With so many engines a request may go whose machines, or whole replicas, were lost or left."""


@dataclass
class Submitted:
    """A request, and enough to start it again in another engine."""

    request: EngineRequest
    on_update: Callable[[EngineOutput], None]
    output_ids: list[int] = field(default_factory=list)
    engines: int = 0
    """How many engines were given it."""
    told: bool = False
    """Whether the last of them told anything of it."""
    deaths: int = 0
    """How many engines died in a step with it."""
    lost: list[Death] = field(default_factory=list)
    """Of the engines that had it."""
    aborted: bool = False
    stays: bool = False
    """Whether no other engine's client may go on with it."""

    def resumed(self, suspected: int) -> EngineRequest:
        """The request as the next engine is sent it."""
        request = self.request
        generated = np.array(self.output_ids, np.int32)
        output_ids = np.concatenate((request.output_ids, generated))
        return msgspec.structs.replace(
            request, output_ids=output_ids, suspected=suspected, resumed=self.engines > 0
        )


class InFlight:
    """Requests that were submitted and have not finished, and who hears of them."""

    def __init__(self, culprits: Culprits | None = None, most_waiting: int = 1 << 60) -> None:
        """`culprits` is told of requests that kill engines, and whose requests end for that. Where
        there are `most_waiting`, no other one waits for the next engine."""
        self._culprits = Culprits() if culprits is None else culprits
        self._most_waiting = most_waiting
        self._submitted: dict[int, Submitted] = {}
        self._held: deque[int] = deque()
        """In quarantine: those that the engine is given one by one."""
        self._late: deque[int] = deque()
        """Those that came since, who take turns with them."""
        self._tried_late = False
        self._cleared: list[int] = []
        """Those that go on when nobody is held any more."""
        self._tried: int | None = None
        """The one of them that it has, and has told nothing of."""
        self._bound: set[int] = set()
        """Those that stayed here when the last engine died."""

    @property
    def quarantined(self) -> bool:
        """Whether new requests have to take turns with those in quarantine: see `judge`."""
        return self._tried is not None or bool(self._held)

    def add(
        self,
        request: EngineRequest,
        on_update: Callable[[EngineOutput], None],
        sent: bool,
        stays: bool = False,
    ) -> None:
        """Keep a request; one that is not `sent` yet waits for the next engine, or for those in
        quarantine: raises Overloaded where too many do."""
        if not sent and len(self._submitted) >= self._most_waiting:
            raise Overloaded(f"{len(self._submitted)} requests wait for an engine already")
        self._submitted[request.rid] = Submitted(request, on_update, engines=int(sent), stays=stays)
        if self.quarantined:
            self._late.append(request.rid)

    def died(self, death: Death) -> None:
        """The engine died: before anything else is done about it."""
        waiting = {*self._held, *self._late, *self._cleared}
        for rid, submitted in self._submitted.items():
            if submitted.engines and rid not in waiting:
                submitted.lost.append(death)

    def abort(self, rids: Iterable[int], up: bool) -> tuple[int, ...]:
        """End these, and do not start them again. Returns those that the engine has, which is `up`,
        and is to end."""
        mine = [rid for rid in rids if rid in self._submitted]
        waiting = {*self._held, *self._late, *self._cleared} if up else frozenset(mine)
        for rid in mine:
            self._submitted[rid].aborted = True
            if rid in waiting:
                self._ends(rid)
        return tuple(rid for rid in mine if rid not in waiting)

    def request(self, rid: int) -> EngineRequest | None:
        """One that has not finished."""
        submitted = self._submitted.get(rid)
        return None if submitted is None else submitted.request

    def hear(self, update: EngineOutput) -> Sequence[EngineRequest]:
        """Hand an engine's update on. Returns what it is to be sent now, if somebody leaves the
        quarantine by it."""
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
        """The engine died, and nothing has gone on yet, here or elsewhere: ends what is aborted,
        what kills engines, and what is of a client that is suspended.

        `in_step`: who was in the steps in which the engine died, and how long they were to become.
        They are computed alone as far as is known here, and where a second engine dies with them,
        as far as they were then: tokens that were not told yet have to be generated alone for that.

        What kills engines is what is alone in the step in which a second engine dies, or in the
        steps of three. Where it was alone, it explains the deaths before.

        Where an engine died in no step (`in_step` is empty), somebody may have killed it, or the
        request that it had just been given. If it had requests that another one died with, all are
        put in quarantine: the next engine is given one of those of which it had told nothing, and
        the next of these when it has told something of that one; the others when none is left. With
        whom of these an engine dies in no step, that one kills engines.
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
        if culprits and len(in_step) < 2:  # whoever was its company is none
            for submitted in self._submitted.values():
                submitted.deaths = 0
        if tried is not None and tried in self._submitted:
            self._held.append(tried)
        elif again and tried is None:
            for rid in fresh:
                if rid in given and rid in self._submitted:
                    (self._cleared if given[rid].told else self._held).append(rid)

    def resume(self, in_step: Mapping[int, int]) -> Iterator[EngineRequest]:
        """What the next engine is to be sent, after `judge` of the same `in_step`, or where nobody
        knows how the one before went."""
        self._tried = None
        self._bound.clear()
        waiting = {*self._held, *self._late, *self._cleared}
        for rid in list(self._submitted):
            if rid not in waiting and not self._ends(rid):
                yield self._resumed(rid, in_step)
        yield from self._next()

    def leave(self, in_step: Mapping[int, int]) -> list[Submitted]:
        """Take out what another engine may go on with now that this one has died, and that was
        judged: all but what two engines died with, and, where there is a quarantine, what belongs
        there. The others are for `resume`, which is given the same `in_step`, or for `leave_lost`
        where no other engine comes."""
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
        """Take out what waits here for the next engine, and may as well go elsewhere: what came
        since the last one died."""
        free = {
            rid: one
            for rid, one in self._submitted.items()
            if rid not in self._bound and not one.stays
        }
        self._late = deque(rid for rid in self._late if rid not in free)
        return [self._submitted.pop(rid) for rid in free]

    def leave_all(self) -> list[Submitted]:
        """Take out what another engine may go on with where there will be no other one here."""
        left = [one for one in self._submitted.values() if not one.aborted and not one.stays]
        for one in left:
            del self._submitted[one.request.rid]
        for waiting in (self._held, self._late, self._cleared, self._bound):
            waiting.clear()
        self._tried = None
        return left

    def leave_lost(self) -> list[Submitted]:
        """As `leave_all`, of an engine whose place may stay empty: nobody knows why it went, or no
        other one came. Ends what `judge` would, and what many engines went with."""
        for rid, submitted in list(self._submitted.items()):
            if not self._ends(rid) and submitted.engines >= MOST_LOST:
                error = f"{submitted.engines} engines were lost while running this request"
                self._end(rid, InternalError(error))
        return self.leave_all()

    def adopt(
        self, submitted: Submitted, in_step: Mapping[int, int], sent: bool
    ) -> EngineRequest | None:
        """Go on with what left another engine, which died in a step with `in_step`, or with what
        left this one and found no other. Returns what the engine is to be sent, if it is there,
        nobody has to wait for the quarantine, and the request does not end here, as that of a
        suspended client does."""
        rid = submitted.request.rid
        self._submitted[rid] = submitted
        if self._ends(rid):
            return None
        if self.quarantined:
            self._late.append(rid)
            return None
        return self._resumed(rid, in_step) if sent else None

    def _next(self) -> list[EngineRequest]:
        """The next one of those in quarantine, or, in turns, of those that came since; all that
        wait if nobody is left there."""
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
        """What the engine is to be sent for one that waited, if anything."""
        if rid not in self._submitted or self._ends(rid):
            return None
        return self._resumed(rid, {})

    def _ends(self, rid: int) -> bool:
        """End what is not to go on: what is aborted, and what is of a client that is suspended."""
        submitted = self._submitted[rid]
        if submitted.aborted:
            self._end(rid, None)
            return True
        error = self._culprits.refusal(submitted.request.client)
        if error is not None:
            self._end(rid, error)
        return error is not None

    def _blame(self, rid: int) -> None:
        """It kills engines."""
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
        """With an error, or because it was aborted."""
        submitted = self._submitted.pop(rid)
        update = EngineOutput(rid, finish="abort")
        if error is not None:
            update = EngineOutput(rid, finish="error", code=error.code, error=str(error))
        submitted.on_update(update)
