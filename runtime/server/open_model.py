"""Open a served model: start its engine, and read its texts meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from rootlace.runtime.config import EngineConfig, GatewayConfig
from rootlace.runtime.engine.client.engine_client import EngineClient
from rootlace.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from rootlace.runtime.server.model_texts import ModelTexts
    from rootlace.runtime.server.served_model import Engine, ServedModel
    from rootlace.runtime.server.server_state import ServerState


async def open_model(
    config: GatewayConfig,
    engine_config: EngineConfig,
    on_exit: Callable[[str], None],
    server_state: ServerState | None = None,
    meanwhile: Callable[[], object] = lambda: None,
    start: Callable[[], Coroutine[Any, Any, Engine]] | None = None,
) -> ServedModel:
    """Start the engine, and read the model's files meanwhile. `on_exit`: of `EngineClient`.

    `meanwhile` is called in another thread while the engine starts, which takes longer. After an
    exception or a cancelled call nothing is left running. `start` gives engines that run elsewhere.
    End the model with `close_model`.
    """
    # Read the texts, and import their readers, while the engine loads the model's weights.
    begin = start or partial(_start, engine_config, config, on_exit)
    starting: asyncio.Task[Engine] = asyncio.create_task(begin())
    try:
        # The modules then reuse the memory that reading the texts took for a while.
        texts = await asyncio.to_thread(_read_texts, config)
        await asyncio.to_thread(meanwhile)
        engine = await asyncio.shield(starting)
    except BaseException:
        await _abandon(starting)
        raise
    from rootlace.runtime.server.served_model import ServedModel

    model = ServedModel(config, engine, texts.tokenizer, texts.chat, texts.eos_ids, server_state)
    model.own_pooling = texts.source.pooling()
    values, origins = texts.sampling
    model.model_info = msgspec.structs.replace(
        model.model_info,
        caching=engine_config.cache.enabled,
        sampling=values,
        sampling_from=origins,
    )
    if model.model_info.labels is None:
        texts.log_sampling(model.model_info.name)
    if config.warm_up:
        from rootlace.runtime.server.http.admin import warm_up

        try:
            await warm_up(model, config.replicas)
        except BaseException:
            await close_model(model)
            raise
    return model


async def _start(
    config: EngineConfig, gateway: GatewayConfig, on_exit: Callable[[str], None]
) -> Engine:
    if gateway.disaggregate >= gateway.replicas:
        raise InvalidRequest(f"disaggregate {gateway.disaggregate}: there must be more replicas")
    if gateway.replicas == 1:
        return await EngineClient.start(config, on_exit)
    from rootlace.runtime.replicas.handover import apart_of
    from rootlace.runtime.replicas.replicas import Replicas

    apart = apart_of(gateway, gateway.disaggregate)
    return await Replicas.start(config, gateway.replicas, on_exit, apart)


async def close_model(model: ServedModel) -> None:
    """End all sessions and the engine."""
    model.close()
    await model.engine.stop()


def _read_texts(config: GatewayConfig) -> ModelTexts:
    # A late import: the engine should not wait for the readers' import.
    from rootlace.runtime.server.model_texts import ModelTexts

    return ModelTexts.read(config)


async def _abandon(starting: asyncio.Task[Engine]) -> None:
    starting.cancel()
    try:
        engine = await starting
    except (asyncio.CancelledError, Exception):
        return
    await engine.stop()
