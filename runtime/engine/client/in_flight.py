"""The requests an engine has, kept so that the next engine can go on with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.wire.errors import InternalError, ServerUnavailable


@dataclass
class _Submitted:
    """A request, and enough to start it again in another engine."""

    request: Request
    on_update: Callable[[Update], None]
    output_ids: list[int] = field(default_factory=list)
    engines: int = 0
    """How many engines were given it."""
    deaths: int = 0
    """How many engines died in a step with it."""
    aborted: bool = False

    def resumed(self, suspected: int) -> Request:
        """The request as the next engine is sent it."""
        request = self.request
        generated = np.array(self.output_ids, np.int32)
        output_ids = np.concatenate((request.output_ids, generated))
        return msgspec.structs.replace(
            request, output_ids=output_ids, suspected=suspected, resumed=self.engines > 0
        )


class InFlight:
    """Requests that were submitted and have not finished, and who hears of them."""

    def __init__(self) -> None:
        self._submitted: dict[int, _Submitted] = {}

    def add(self, request: Request, on_update: Callable[[Update], None], sent: bool) -> None:
        """Keep a request; one that is not `sent` yet waits for the next engine."""
        self._submitted[request.rid] = _Submitted(request, on_update, engines=int(sent))

    def abort(self, rids: Iterable[int]) -> tuple[int, ...]:
        """Do not start these again. Returns those still in flight."""
        running = tuple(rid for rid in rids if rid in self._submitted)
        for rid in running:
            self._submitted[rid].aborted = True
        return running

    def hear(self, update: Update) -> None:
        """Hand an engine's update on."""
        submitted = self._submitted.get(update.rid)
        if submitted is None:
            return
        submitted.output_ids.extend(update.token_ids)
        if update.finish is not None:
            del self._submitted[update.rid]
        submitted.on_update(update)

    def resume(self, in_step: Mapping[int, int]) -> Iterator[Request]:
        """What the next engine is to be sent; ends what is aborted, and what kills engines.

        `in_step`: who was in the steps in which the engine died, and how long they were to become.
        They are computed alone as far as is known here, and where a second engine dies with them,
        as far as they were then: tokens that were not told yet have to be generated alone for that.

        What kills engines is what is alone in the step in which a second engine dies, or in the
        steps of three. Where an engine died in no step (`in_step` is empty), it is what two engines
        were given.
        """
        for rid, submitted in list(self._submitted.items()):
            if submitted.aborted:
                del self._submitted[rid]
                submitted.on_update(Update(rid, finish="abort"))
                continue
            submitted.deaths += rid in in_step
            most = 1 if in_step.keys() == {rid} else 2
            if submitted.deaths > most or (not in_step and submitted.engines > 1):
                self._fail(rid, InternalError("the engine died twice while running this request"))
                continue
            suspected = in_step.get(rid, 0) if submitted.deaths > 1 else int(rid in in_step)
            request = submitted.resumed(suspected)
            submitted.engines += 1
            yield request

    def fail(self, error: ServerUnavailable) -> None:
        """End every request with `error`."""
        for rid in list(self._submitted):
            self._fail(rid, error)

    def _fail(self, rid: int, error: ServerUnavailable | InternalError) -> None:
        submitted = self._submitted.pop(rid)
        submitted.on_update(Update(rid, finish="error", code=error.code, error=str(error)))
