"""The answer to a path that does not exist, or not with that method: which ones do."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from rootlace.runtime.gateway.http.endpoint import Endpoint
from rootlace.runtime.gateway.http.errors import Handler, UnknownPath
from rootlace.runtime.gateway.http.reference import shown_path
from rootlace.runtime.gateway.http.suggestions import nearest


def unknown_path_middleware(endpoints: Sequence[Endpoint]) -> Middleware:
    """Raise UnknownPath, which lists the paths, where no route fits."""
    paths = list(dict.fromkeys(map(shown_path, endpoints)))

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        error = request.match_info.http_exception
        if error is None or error.status != 404:
            return await handler(request)
        near = nearest(request.path.rstrip("/"), paths, at_most=3)
        meant = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UnknownPath(
            f"there is no {request.method} {request.path}.{meant} The paths are {', '.join(paths)}"
        )

    return check
