"""Middleware before every handler: finds the caller, and checks that the server takes the request.

request -> id, source -> page allowed? -> key -> path, content type -> draining? -> handler
reply   <- headers    <- an error of any of these as JSON

Sections: before every handler, source, key, path and content type, access log, browsers.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.typedefs import Middleware
from aiohttp.web import BaseRequest, RequestKey, StreamResponse

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.processes import request_id
from rootlace.runtime.server.auth import ASKER, Account, Asker, Keys
from rootlace.runtime.server.http.body import nearest
from rootlace.runtime.server.http.connections import (
    CONNECTIONS,
    REQUEST_ID,
    SEEN,
    SENSIBLE_ID,
    SOURCE_HEADER,
    Seen,
    owner_of,
)
from rootlace.runtime.server.http.endpoint import JSON, Endpoint, shown_path
from rootlace.runtime.server.http.errors import (
    Forbidden,
    Handler,
    NotFound,
    UnsupportedMediaType,
    reply_to,
)
from rootlace.runtime.server.model_registry import ModelRegistry
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.telemetry import note_request
from rootlace.wire.errors import Unauthorized

PROBES = ("/ready", "/health_generate")
_READING = ("GET", "HEAD", "OPTIONS")
# Paths that end running requests, or let them end.
_ENDING = ("/abort", "/abort_request", "/continue_generation")
_TRACE = ("traceparent", "tracestate")
CACHE = "x-rootlace-cache"
WARNING = "X-Rootlace-Warning"


def request_middleware(
    server: ServedModel | ModelRegistry, pages: Pages, endpoints: Sequence[Endpoint]
) -> Middleware:
    """Make the middleware that checks a request, and turns every exception into a JSON reply.

    A stopping server refuses new work. Reading requests (`/health`, `/metrics`, the cache) and
    requests that end others are still answered.
    """
    drain, keys, front_secret = server.drain, server.keys, server.config.front_secret
    paths = list(dict.fromkeys(map(shown_path, endpoints)))
    takes = {one.path: one.takes for one in endpoints if one.method == "POST"}

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        client_id = request.headers.get(REQUEST_ID, "")
        # The id stays set: the same task writes the reply's headers after the handler's end.
        request_id.set(client_id if SENSIBLE_ID.fullmatch(client_id) else uuid.uuid4().hex)
        request.app[CONNECTIONS].begin(request.protocol)
        SEEN.set(Seen())
        _note_source(request, front_secret)
        computes = False
        try:
            pages.check(request)
            if request.method == "OPTIONS" and (preflight := pages.preflight(request)) is not None:
                return preflight
            if keys.needed:
                _check_key(request, keys)
            if server.spans is not None:
                continued = {n: request.headers[n] for n in _TRACE if n in request.headers}
                note_request(request.path, continued)
            if request.path in PROBES and drain.begun:
                raise drain.refusal()
            missing = request.match_info.http_exception
            if missing is not None and missing.status == 404:
                raise _unknown_path(request, paths)
            if missing is None and request.method == "POST":
                _check_type(request, takes)
            if request.method not in _READING and request.path not in _ENDING:
                if drain.begun:
                    raise drain.refusal()
                computes = True
                drain.requests += 1
            return await handler(request)
        except Exception as error:
            return reply_to(request, error)
        finally:
            drain.requests -= computes
            if request.content.is_eof():  # or the rest of the body is still to be read
                request.app[CONNECTIONS].end(request.protocol)

    return handle


def header_writer(
    server: ServedModel | ModelRegistry, pages: Pages
) -> Callable[[web.Request, StreamResponse], Awaitable[None]]:
    """Make the function that writes the common headers of all replies, and counts replies."""
    counter = lru_cache(1024)(server.metrics.http.labels)

    async def add_headers(request: web.Request, response: StreamResponse) -> None:
        response.headers[REQUEST_ID] = request_id.get()
        if (seen := SEEN.get()) is not None:
            for warning in seen.warnings:
                response.headers.add(WARNING, warning)
            if seen.cached is not None:
                value: dict[str, Any] = {"cached": seen.cached}
                if seen.prompt:
                    value["prompt"] = seen.prompt
                if seen.reports:
                    value["reports"] = seen.reports
                response.headers[CACHE] = msgspec.json.encode(value).decode()
        if pages.origins:
            response.headers["Vary"] = "Origin"
            origin = request.headers.get("Origin")
            if origin is not None and pages.may_read(origin):
                response.headers["Access-Control-Allow-Origin"] = origin
                response.headers["Access-Control-Expose-Headers"] = _EXPOSED
        resource = request.match_info.route.resource
        # All unknown paths count as one, however many are tried.
        path = "" if resource is None else resource.canonical
        counter(path, str(response.status)).inc()

    return add_headers


# Source -------------------------------------------------------------------------------------------


_ADDRESS = RequestKey("address", str)


def _note_source(request: web.Request, front_secret: str) -> None:
    """Note the caller for the handler's tasks: the client's address and, behind `#`, the
    connection. With its secret, a front names the address ("": unknown). Of IPv6, a /64 counts."""
    if front_secret:
        secret, _, address = request.headers.get(SOURCE_HEADER, "").partition(" ")
        if hmac.compare_digest(secret.encode("utf-8", "surrogateescape"), front_secret.encode()):
            request[_ADDRESS] = address
    peer = None if request.transport is None else request.transport.get_extra_info("peername")
    connection = (str(peer[1]),) if isinstance(peer, tuple) else ()
    address = owner_of(address_of(request))
    ASKER.set(Asker(None, "#".join((address, *connection)), address, connection))


def address_of(request: web.BaseRequest) -> str:
    """Return the client's address, or "unknown"."""
    return request.get(_ADDRESS) or request.remote or "unknown"


# Key ----------------------------------------------------------------------------------------------


KEY_NAME = RequestKey("key_name", str)
"""Name of a request's API key, if the key is one of the file's."""
OPEN_PATHS = frozenset({"/health", "/ready", "/docs", "/openapi.json"})
"""Paths whose replies are the same for everybody."""
# Paths whose effects or replies concern more than one key.
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
        ASKER.set(Asker.of(account, ASKER.get().source))


# Path and content type ----------------------------------------------------------------------------


_OCTETS = "application/octet-stream"
OLLAMA_PATHS = "/api/"


def _check_type(request: web.Request, takes: dict[str, str]) -> None:
    """Raise UnsupportedMediaType for a body of another type than the endpoint takes.

    A web page may send a form, plain text or a body of no type to any server. For JSON its browser
    asks the server first, and learns that the page may not. Octets, as some clients label JSON,
    count as JSON: no browser sends them without asking first. Ollama's paths take a body of no type
    from clients that are no browser, such as LiteLLM.
    """
    resource, content_type = request.match_info.route.resource, request.content_type
    wanted = JSON if resource is None else takes.get(resource.canonical, JSON)
    if "Content-Type" not in request.headers:
        if (wanted == JSON and not request.body_exists) or (
            request.path.startswith(OLLAMA_PATHS) and not is_browser(request)
        ):
            return
        content_type = "of no type"
    if content_type != wanted and not (content_type == _OCTETS and wanted == JSON):
        raise UnsupportedMediaType(
            f"the body is {content_type}: {request.path} takes {wanted}; "
            f"send the header Content-Type: {wanted}"
        )


def _unknown_path(request: web.Request, paths: list[str]) -> NotFound:
    near = nearest(request.path.rstrip("/"), paths, at_most=3)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    return NotFound(
        f"there is no {request.method} {request.path}.{meant} The paths are {', '.join(paths)}"
    )


# Access log ---------------------------------------------------------------------------------------


class AccessLogger(AbstractAccessLogger):
    """Access log: caller, request, status and time; no body and no query, which could hold prompts
    or keys."""

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
            "request_id": response.headers.get(REQUEST_ID, "-"),
            "user_agent": request.headers.get("User-Agent", "-"),
        }
        self.logger.info(
            '%(client)s %(key)s "%(method)s %(path)s" %(status)s %(bytes)s %(seconds)ss '
            '%(request_id)s "%(user_agent)s"',
            fields,
            extra={"fields": fields},
        )


# Browsers -----------------------------------------------------------------------------------------
#
# Protection of a server without a key from web pages, except allowed ones.
#
# A page in a browser may send requests to servers on the same machine. It cannot read replies of
# another origin unless the server allows it (CORS), but the requests still cost. A page whose own
# host name is made to resolve to this machine (DNS rebinding) could read replies.


_LOCAL = "localhost"
_PREFLIGHT_SECONDS = "600"
_EXPOSED = "X-Request-Id, X-Rootlace-Cache, X-Rootlace-Warning, Retry-After, X-Should-Retry"


class Pages(msgspec.Struct, frozen=True):
    """Origins that may ask ("*": any), and host names of this server.

    `guarded`: no key keeps strangers out, so pages of other origins are refused. `local`: the
    server listens on this machine only, so foreign host names are refused, too.
    """

    origins: frozenset[str]
    hosts: frozenset[str]
    guarded: bool
    local: bool

    @classmethod
    def of(cls, config: GatewayConfig) -> Self:
        return cls(
            origins=frozenset(_listed(config.cors_origins)),
            hosts=frozenset(_listed(config.allowed_hosts)),
            guarded=not (config.api_key or config.keys_file),
            local=_is_loopback(config.host),
        )

    def may_read(self, origin: str) -> bool:
        return "*" in self.origins or origin.lower() in self.origins

    def check(self, request: web.Request) -> None:
        """Raise Forbidden for a host name or a page that is not allowed."""
        if not self.guarded:
            return
        name, is_local = _host_named(f"//{request.host}")
        if self.local and not (is_local or (name and self.hosts & {name, "*"})):
            raise Forbidden(
                f"this server is not known as {name or request.host!r}: start it with "
                "--allowed-hosts NAME, or with an API key"
            )
        if not is_browser(request):
            return
        origin = request.headers.get("Origin", "")
        if not self.may_read(origin) and self._is_cross_origin(request, origin):
            raise Forbidden(
                f"pages of {origin or 'other origins'} may not ask: start the server with "
                f"--cors-origins {origin or 'ORIGIN'}"
            )

    def preflight(self, request: web.Request) -> web.Response | None:
        """Answer a page's preflight request; None for other requests of this method. Raises
        Forbidden where the page may not ask."""
        origin = request.headers.get("Origin")
        method = request.headers.get("Access-Control-Request-Method")
        if origin is None or method is None:
            return None
        if not self.may_read(origin):
            raise Forbidden(
                f"pages of {origin} may not ask: start the server with --cors-origins {origin}"
            )
        wanted = request.headers.get("Access-Control-Request-Headers", "Authorization")
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": method,
                "Access-Control-Allow-Headers": wanted,
                "Access-Control-Max-Age": _PREFLIGHT_SECONDS,
            },
        )

    def _is_cross_origin(self, request: web.Request, origin: str) -> bool:
        """Return whether a page of another origin asks, each port of this machine being an origin.

        Browsers send Sec-Fetch-Site with every request, but Origin not with that of an image or a
        link. A link to our own page may be followed: the linking page sees nothing of it.
        """
        site = request.headers.get("Sec-Fetch-Site")
        if site in ("cross-site", "same-site"):
            return not (request.method == "GET" and is_page(request.path))
        if site == "same-origin" or not origin:
            return False
        _, separator, host = origin.lower().partition("://")
        if separator and host == request.host.lower():
            return False
        return _host_named(origin)[0] not in self.hosts  # a proxy may have rewritten the Host


def is_page(path: str) -> bool:
    """Return whether the path is that of the page or of one of its files."""
    return path == "/" or path.startswith("/page/")


def is_browser(request: web.Request) -> bool:
    """Return whether a browser asks: browsers name the page's origin with each POST to another."""
    return bool(request.headers.get("Origin")) or "Sec-Fetch-Site" in request.headers


def _listed(names: str) -> list[str]:
    return [name.strip().rstrip("/").lower() for name in names.split(",") if name.strip()]


@lru_cache(64)
def _host_named(url: str) -> tuple[str, bool]:
    """Return the host of `url`, and whether it is certainly this machine: an address cannot be made
    to resolve elsewhere."""
    try:
        name = (urlsplit(url).hostname or "").rstrip(".").lower()
    except ValueError:  # such as an address that lacks its closing bracket
        return "", False
    if name == _LOCAL or name.endswith("." + _LOCAL):
        return name, True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name, False
    return name, True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == _LOCAL
