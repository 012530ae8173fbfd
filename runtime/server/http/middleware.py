"""The access log: one message per reply."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Sequence

from aiohttp import hdrs, web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.typedefs import Middleware
from aiohttp.web import BaseRequest, RequestKey, StreamResponse

from rootlace.runtime.logs import request_id
from rootlace.runtime.server.http.body import address_of, nearest
from rootlace.runtime.server.http.errors import (
    Handler,
    InvalidParameter,
    UnknownPath,
    UnsupportedMediaType,
)
from rootlace.runtime.server.http.openapi import JSON, Endpoint, shown_path
from rootlace.runtime.server.server_state import Drain

# Content type -------------------------------------------------------------------------------------
#
# Refuses bodies that do not say that they are what an endpoint takes.
#
# A web page may send a form or plain text to any server without asking it first; for JSON its
# browser asks, and learns that the page may not.


_NO_TYPE = "application/octet-stream"


def checked(endpoint: Endpoint) -> Handler:
    """The endpoint's handler, which raises UnsupportedMediaType for a body of another type than
    the endpoint takes. One of no type is taken for JSON: aiohttp calls it octets, as its clients
    do, and no browser sends octets without asking first."""
    if endpoint.method != hdrs.METH_POST:
        return endpoint.handler  # it reads no body

    async def handle(request: web.Request) -> web.StreamResponse:
        given = request.content_type
        if given != endpoint.takes and not (given == _NO_TYPE and endpoint.takes == JSON):
            raise UnsupportedMediaType(
                f"the body is {given}: {request.path} takes {endpoint.takes}; "
                f"send the header Content-Type: {endpoint.takes}"
            )
        return await endpoint.handler(request)

    return handle


# Draining -----------------------------------------------------------------------------------------
#
# What HTTP clients see of a server that is stopping.


PROBES = ("/ready", "/health_generate")
_READING = ("GET", "HEAD", "OPTIONS")
# They end what is running, or let it end.
_ENDING = ("/abort", "/abort_request", "/continue_generation")


def drain_middleware(drain: Drain) -> Middleware:
    """Refuse new work once the server is stopping, and count what is being answered.

    Who only looks (`/health`, `/metrics`, the cache) still may, and whoever ends requests.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in PROBES:
            drain.check()
        if request.method in _READING or request.path in _ENDING:
            return await handler(request)
        with drain.request():
            return await handler(request)

    return check


# Request id ---------------------------------------------------------------------------------------
#
# The id of a request: the client's, or one of ours, in every reply and in the log.


HEADER = "X-Request-Id"
# Longer or stranger ids could forge lines of the log.
_SENSIBLE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


@web.middleware
async def request_id_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Choose the id; all that is logged for this request has it."""
    given = request.headers.get(HEADER, "")
    # It stays set: the reply's headers are written after the handler's end, in the same task.
    request_id.set(given if _SENSIBLE.fullmatch(given) else uuid.uuid4().hex)
    return await handler(request)


def chosen_id(given: str | None) -> str | None:
    """The id that a body asks for as `request_id`. Raises InvalidParameter for one that could not
    be a header's: every event of a stream has it."""
    if given is not None and not _SENSIBLE.fullmatch(given):
        raise InvalidParameter(
            "request_id",
            "request_id must have 1 to 128 characters: letters, digits and any of _.:/+=@-",
        )
    return given


def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Write the id into the reply's headers."""
    response.headers[HEADER] = request_id.get()


# Unknown paths ------------------------------------------------------------------------------------
#
# The answer to a path that does not exist, or not with that method: which ones do.


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


# Access log ---------------------------------------------------------------------------------------


KEY_NAME = RequestKey("key_name", str)
"""The name of the API key of a request, where it has one of the file's."""


class AccessLogger(AbstractAccessLogger):
    """Who asked for what, the status, and how long it took; no body and no query, which could hold
    prompts or keys."""

    @property
    def enabled(self) -> bool:
        return self.logger.isEnabledFor(logging.INFO)

    def log(self, request: BaseRequest, response: StreamResponse, time: float) -> None:
        fields = {
            "client": address_of(request),
            "key": request.get(KEY_NAME, "-"),
            "method": request.method,
            "path": request.rel_url.raw_path,
            "status": response.status,
            "bytes": response.body_length,
            "seconds": round(time, 6),
            "request_id": response.headers.get(HEADER, "-"),
            "user_agent": request.headers.get("User-Agent", "-"),
        }
        self.logger.info(
            '%(client)s %(key)s "%(method)s %(path)s" %(status)s %(bytes)s %(seconds)ss '
            '%(request_id)s "%(user_agent)s"',
            fields,
            extra={"fields": fields},
        )
