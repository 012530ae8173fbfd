"""The connections of the HTTP server: how many there are, and what is known of their requests.

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
# There are so many at most: each takes a descriptor, and a process that has none left accepts
# nobody.


MOST = 4096
"""Unless the configuration says otherwise, or descriptors are few."""
LOOK_SECONDS = 0.1
"""Where no connection is idle, they are looked through again after so long."""
FIRST_SECONDS = 1.0
"""A new connection has so long to send its first request before it counts as idle."""
_SAID = 200
"""So many characters are told of what was received instead of HTTP."""

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
    """The bound; half of the descriptors are left for programs, files and engines."""
    return configured or max(min(MOST, processes.descriptors() // 2), 1)


@lru_cache(1024)
def owner_of(address: str) -> str:
    """Whose an address is: of IPv6, all of a /64 are one's, who may have as many as one likes."""
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
    """aiohttp's log of what goes wrong on connections. What is no HTTP is its sender's fault: it is
    told rarely, in one line."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("aiohttp.server"), {})
        self._rare = RareLog(log)

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        if not isinstance(exc_info, HttpProcessingError):
            super().exception(msg, *args, exc_info=exc_info, **more)
            return
        said = (exc_info.message.splitlines() or [type(exc_info).__name__])[0][:_SAID]
        self._rare.warn("a request that is not HTTP was refused: %s", said)


class Connections:
    """The connections that are open, `most` at most, and which of them wait for a request.

    The last eighth is for addresses that have less than the mean.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._plenty = plenty(most)
        self._address: dict[web.RequestHandler, str] = {}
        """The address of each connection, as `owner_of` says."""
        self._count: Counter[str] = Counter()
        self._idle: dict[str, dict[web.RequestHandler, float]] = {}
        """By address, connections that wait for a request, in the order in which they began to; and
        from which time of the loop's clock they count as idle."""
        self._look_at = 0.0
        """Nothing is idle before this time of the loop's clock, unless a reply ends."""

    def __len__(self) -> int:
        return len(self._address)

    def open(self, handler: web.RequestHandler, address: str) -> bool:
        """Take in a new connection, in the place of an idle one where there is no other. Returns
        whether there is room."""
        taken, own = len(self._address), self._count.get(address, 0)
        for_others = taken >= self._plenty and kept_for_others(
            own, len(self._count), taken, self.most
        )
        if for_others or taken >= self.most:
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
        """A request of the connection is being answered."""
        idle = self._idle.get(self._address.get(handler, ""))
        if idle is not None:
            idle.pop(handler, None)
            if not idle:
                del self._idle[self._address[handler]]

    def end(self, handler: web.RequestHandler, seconds: float = 0.0) -> None:
        """The connection waits for its next request, and is idle if none comes in `seconds`."""
        if handler in self._address:
            idle_at = asyncio.get_running_loop().time() + seconds
            self._idle.setdefault(self._address[handler], {})[handler] = idle_at
            if not seconds:
                self._look_at = 0.0

    def _longest_idle(self, address: str | None) -> web.RequestHandler | None:
        """The connection that has waited for longest and sent its last reply, of `address` or of
        the address that has most."""
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
    """Runs an application whose `Connections` bound how many there are: a new connection that finds
    no room gets a 503 and is closed. `options` are those of aiohttp's server."""

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
    """Have the loop say at most once a minute that it accepts nobody, for descriptors are gone."""
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
# Where a request comes from that a front passes on.


SOURCE_HEADER = "X-Rootlace-Source"
"""What a front passes on comes from its own address, and has the client's here, behind the secret
that the two share: whoever else writes it is not believed."""
_OF_THE_CONNECTION = {"connection", "transfer-encoding", "keep-alive", SOURCE_HEADER.lower()}


def passed_on(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of a request or a reply that are not about its connection."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_THE_CONNECTION]


def from_source(
    headers: Iterable[tuple[str, str]], address: str, front_secret: str
) -> list[tuple[str, str]]:
    """Those of a request from this address, as its front passes it on."""
    return [*passed_on(headers), (SOURCE_HEADER, f"{front_secret} {address}")]


async def passed_to(
    client: aiohttp.ClientSession, address: str, request: Any, front_secret: str
) -> aiohttp.ClientResponse:
    """The gateway's answer to a request (Starlette's), whose body goes there as it comes: its size,
    and how much of all bodies there may be, are bounded there. The gateway is told whose address
    the request is from, as Serve's proxy says."""
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
# Headers of a reply that tell what became known while it was made: `x-rootlace-cache`, what the
# cache knew of the request's prompts, and `X-Rootlace-Warning`, what in the request says nothing or
# is read otherwise than it may be meant.


MAX_WARNINGS = 8
MAX_WARNING = 256
"""Characters of one."""


@dataclass
class Seen:
    """What is known so far: of a stream, what its first piece knew."""

    cached: int | None = None
    prompt: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


SEEN: ContextVar[Seen | None] = ContextVar("told_in_headers", default=None)


def note_warning(message: str) -> None:
    """Something in the request that whoever sent it should know of. Once per message: the same
    constraint may stand for several prompts."""
    plain = message[:MAX_WARNING].encode("ascii", "backslashreplace").decode()
    plain = "".join(c if c.isprintable() else " " for c in plain)
    seen = SEEN.get()
    if seen is not None:
        if plain in seen.warnings or len(seen.warnings) >= MAX_WARNINGS:
            return
        seen.warnings.append(plain)
    log.warning("%s", plain)
