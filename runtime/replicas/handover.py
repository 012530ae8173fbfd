"""Disaggregation: some engines compute prompts for other engines, and hand over the KV."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from rootlace.runtime import processes
from rootlace.runtime.cache.journal import most_blocks
from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.contracts.block_store import TransferConfig, TransferKind
from rootlace.runtime.contracts.messages import (
    NO_TOKENS,
    EngineOutput,
    EngineRequest,
    HandOver,
    Offered,
    Ready,
)
from rootlace.runtime.engine.client.engine_client import EngineClient
from rootlace.runtime.engine.client.restarts import PendingRequest
from rootlace.runtime.replicas.dispatch import Dispatch
from rootlace.wire.errors import (
    InternalError,
    InvalidRequest,
    RootlaceError,
    ServerUnavailable,
    from_code,
)
from rootlace.wire.protocol import SamplingParams
from rootlace.wire.sampling import Cache

# Handover -----------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

HAND_OVER_SECONDS = 10.0
"""Bound of a request's wait for an engine that has computed its prompt and hands over the KV."""
_PROMPT_ALONE = SamplingParams(max_tokens=0, temperature=0.0, seed=0)


class Apart(msgspec.Struct, frozen=True):
    """Disaggregation: the last `prefill` engines compute prompts of which every other engine lacks
    `least_tokens` tokens or more. The KV handed over (`by` a way) takes at most `memory_bytes`: of
    one shared memory, or of each engine's."""

    prefill: int
    least_tokens: int
    memory_bytes: int
    by: TransferKind = "memory"


def apart_of(config: GatewayConfig, prefill: int) -> Apart | None:
    """Return the configured disaggregation with `prefill` engines for prompts; None without any."""
    if not prefill:
        return None
    memory = int(1e9 * config.disaggregate_gb)
    return Apart(prefill, config.disaggregate_from, memory, config.disaggregate_by)


def transfer_of(apart: Apart, shared: bool = True) -> TransferConfig:
    """Return the engines' setting for handing over blocks; `shared`: the engines are on one
    machine. Raises `InvalidRequest`, or OSError."""
    memory = -1
    if apart.by == "memory":
        if not shared:
            raise InvalidRequest("disaggregate_by memory: engines of several machines share none")
        memory = processes.new_memory()
    return TransferConfig(apart.by, apart.memory_bytes, memory)


@dataclass(eq=False)
class _Handed:
    """A request whose prompt another engine computes, or has computed."""

    request: EngineRequest
    on_update: Callable[[EngineOutput], None]
    tokens: np.ndarray
    prompt: EngineOutput | None = None
    """The prompt engine's last update of the request."""
    lent: tuple[list[int], tuple[int, ...]] | None = None
    """The free slots to which the request's slots return, and the slots of its blocks."""
    aborted: bool = False

    def give_back(self) -> None:
        """Nothing is read from its slots any more."""
        if self.lent is not None:
            free, slots = self.lent
            free += slots
            self.lent = None


class Handover:
    """Transfer of prompts: one engine computes a prompt and copies it; the engine that decodes the
    request takes the blocks that it lacks.

    A request changes hands as a whole. The first engine gets the prompt alone, the second engine
    the original request with the places of its blocks. After any fault before that, the second
    engine computes the missing part as usual. Belongs to one event loop.
    """

    def __init__(
        self, apart: Apart, dispatch: Dispatch, clients: Sequence[EngineClient], block_size: int
    ) -> None:
        self._least = apart.least_tokens
        self._dispatch = dispatch
        self._clients = clients
        self._size = block_size
        self._free: dict[bytes, list[int]] = {}
        """Free slots, by the address of the owning engine; without an address, of all engines."""
        self._under_way: dict[int, _Handed] = {}
        """Requests that no engine decodes yet."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.requests = self.blocks = self.refused = 0
        """Prompts computed apart, blocks handed over, and requests not handed over: no room in the
        memory, or another fault."""

    # ------------------------------------------------------------ requests

    def takes(self, request: EngineRequest) -> bool:
        """Return whether another engine computes the prompt. Not for requests with a deadline, a
        time to live or a pin, which would count twice; nor with results of the prompt itself."""
        handling, params = request.handling, request.params
        length = len(request.token_ids) + len(request.output_ids)
        if (
            length <= max(self._least, self._size)
            or not params.max_tokens
            or request.pooling != "none"
            or params.prompt_logprobs_from is not None
            or handling.timeout is not None
            or handling.cache != Cache()
            or request.suspected
        ):
            return False
        # Possibly cached blocks count as cached; if they are not, the prompt is computed again.
        held = most_blocks(max(self._dispatch.held(request).values(), default=0))
        return length - held * self._size > self._least and self._dispatch.can_prefill

    def submit(self, request: EngineRequest, on_update: Callable[[EngineOutput], None]) -> None:
        """Have one engine compute the prompt; the rest of the request follows."""
        tokens = np.concatenate((request.token_ids, request.output_ids))
        handed = _Handed(request, on_update, tokens)
        self._under_way[request.rid] = handed
        self.requests += 1
        prompt = msgspec.structs.replace(
            request,
            token_ids=tokens,
            output_ids=NO_TOKENS,
            params=_PROMPT_ALONE,
            constraint=None,
            report="",
            prediction=NO_TOKENS,
        )
        at = self._dispatch.place(prompt, prefill=True)
        try:
            self._clients[at].submit(prompt, lambda update: self._computed(handed, at, update))
        except RootlaceError:
            self._under_way.pop(request.rid)
            self._dispatch.hear(EngineOutput(request.rid, finish="error"))
            raise

    def abort(self, rid: int) -> None:
        """Abort the request if no engine decodes it yet."""
        if (handed := self._under_way.get(rid)) is not None:
            handed.aborted = True

    def instead(self, pending: PendingRequest) -> PendingRequest:
        """Return the request to continue elsewhere when its engine dies: the original request in
        place of its prompt alone."""
        handed = self._under_way.pop(pending.request.rid, None)
        if handed is None:
            return pending
        return dataclasses.replace(
            pending, request=handed.request, on_update=self._listener(handed), output_ids=[]
        )

    def close(self) -> None:
        """End all transfers, before the engines stop."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        error = ServerUnavailable("the runtime is stopping")
        for handed in list(self._under_way.values()):
            self._end(handed, EngineOutput(0, finish="error", code=error.code, error=str(error)))

    def counters(self) -> dict[str, int]:
        """Counters for `GetStatus`."""
        return {
            "prompts_apart": self.requests,
            "handed_over_blocks": self.blocks,
            "not_handed_over": self.refused,
        }

    # ------------------------------------------------------------ on the way

    def _computed(self, handed: _Handed, at: int, update: EngineOutput) -> None:
        """Process the engine's update of the prompt."""
        self._dispatch.hear(update)
        if self._under_way.get(update.rid) is not handed:
            return
        if handed.prompt is None:
            handed.prompt = update
        if update.finish is None:
            return
        # A request that made steps fail, or engines die, would do so again.
        failed = update.finish == "error"
        hopeless = failed and isinstance(from_code(update.code, ""), InternalError)
        if self._closed or update.finish == "abort" or hopeless:
            self._end(handed, update)
            return
        task = asyncio.ensure_future(self._hand_over(handed, at, not failed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hand_over(self, handed: _Handed, source: int, computed: bool) -> None:
        try:
            await self._go_on(handed, source, computed)
        except Exception as error:
            if isinstance(error, RootlaceError):  # its client is suspended
                fault = error
            else:
                log.exception("request %d could not be handed over", handed.request.rid)
                fault = InternalError(repr(error))
            self._end(handed, EngineOutput(0, finish="error", code=fault.code, error=str(fault)))

    async def _go_on(self, handed: _Handed, source: int, computed: bool) -> None:
        """Continue the request at another engine, after its prompt was computed or failed."""
        if self._is_over(handed):
            return
        request = handed.request
        target = self._dispatch.place(request)
        slots: tuple[int, ...] = ()
        first, giver = 0, self._clients[source].info
        if computed and target != source:
            first = self._dispatch.held(request).get(target, 0)
            slots = await self._give(handed, source, first)
        if self._is_over(handed):
            handed.give_back()
            return
        del self._under_way[request.rid]
        if not self._dispatch.is_up(target):
            target, slots = self._dispatch.place(request), ()
        self.blocks += len(slots)
        self.refused += not slots
        if slots and handed.lent is not None:
            places = tuple(zip(handed.lent[1], slots, strict=False))
            self._clients[target].send(
                Offered(
                    request.rid,
                    handed.tokens[: (first + len(slots)) * self._size],
                    first,
                    places,
                    request.namespace,
                    request.adapter,
                    giver.handed_at,
                )
            )
        self._clients[target].submit(request, self._listener(handed))

    def _is_over(self, handed: _Handed) -> bool:
        """Return whether the request is over; end an aborted request."""
        if handed.aborted and self._under_way.get(handed.request.rid) is handed:
            self._end(handed, EngineOutput(handed.request.rid, finish="abort"))
        return self._under_way.get(handed.request.rid) is not handed

    async def _give(self, handed: _Handed, source: int, first: int) -> tuple[int, ...]:
        """Checksums of the blocks from number `first` on that lie in the first of its slots."""
        request, size, client = handed.request, self._size, self._clients[source]
        # The last token is computed in any case.
        free = self._free_slots_of(client.info)
        rest = max(len(free) - ((len(handed.tokens) - 1) // size - first), 0)
        slots = tuple(free[rest:])
        del free[rest:]
        if not slots:
            return ()
        tokens = handed.tokens[: (first + len(slots)) * size]
        fields = (tokens, first, slots, request.namespace, request.adapter)
        asking = asyncio.ensure_future(client.ask(HandOver, *fields, patient=True))
        try:
            granted: tuple[int, ...] = await asyncio.wait_for(
                asyncio.shield(asking), HAND_OVER_SECONDS
            )
        except (RootlaceError, TimeoutError, asyncio.CancelledError) as error:
            # Until it has answered, or is dead, it may still write there.
            asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
            asking.add_done_callback(lambda _: free.extend(slots))
            if isinstance(error, asyncio.CancelledError):
                raise
            log.warning("a prompt is computed again: %s", error or "its engine does not answer")
            return ()
        handed.lent = free, slots
        return granted

    def _free_slots_of(self, giver: Ready) -> list[int]:
        """Slots that an engine may write blocks to."""
        if giver.handed_at not in self._free:
            # Slots of lost engines are lost, too.
            there = {getattr(client, "info", giver).handed_at for client in self._clients}
            self._free = {at: slots for at, slots in self._free.items() if at in there}
            self._free[giver.handed_at] = list(range(giver.handed_slots))
        return self._free[giver.handed_at]

    def _listener(self, handed: _Handed) -> Callable[[EngineOutput], None]:
        """Return the listener of the request from now on. At the first update, the blocks handed
        over were read, or never will be, and are given back."""

        def hear(update: EngineOutput) -> None:
            handed.give_back()
            computed = handed.prompt
            if update.facts is not None and computed is not None and computed.facts is not None:
                update.facts = msgspec.structs.replace(
                    update.facts,
                    cached_tokens=min(update.facts.cached_tokens, computed.facts.cached_tokens),
                    queued=update.facts.queued + computed.facts.queued,
                )
            self._dispatch.hear(update)
            handed.on_update(update)

        return hear

    def _end(self, handed: _Handed, update: EngineOutput) -> None:
        self._under_way.pop(handed.request.rid, None)
        handed.give_back()
        update.rid = handed.request.rid
        self._dispatch.hear(update)
        handed.on_update(update)
