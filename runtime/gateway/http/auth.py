"""API key check."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Middleware

from rootlace.runtime.gateway.http.errors import Handler
from rootlace.runtime.gateway.http.page import is_page
from rootlace.wire.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/ready"})


def api_key_middleware(api_key: str) -> Middleware:
    """Refuse requests without the key, except to `OPEN_PATHS` and to the files of the page, which
    asks for it.

    It is given as `Authorization: Bearer KEY` or, as Anthropic's clients do, `x-api-key: KEY`.
    """
    expected = api_key.encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        # compare_digest takes as long for a key that is nearly right as for any other.
        known = hmac.compare_digest(_given(request), expected)
        free = request.path in OPEN_PATHS or is_page(request.path)
        if not known and not free:
            raise Unauthorized(
                "the API key is missing or wrong (Authorization: Bearer ... or x-api-key: ...)"
            )
        return await handler(request)

    return check


def _given(request: web.Request) -> bytes:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = request.headers.get("x-api-key", "")
    return token.strip().encode("utf-8", "surrogateescape")
