"""The connections of the HTTP server: how many there are, and what is known of their requests.

Sections: connections, source, request id, receiving, reply headers.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import logging
import re
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rootlace.runtime import processes
from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.server.auth import Asker, caller
from rootlace.runtime.server.server_state import RareLog, kept_for_others
from rootlace.wire.errors import DeadlineExceeded, Overloaded
from rootlace.wire.protocol import CacheReport, Usage

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
        for_others = kept_for_others(own, len(self._count), taken, self.most)
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
# Where a request comes from: among those without an API key, who shares the engine with whom.


_SOURCE: ContextVar[str] = ContextVar("source", default="batches")
_SOURCE_HEADER = "X-Rootlace-Source"
"""What a front passes on comes from its own address, and has the client's here, behind the secret
that the two share: whoever else writes it is not believed."""
_ADDRESS = web.RequestKey("address", str)
_OF_THE_CONNECTION = {"connection", "transfer-encoding", "keep-alive", _SOURCE_HEADER.lower()}


def begin_request(request: web.Request, front_secret: str) -> None:
    """Let what the handler starts know the client's address, or the one that a front of this secret
    says ("": there is none); and keep what the handler has to tell until its reply begins."""
    request.app[CONNECTIONS].begin(request.protocol)
    _SEEN.set(_Seen())
    if front_secret:
        secret, _, said = request.headers.get(_SOURCE_HEADER, "").partition(" ")
        if hmac.compare_digest(secret.encode("utf-8", "surrogateescape"), front_secret.encode()):
            request[_ADDRESS] = said
    peer = None if request.transport is None else request.transport.get_extra_info("peername")
    connection = f"#{peer[1]}" if isinstance(peer, tuple) else ""
    _SOURCE.set(owner_of(address_of(request)) + connection)


def address_of(request: web.BaseRequest) -> str:
    """The client's address, or "unknown"."""
    return request.get(_ADDRESS) or request.remote or "unknown"


def source() -> str:
    """The client whose request the running task answers, or "batches": its address (of IPv6, a /64)
    and behind `#` its connection."""
    return _SOURCE.get()


def passed_on(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of a request or a reply that are not about its connection."""
    return [(name, value) for name, value in headers if name.lower() not in _OF_THE_CONNECTION]


def from_source(
    headers: Iterable[tuple[str, str]], address: str, front_secret: str
) -> list[tuple[str, str]]:
    """Those of a request from this address, as its front passes it on."""
    return [*passed_on(headers), (_SOURCE_HEADER, f"{front_secret} {address}")]


# Request id ---------------------------------------------------------------------------------------


REQUEST_ID = "X-Request-Id"
SENSIBLE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
"""Longer or stranger ids could forge lines of the log."""


# Receiving ----------------------------------------------------------------------------------------
#
# The bodies that are being received, of which all together have so many bytes at most.
#
# One alone is bounded, too, but each of thousands of connections may send a large one slowly.


BODY_SECONDS = 120.0
"""A body that has not come by then holds its connection no longer."""
LARGEST = 16
"""So many of the largest size may be received at once, unless the configuration says otherwise."""


class Receiving:
    """Those of one server. The last eighth is for clients that have less than the mean: a client is
    a key or, without one, an address (of IPv6, a /64)."""

    def __init__(self, config: GatewayConfig) -> None:
        self._most = config.max_receiving_bytes or LARGEST * config.max_body_bytes
        self._taken = 0
        self._of: Counter[str] = Counter()
        self._rare = RareLog(log)

    async def read(self, request: web.Request) -> bytes:
        """The body of a request, as it was sent. Raises DeadlineExceeded for one that comes too
        slowly, Overloaded where there is no room for it, and aiohttp's 413."""
        if _RAW in request:
            return request[_RAW]
        client = Asker.of(caller(), _SOURCE.get()).client
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while piece := await request.content.readany():
                    if len(body) + len(piece) > request.client_max_size:
                        raise web.HTTPRequestEntityTooLarge(request.client_max_size)
                    self.take(client, len(body), len(piece))
                    body += piece
        except TimeoutError:
            raise DeadlineExceeded(f"the body did not come within {BODY_SECONDS:g} s") from None
        finally:
            self.release(client, len(body))
        request[_RAW] = bytes(body)
        return request[_RAW]

    def take(self, client: str, come: int, more: int) -> None:
        """Count `more` bytes of a body of `client` of which `come` have come. Raises Overloaded."""
        full = self._taken + more > self._most
        alone = self._taken == come  # has its own bound, and would never find more room
        own, owners = self._of.get(client, 0), len(self._of)
        if not alone and (full or kept_for_others(own, owners, self._taken, self._most, more)):
            self._rare.warn("bodies of %d bytes are being received: one is refused", self._taken)
            raise Overloaded("the server is receiving too many large bodies; try again")
        self._taken += more
        self._of[client] += more

    def release(self, client: str, come: int) -> None:
        """Forget the bytes of a body that is over."""
        self._taken -= come
        self._of[client] -= come
        if not self._of[client]:
            del self._of[client]


RECEIVING = web.AppKey("receiving", Receiving)
_RAW = web.RequestKey("raw", bytes)


# Reply headers ------------------------------------------------------------------------------------
#
# Headers of a reply that tell what became known while it was made: `x-rootlace-cache`, what the
# cache knew of the request's prompts, and `X-Rootlace-Warning`, what in the request says nothing or
# is read otherwise than it may be meant.


CACHE = "x-rootlace-cache"
WARNING = "X-Rootlace-Warning"
MAX_REPORTS = 16
MAX_WARNINGS = 8
MAX_WARNING = 256
"""Characters of one."""


@dataclass
class _Seen:
    cached: int | None = None
    prompt: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


_SEEN: ContextVar[_Seen | None] = ContextVar("told_in_headers", default=None)


def note_found(cached: int) -> None:
    """So many tokens of a prompt were cached: all that is known when a stream begins."""
    seen = _SEEN.get()
    if seen is not None and seen.cached is None:
        seen.cached = cached


def note_usage(usage: Usage, report: CacheReport | None) -> None:
    """A prompt was answered."""
    seen = _SEEN.get()
    if seen is None:
        return
    seen.cached = (seen.cached or 0) + usage.cached_tokens
    seen.prompt += usage.prompt_tokens
    if report is not None and len(seen.reports) < MAX_REPORTS:
        # No texts: a header is for machines, and Latin-1.
        given = {"matched": report.matched, "limit": report.limit, "reason": report.reason}
        seen.reports.append(given | ({"lost": report.lost} if report.lost else {}))


def note_warning(message: str) -> None:
    """Something in the request that whoever sent it should know of. Once per message: the same
    constraint may stand for several prompts."""
    plain = message[:MAX_WARNING].encode("ascii", "backslashreplace").decode()
    plain = "".join(c if c.isprintable() else " " for c in plain)
    seen = _SEEN.get()
    if seen is not None:
        if plain in seen.warnings or len(seen.warnings) >= MAX_WARNINGS:
            return
        seen.warnings.append(plain)
    log.warning("%s", plain)


def add_told_headers(response: web.StreamResponse) -> None:
    """What is known so far: of a stream, what its first piece knew."""
    seen = _SEEN.get()
    if seen is None:
        return
    for warning in seen.warnings:
        response.headers.add(WARNING, warning)
    if seen.cached is None:
        return
    value: dict[str, Any] = {"cached": seen.cached}
    if seen.prompt:
        value["prompt"] = seen.prompt
    if seen.reports:
        value["reports"] = seen.reports
    response.headers[CACHE] = msgspec.json.encode(value).decode()
