"""Connections of the HTTP server: their bound, and facts about their requests.

Sections: connections, source, request id, reply headers.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rootlace.runtime import processes
from rootlace.runtime.server.server_state import RareLog, kept_for_others, plenty

log = logging.getLogger(__name__)

# Connections --------------------------------------------------------------------------------------
#
# Connections are bounded: each takes a descriptor, and a process without descriptors accepts
# nobody.


MOST = 4096
"""Default bound, where there are enough descriptors."""
LOOK_SECONDS = 0.1
"""Time between searches for an idle connection when the last search found none."""
FIRST_SECONDS = 1.0
"""Time that a new connection has for its first request before it counts as idle."""
_SHOWN_CHARACTERS = 200
"""Most characters logged of data that is not HTTP."""

_BODY = (
    b'{"error":{"message":"the server has too many connections; try again","type":'
    b'"service_unavailable_error","param":null,"code":"overloaded"}}'
)
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nRetry-After: 1\r\nConnection: close\r\n\r\n%s" % (len(_BODY), _BODY)
)
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def most_connections(configured: int | None) -> int:
    """Return the bound; half of the descriptors are left for programs, files and engines."""
    return configured or max(min(MOST, processes.descriptors() // 2), 1)


@lru_cache(1024)
def owner_of(address: str) -> str:
    """Return the owner of an address: of IPv6 the /64, in which one owner may have any address."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:  # of a Unix socket
        return address
    if isinstance(known, ipaddress.IPv4Address):
        return address
    if known.ipv4_mapped is not None:
        return str(known.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(known), 64), strict=False))


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """Adapter of aiohttp's log. Data that is not HTTP is its sender's fault: logged rarely, in one
    line."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("aiohttp.server"), {})
        self._rare = RareLog(log)

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        if not isinstance(exc_info, HttpProcessingError):
            super().exception(msg, *args, exc_info=exc_info, **more)
            return
        message = (exc_info.message.splitlines() or [type(exc_info).__name__])[0][
            :_SHOWN_CHARACTERS
        ]
        self._rare.warn("a request that is not HTTP was refused: %s", message)


class Connections:
    """Open connections, at most `limit`, and which of them wait for a request.

    The last eighth is for addresses that have less than the mean.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._plenty = plenty(limit)
        self._address: dict[web.RequestHandler, str] = {}
        """Address of each connection, in the form of `owner_of`."""
        self._count: Counter[str] = Counter()
        self._idle: dict[str, dict[web.RequestHandler, float]] = {}
        """Connections waiting for a request, by address, longest-waiting first. The value is the
        loop time from which a connection counts as idle."""
        self._look_at = 0.0
        """Loop time before which nothing is idle, unless a reply ends."""

    def __len__(self) -> int:
        return len(self._address)

    def open(self, handler: web.RequestHandler, address: str) -> bool:
        """Admit a new connection, if necessary in the place of an idle one. Returns whether there
        is room."""
        taken, client_connections = len(self._address), self._count.get(address, 0)
        for_others = taken >= self._plenty and kept_for_others(
            client_connections, len(self._count), taken, self.limit
        )
        if for_others or taken >= self.limit:
            idle = self._longest_idle(address if for_others else None)
            if idle is None:
                return False
            self.close(idle)
            idle.force_close()
        self._address[handler] = address
        self._count[address] += 1
        self.end(handler, FIRST_SECONDS)
        return True

    def close(self, handler: web.RequestHandler) -> None:
        """Forget a connection."""
        self.begin(handler)
        address = self._address.pop(handler, None)
        if address is not None:
            self._count[address] -= 1
            if not self._count[address]:
                del self._count[address]

    def begin(self, handler: web.RequestHandler) -> None:
        """Note that a request of the connection is being answered."""
        idle = self._idle.get(self._address.get(handler, ""))
        if idle is not None:
            idle.pop(handler, None)
            if not idle:
                del self._idle[self._address[handler]]

    def end(self, handler: web.RequestHandler, seconds: float = 0.0) -> None:
        """Note that the connection waits for its next request, idle from `seconds` on."""
        if handler in self._address:
            idle_at = asyncio.get_running_loop().time() + seconds
            self._idle.setdefault(self._address[handler], {})[handler] = idle_at
            if not seconds:
                self._look_at = 0.0

    def _longest_idle(self, address: str | None) -> web.RequestHandler | None:
        """Find the longest-waiting idle connection with all of its last reply sent. Looks at
        `address`, else at addresses with most connections first."""
        counts, now = self._count, asyncio.get_running_loop().time()
        if now < self._look_at:
            return None
        for one in [address] if address else sorted(self._idle, key=lambda one: -counts[one]):
            for handler, idle_at in self._idle.get(one, {}).items():
                transport = handler.transport
                if idle_at <= now and not (transport and transport.get_write_buffer_size()):
                    return handler
        if address is None:
            self._look_at = now + LOOK_SECONDS
        return None


CONNECTIONS = web.AppKey("connections", Connections)


class BoundedRunner(web.AppRunner):
    """Runner with bounded `Connections`: a new connection without room gets a 503 and is closed.
    `options` are those of aiohttp's server."""

    def __init__(self, app: web.Application, **options: Any) -> None:
        super().__init__(app, logger=ServerLog(), **options)
        self._rare = RareLog(log)

    async def setup(self) -> None:
        await super().setup()
        server, connections = self.server, self.app[CONNECTIONS]
        assert server is not None
        made, lost = server.connection_made, server.connection_lost

        def connection_made(handler: web.RequestHandler, transport: asyncio.Transport) -> None:
            made(handler, transport)
            address = owner_of(str((transport.get_extra_info("peername") or ("",))[0]))
            if not connections.open(handler, address):
                taken = len(connections)
                self._rare.warn("there are %d connections by HTTP: another one is refused", taken)
                transport.write(_REFUSAL)
                transport.close()

        def connection_lost(
            handler: web.RequestHandler, error: BaseException | None = None
        ) -> None:
            connections.close(handler)
            lost(handler, error)

        server.connection_made = connection_made  # type: ignore[method-assign]
        server.connection_lost = connection_lost  # type: ignore[method-assign, assignment]


def quiet_accepts(loop: asyncio.AbstractEventLoop) -> None:
    """Log failures to accept for lack of descriptors at most once a minute."""
    rare = RareLog(log)

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS:
            rare.warn("no descriptors are left, nobody can connect: %s", error)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


# Source -------------------------------------------------------------------------------------------
#
# Client's address of a request that a front passes on.


SOURCE_HEADER = "X-Rootlace-Source"
"""Header of a front for the client's address, behind a secret that front and server share. Without
the secret the header is ignored."""
_OF_THE_CONNECTION = {"connection", "transfer-encoding", "keep-alive", SOURCE_HEADER.lower()}


def passed_on(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers that do not concern the connection itself."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_THE_CONNECTION]


def from_source(
    headers: Iterable[tuple[str, str]], address: str, front_secret: str
) -> list[tuple[str, str]]:
    """Return the headers of a request from this address, as its front passes them on."""
    return [*passed_on(headers), (SOURCE_HEADER, f"{front_secret} {address}")]


async def passed_to(
    client: aiohttp.ClientSession, address: str, request: Any, front_secret: str
) -> aiohttp.ClientResponse:
    """Pass a request (Starlette's) on to the server, and return its answer. The body is streamed;
    the server bounds its size and the bytes of all bodies. The server learns the client's address,
    as Serve's proxy reports it."""
    query = f"?{request.url.query}" if request.url.query else ""
    headers = request.headers
    body: AsyncIterator[bytes] | None = None
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        body = request.stream()
    source = "" if request.client is None else request.client.host
    return await client.request(
        request.method,
        f"{address}{request.url.path}{query}",
        headers=from_source(headers.items(), source, front_secret),
        data=body,
        allow_redirects=False,
    )


# Request id ---------------------------------------------------------------------------------------


REQUEST_ID = "X-Request-Id"
SENSIBLE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
"""Longer or stranger ids could forge lines of the log."""


# Reply headers ------------------------------------------------------------------------------------
#
# Headers of a reply with facts found on the way: `x-rootlace-cache`, cached tokens of the request's
# prompts, and `X-Rootlace-Warning`, parts of the request without effect or with an unexpected one.


MAX_WARNINGS = 8
MAX_WARNING = 256
"""Most characters of one warning."""


@dataclass
class Seen:
    """Facts so far; of a stream, those known at its first piece."""

    cached: int | None = None
    prompt: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


SEEN: ContextVar[Seen | None] = ContextVar("told_in_headers", default=None)


def note_warning(message: str) -> None:
    """Warn the client of a part of its request. Once per message: the same constraint may stand for
    several prompts."""
    plain = message[:MAX_WARNING].encode("ascii", "backslashreplace").decode()
    plain = "".join(c if c.isprintable() else " " for c in plain)
    seen = SEEN.get()
    if seen is not None:
        if plain in seen.warnings or len(seen.warnings) >= MAX_WARNINGS:
            return
        seen.warnings.append(plain)
    log.warning("%s", plain)
