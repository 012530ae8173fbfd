"""Bodies of requests over HTTP, sent to a server whose engine has no model."""

import asyncio
import functools

from rootlace.runtime.assets import demo_model
from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.runtime.server.tokenizer import Tokenizer
from tests.server.conftest import served

PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/score", "/api/chat", "/generate", "/tokenize"),
)


class Posted:
    """Sends a body to each of `PATHS`."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._context = served(Tokenizer.read(FolderSource(demo_model())))
        self._http = self._runner.run(self._context.__aenter__())

    def post(self, body: bytes) -> None:
        self._runner.run(self._post(body))

    async def _post(self, body: bytes) -> None:
        for path in PATHS:
            async with self._http.post(path, data=body) as reply:
                said = await reply.read()
            assert reply.status < 500 and b"Traceback" not in said, (path, said)

    def close(self) -> None:
        self._runner.run(self._context.__aexit__(None, None, None))
        self._runner.close()


posted = functools.cache(Posted)
