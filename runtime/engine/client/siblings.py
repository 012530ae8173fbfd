"""The context of an engine's client among several engines of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rootlace.runtime.contracts.block_store import TransferConfig
from rootlace.runtime.contracts.messages import CacheChanged, CostMeasured
from rootlace.runtime.engine.client.cache_orders import Forgets
from rootlace.runtime.engine.client.restarts import Culprits, Submitted


@dataclass(frozen=True)
class ReplicaContext:
    """The engine is number `replica` of `replicas`; all report their caches by digests of one key.

    `on_told` receives the engine's reports on cache and steps. `on_death` receives requests that
    siblings may continue, and the requests of the dying steps (`InFlight.judge`). `on_return` is
    called when the engine is back. `on_gone` is called with the reason before the last requests
    leave, when it will not return. All engines share `forgets` and `culprits`; `next_rid` gives
    unused ids. `transfer`: block transfer between them, if any.
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
