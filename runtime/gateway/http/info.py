"""What is served and how it is doing: models, health, server information; and the cache flush."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.replies import check_model, json_response, model_names


class Info:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = int(time.time())

    async def models(self, request: web.Request) -> web.Response:
        names = model_names(self._gateway)
        # What follows the list is Anthropic's.
        more = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        data = [self._model(name) for name in names]
        return json_response({"object": "list", "data": data, **more})

    async def model(self, request: web.Request) -> web.Response:
        return json_response(self._model(check_model(self._gateway, request.match_info["name"])))

    async def model_info(self, request: web.Request) -> web.Response:
        info = self._gateway.model_info
        return json_response(
            {
                "model_path": info.path,
                "tokenizer_path": info.path,
                "is_generation": info.labels is None,
                "served_model_name": info.name,
                "context_length": info.context_length,
                "vocab_size": info.vocab_size,
                "block_size": info.block_size,
                "capacity_tokens": info.capacity_tokens,
                "program_address": self._gateway.program_address,
            }
        )

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": metadata.version("rootlace")})

    async def tokenizer_info(self, request: web.Request) -> web.Response:
        """The tokenizer's configuration and the chat template, as lm-eval asks for them."""
        gateway = self._gateway
        template = {} if gateway.chat.source is None else {"chat_template": gateway.chat.source}
        return json_response({**gateway.tokenizer.config, **template})

    async def server_info(self, request: web.Request) -> web.Response:
        info = self._gateway.model_info
        status = await self._gateway.status()
        return json_response(
            {
                "version": metadata.version("rootlace"),
                "model_path": info.path,
                "served_model_name": info.name,
                "context_length": info.context_length,
                "max_total_num_tokens": status.get("blocks_total", 0) * info.block_size,
                "page_size": info.block_size,
                "disable_radix_cache": not self._gateway.caching,
                "program_address": self._gateway.program_address,
                "healthy": self._gateway.healthy,
                "status": status,
            }
        )

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Forget every cached prefix that no running request uses."""
        await request.read()
        await self._gateway.flush()
        return web.Response(text="Cache flushed.\n")

    def _model(self, name: str) -> dict[str, Any]:
        info = self._gateway.model_info
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": self._started,
            "created_at": datetime.fromtimestamp(self._started, UTC).isoformat(),
            "owned_by": "rootlace",
            "root": info.path,
            "parent": None if name == info.name else info.name,
            "max_model_len": info.context_length,
        }
