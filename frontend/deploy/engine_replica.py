"""One engine, as a replica of a Serve deployment."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.block_store import TransferConfig
from rootlace.runtime.model.hub.local import local_model
from rootlace.runtime.replicas.remote import Host, LineAddress
from rootlace.wire.errors import ServerUnavailable

log = logging.getLogger(__name__)


class EngineReplica:
    """Serve counts it as running once its model is loaded. Requests do not come by Serve: the host
    of the engine looks for the application's gateway, which then speaks with it directly."""

    async def __init__(  # type: ignore[misc]
        self,
        config: bytes,
        version: str,
        digest_key: str,
        drain_seconds: float,
        transfer: bytes,
        prefill: bool = False,
    ) -> None:
        """`prefill`: it computes prompts for others. `transfer`: None or a `TransferConfig`, as
        JSON."""
        engine = msgspec.json.decode(config, type=EngineConfig)
        self._version, self._prefill = version, prefill
        self._drain_seconds = drain_seconds
        self._gateway = serve.get_deployment_handle("gateway")
        model = await asyncio.to_thread(
            local_model, engine.executor.model, allow_pickle=engine.executor.allow_pickle
        )
        executor = dataclasses.replace(engine.executor, model=str(model))
        engine = dataclasses.replace(engine, executor=executor)
        way = msgspec.json.decode(transfer, type=TransferConfig | None)
        if way is not None:
            way = msgspec.structs.replace(way, host=ray.util.get_node_ip_address())
        self._host = Host(engine, bytes.fromhex(digest_key), self._attach, way)
        await self._host.start()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `autoscaling` looks at: requests that wait, and the part of the KV pool in use."""
        found = await self._host.stats()
        used = found["blocks_used"] / max(found["blocks_total"], 1)
        return {"waiting": float(found["waiting"]), "kv": float(used)}

    async def check_health(self) -> None:
        """Serve replaces a replica for which this raises."""
        self._host.check()

    async def __del__(self) -> None:
        """Serve has sent it away, and waits for this as long as for the end of what runs."""
        await self._host.leave(self._drain_seconds)

    async def _attach(self) -> LineAddress | None:
        try:
            asked = self._gateway.attach.remote(self._version, self._prefill)
            address: LineAddress | None = await asked
        except (RayError, RayServeException, ServerUnavailable) as error:
            log.warning("the gateway is not there: %s", type(error).__name__)
            return None
        return address
