"""API key check."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Middleware

from rootlace.runtime.gateway.http.access_log import KEY_NAME
from rootlace.runtime.gateway.http.errors import Forbidden, Handler
from rootlace.runtime.gateway.http.page import is_page
from rootlace.runtime.gateway.keys.account import Account, set_caller
from rootlace.runtime.gateway.keys.keys import Keys
from rootlace.wire.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/ready", "/docs", "/openapi.json"})
"""What they tell is the same for everybody."""

# What they change or show is not one key's alone.
OPERATORS_PATHS = ("/flush_cache", "/metrics", "/pause_generation", "/continue_generation")


def api_key_middleware(keys: Keys) -> Middleware:
    """Refuse requests without a key, except to `OPEN_PATHS` and to the files of the page, which
    asks for it; whose key it is, handlers learn from `caller`.

    It is given as `Authorization: Bearer KEY` or, as Anthropic's clients do, `x-api-key: KEY`.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        account: Account | None = None
        if request.path not in OPEN_PATHS and not is_page(request.path):
            try:
                account = keys.check(_given(request))
            except Unauthorized as error:
                raise Unauthorized(
                    f"{error} (Authorization: Bearer ... or x-api-key: ...)"
                ) from None
        if account is not None:
            resource = request.match_info.route.resource
            if resource is not None and resource.canonical.startswith(OPERATORS_PATHS):
                raise Forbidden(f"{request.path} is for the operator's key")
            request[KEY_NAME] = account.name
        set_caller(account)
        return await handler(request)

    return check


def _given(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = request.headers.get("x-api-key", "")
    return token.strip()
