"""What stands before every handler: who asks, from where, and whether the server takes it now.

request -> id, source -> page allowed? -> key -> path, content type -> draining? -> handler
reply   <- headers    <- an error of any of these as JSON
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Sequence

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.typedefs import Middleware
from aiohttp.web import BaseRequest, RequestKey, StreamResponse

from rootlace.runtime.processes import request_id
from rootlace.runtime.server.auth import Account, Keys, set_caller
from rootlace.runtime.server.http.body import address_of, nearest, note_source
from rootlace.runtime.server.http.browsers import Pages, is_browser, is_page
from rootlace.runtime.server.http.connections import CONNECTIONS
from rootlace.runtime.server.http.errors import (
    Forbidden,
    Handler,
    InvalidParameter,
    UnknownPath,
    UnsupportedMediaType,
    reply_to,
)
from rootlace.runtime.server.http.openapi import JSON, Endpoint, shown_path
from rootlace.runtime.server.http.reply_headers import begin_telling
from rootlace.runtime.server.model_registry import ModelRegistry
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.spans import note_request
from rootlace.wire.errors import Unauthorized

PROBES = ("/ready", "/health_generate")
_READING = ("GET", "HEAD", "OPTIONS")
# They end what is running, or let it end.
_ENDING = ("/abort", "/abort_request", "/continue_generation")
_TRACE = ("traceparent", "tracestate")


def request_middleware(
    server: ServedModel | ModelRegistry, pages: Pages, endpoints: Sequence[Endpoint]
) -> Middleware:
    """Check a request, and turn every exception into a JSON reply.

    Once the server is stopping, new work is refused. Who only looks (`/health`, `/metrics`, the
    cache) still may, and whoever ends requests.
    """
    drain, keys, front_secret = server.drain, server.keys, server.config.front_secret
    paths = list(dict.fromkeys(map(shown_path, endpoints)))
    takes = {one.path: one.takes for one in endpoints if one.method == "POST"}

    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        pages.check(request)
        if (preflight := pages.preflight(request)) is not None:
            return preflight
        if keys.needed:
            _check_key(request, keys)
        if server.spans is not None:
            continued = {n: request.headers[n] for n in _TRACE if n in request.headers}
            note_request(request.path, continued)
        if request.path in PROBES:
            drain.check()
        missing = request.match_info.http_exception
        if missing is not None and missing.status == 404:
            raise _unknown_path(request, paths)
        if missing is None and request.method == "POST":
            _check_type(request, takes)
        if request.method in _READING or request.path in _ENDING:
            return await handler(request)
        with drain.request():
            return await handler(request)

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(HEADER, "")
        # It stays set: the reply's headers are written after the handler's end, in the same task.
        request_id.set(given if _SENSIBLE.fullmatch(given) else uuid.uuid4().hex)
        begin_telling()
        note_source(request, front_secret)
        connections = request.app[CONNECTIONS]
        connections.begin(request.protocol)
        try:
            return await checked(request, handler)
        except Exception as error:
            return reply_to(request, error)
        finally:
            if request.content.is_eof():  # or the rest of the body is still to be read
                connections.end(request.protocol)

    return handle


# Key ----------------------------------------------------------------------------------------------


KEY_NAME = RequestKey("key_name", str)
"""The name of the API key of a request, where it has one of the file's."""
OPEN_PATHS = frozenset({"/health", "/ready", "/docs", "/openapi.json"})
"""What they tell is the same for everybody."""
# What they change or show is not one key's alone.
OPERATORS_PATHS = ("/flush_cache", "/metrics", "/pause_generation", "/continue_generation")


def _check_key(request: web.Request, keys: Keys) -> None:
    """Find the account of the request's key, which handlers get by `caller`. Raises Unauthorized,
    except for `OPEN_PATHS` and the files of the page, which asks for the key; and Forbidden.

    The key is in `Authorization: Bearer KEY` or, as Anthropic's clients send it, `x-api-key: KEY`.
    """
    account: Account | None = None
    if request.path not in OPEN_PATHS and not is_page(request.path):
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = request.headers.get("x-api-key", "")
        try:
            account = keys.check(token.strip())
        except Unauthorized as error:
            raise Unauthorized(f"{error} (Authorization: Bearer ... or x-api-key: ...)") from None
    if account is not None:
        resource = request.match_info.route.resource
        if resource is not None and resource.canonical.startswith(OPERATORS_PATHS):
            raise Forbidden(f"{request.path} is for the operator's key")
        request[KEY_NAME] = account.name
    set_caller(account)


# Path and content type ----------------------------------------------------------------------------


_OCTETS = "application/octet-stream"


def _check_type(request: web.Request, takes: dict[str, str]) -> None:
    """Raises UnsupportedMediaType for a body of another type than the endpoint takes.

    A web page may send a form, plain text or a body of no type to any server without asking it
    first; for JSON its browser asks, and learns that the page may not. Octets, as some clients call
    JSON, count as JSON: no browser sends them without asking first.
    """
    resource, given = request.match_info.route.resource, request.content_type
    wanted = JSON if resource is None else takes.get(resource.canonical, JSON)
    if "Content-Type" not in request.headers:
        if not (request.body_exists and is_browser(request)):
            return  # such as LiteLLM's to Ollama's `/api/chat`
        given = "of no type"
    if given != wanted and not (given == _OCTETS and wanted == JSON):
        raise UnsupportedMediaType(
            f"the body is {given}: {request.path} takes {wanted}; "
            f"send the header Content-Type: {wanted}"
        )


def _unknown_path(request: web.Request, paths: list[str]) -> UnknownPath:
    near = nearest(request.path.rstrip("/"), paths, at_most=3)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    return UnknownPath(
        f"there is no {request.method} {request.path}.{meant} The paths are {', '.join(paths)}"
    )


# Request id ---------------------------------------------------------------------------------------


HEADER = "X-Request-Id"
# Longer or stranger ids could forge lines of the log.
_SENSIBLE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def chosen_id(given: str | None) -> str | None:
    """The id that a body asks for as `request_id`. Raises InvalidParameter for one that could not
    be a header's: every event of a stream has it."""
    if given is not None and not _SENSIBLE.fullmatch(given):
        raise InvalidParameter(
            "request_id",
            "request_id must have 1 to 128 characters: letters, digits and any of _.:/+=@-",
        )
    return given


# Access log ---------------------------------------------------------------------------------------


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
