"""Deployments of a Serve application: engines, and the gateway as its ingress. Imports Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import StreamingResponse

from rootlace.runtime.config import EngineConfig, RuntimeConfig
from rootlace.runtime.contracts.block_store import TransferConfig
from rootlace.runtime.model.hub.local import known_name, local_model
from rootlace.runtime.replicas.handover import apart_of
from rootlace.runtime.replicas.remote import Host, LineAddress, Meeting
from rootlace.runtime.replicas.replicas import Replicas
from rootlace.runtime.server.app import Listening
from rootlace.runtime.server.app import serve as serve_models
from rootlace.runtime.server.http.connections import passed_on, passed_to
from rootlace.wire.errors import ServerUnavailable

# Engine -------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


class EngineReplica:
    """Deployment of an engine, running once its model is loaded. Requests bypass Serve: the
    engine's host connects to the application's gateway, which sends them."""

    async def __init__(  # type: ignore[misc]
        self,
        config: bytes,
        version: str,
        digest_key: str,
        drain_seconds: float,
        transfer: bytes,
        prefill: bool = False,
    ) -> None:
        """Start the engine. `prefill`: it computes prompts for others. `transfer`: None or a
        `TransferConfig`, as JSON."""
        engine = msgspec.json.decode(config, type=EngineConfig)
        self._version, self._prefill = version, prefill
        self._drain_seconds = drain_seconds
        self._gateway = serve.get_deployment_handle("gateway")
        model = await asyncio.to_thread(
            local_model, engine.executor.model, allow_pickle=engine.executor.allow_pickle
        )
        executor = dataclasses.replace(engine.executor, model=str(model))
        if executor.draft_model:
            drafting = await asyncio.to_thread(
                local_model, executor.draft_model, allow_pickle=executor.allow_pickle
            )
            executor = dataclasses.replace(executor, draft_model=str(drafting))
        engine = dataclasses.replace(engine, executor=executor)
        link = msgspec.json.decode(transfer, type=TransferConfig | None)
        if link is not None:
            link = msgspec.structs.replace(link, host=ray.util.get_node_ip_address())
        self._host = Host(engine, bytes.fromhex(digest_key), self._attach, link)
        await self._host.start()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return waiting requests and the used fraction of the KV pool, for autoscaling."""
        stats = await self._host.stats()
        used = stats["blocks_used"] / max(stats["blocks_total"], 1)
        return {"waiting": float(stats["waiting"]), "kv": float(used)}

    async def check_health(self) -> None:
        """Raise if Serve must replace the replica."""
        self._host.check()

    async def __del__(self) -> None:
        """Leave once Serve removes the replica; Serve waits here for running requests to end."""
        await self._host.leave(self._drain_seconds)

    async def _attach(self) -> LineAddress | None:
        try:
            reply = self._gateway.attach.remote(self._version, self._prefill)
            address: LineAddress | None = await reply
        except (RayError, RayServeException, ServerUnavailable) as error:
            log.warning("the gateway is not there: %s", type(error).__name__)
            return None
        return address


# Gateway ------------------------------------------------------------------------------------------


class Front:
    """Deployment of the gateway, which has all branches and ids of running requests. Serve's HTTP
    requests are passed to the gateway's own HTTP server; programs connect to the gateway itself."""

    async def __init__(  # type: ignore[misc]
        self, config: bytes, version: str, digest_key: str, most: int, prefill: int, *engines: Any
    ) -> None:
        """Start a gateway for at most `most` replicas of the deployments `engines`, `prefill` of
        which compute prompts for the others."""
        runtime = msgspec.json.decode(config, type=RuntimeConfig)
        address = ray.util.get_node_ip_address()
        model = await asyncio.to_thread(
            local_model, runtime.gateway.model, allow_pickle=runtime.engine.executor.allow_pickle
        )
        gateway = dataclasses.replace(
            runtime.gateway,
            model=str(model),
            served_name=runtime.gateway.served_name or known_name(runtime.gateway.model),
            program_address=runtime.gateway.program_address.replace(
                "NODE", f"[{address}]" if ":" in address else address
            ),
            front_secret=secrets.token_hex(16),
        )
        runtime = dataclasses.replace(runtime, gateway=gateway)
        self._secret = gateway.front_secret
        self._version = version
        self._meeting = Meeting(address)
        self._drain = asyncio.Event()
        self._listening: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
        engines_key = bytes.fromhex(digest_key)
        apart = apart_of(gateway, prefill)
        self._serving = asyncio.create_task(
            serve_models(
                [runtime],
                self._listening.set_result,
                drain=self._drain,
                engines=lambda: Replicas.start(
                    runtime.engine, most, apart=apart, meeting=self._meeting, digest_key=engines_key
                ),
            )
        )
        self._client = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def attach(self, version: str, prefill: bool) -> LineAddress | None:
        """Return the address that an engine must connect to. None: the engine is of another version
        of the application, or all places are taken."""
        return self._meeting.attach(prefill) if version == self._version else None

    async def __call__(self, request: Request) -> StreamingResponse:
        either: set[asyncio.Future[Any]] = {self._listening, self._serving}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await self.check_health()
        address = self._listening.result().http_address
        assert address is not None
        answer = await passed_to(self._client, address, request, self._secret)

        async def content() -> AsyncIterator[bytes]:
            async with answer:
                async for piece in answer.content.iter_any():
                    yield piece

        return StreamingResponse(
            content(), answer.status, headers=dict(passed_on(answer.headers.items()))
        )

    async def check_health(self) -> None:
        """Raise if Serve must replace the replica."""
        if self._serving.done():
            self._serving.result()
            raise ServerUnavailable("the gateway has ended")

    async def __del__(self) -> None:
        """Drain running requests for the gateway's `drain_seconds` once Serve removes it."""
        self._drain.set()
        if not self._listening.done():
            self._serving.cancel()
        await asyncio.wait({self._serving})
        await self._client.close()
        self._meeting.close()
