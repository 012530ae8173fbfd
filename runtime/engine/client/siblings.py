"""What an engine's client knows of where it stands, where several engines serve one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rootlace.runtime.contracts.block_store import TransferConfig
from rootlace.runtime.contracts.messages import CacheChanged, CostMeasured
from rootlace.runtime.engine.client.cache_orders import Forgets
from rootlace.runtime.engine.client.restarts import Culprits, Submitted


@dataclass(frozen=True)
class ReplicaContext:
    """It is number `replica` of `replicas`, which tell what they hold by digests of one key.

    `on_told` hears what the engine says of its cache and its steps; `on_death` is given the
    requests that others may go on with, and who was in the steps in which it died
    (`InFlight.judge`); `on_return` is called when it is there again, and `on_gone`, with the
    reason, before its last requests leave, when it will not be. `forgets` and `culprits` are those
    of all of them; `next_rid` gives ids that no other request has. `transfer`: how they hand each
    other blocks, if they do.
    """

    replica: int
    replicas: int
    digest_key: bytes
    on_told: Callable[[CacheChanged | CostMeasured], None]
    on_death: Callable[[list[Submitted], Mapping[int, int]], None]
    on_return: Callable[[], None]
    on_gone: Callable[[str], None]
    forgets: Forgets
    culprits: Culprits
    next_rid: Callable[[], int]
    transfer: TransferConfig | None = None
