"""The connections of the HTTP server, of which there are so many at most.

Each takes a descriptor, and a process that has none left accepts nobody.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import time
from collections import Counter, deque
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rootlace.runtime import processes
from rootlace.runtime.server.server_state import RareLog, kept_for_others

log = logging.getLogger(__name__)

MOST = 4096
"""Unless the configuration says otherwise, or descriptors are few."""
_SAID = 200
"""So many characters are told of what was received instead of HTTP."""
LOOK_SECONDS = 0.1
"""Where no connection is idle, they are looked through again after so long."""

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


class BoundedServer(web.Server):
    """Has at most `most` connections.

    For a new one another goes that waits for a request: that which has waited for longest, of the
    address that has the most of them. Where there is none, the new one gets a 503 and is closed.
    The last eighth is for addresses that have less than the mean.
    """

    def __init__(self, most: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most = most
        self._of: dict[web.RequestHandler, str] = {}
        """The address of each connection, as `owner_of` says."""
        self._by_address: Counter[str] = Counter()
        self._idle: dict[str, deque[tuple[float, web.RequestHandler]]] = {}
        """By address, connections that waited for a request when they were looked through, with
        the times at which that would have been too long; a request moves its connection's."""
        self._look_at = 0.0
        self._rare = RareLog(log)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        address = owner_of(str((transport.get_extra_info("peername") or ("",))[0]))
        taken, owners = len(self._of), len(self._by_address)
        for_others = kept_for_others(self._by_address.get(address, 0), owners, taken, self._most)
        full = for_others or taken >= self._most
        if full and not self._close_idle(address if for_others else None):
            self._rare.warn("there are %d connections by HTTP: another one is refused", taken)
            transport.write(_REFUSAL)
            transport.close()
            return
        self._of[handler] = address
        self._by_address[address] += 1

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        self._forget(handler)
        transport: Any = handler.transport
        if hasattr(transport, "_read_ready_cb"):
            # A method of its own, so that nothing but the garbage collector would end it.
            transport._read_ready_cb = None
        super().connection_lost(handler, exc)

    def _forget(self, handler: web.RequestHandler) -> None:
        address = self._of.pop(handler, None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def _close_idle(self, address: str | None) -> bool:
        """Close one that waits for a request, of the address if one is given; whether there is
        one."""
        if self._close_known_idle(address):
            return True
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_SECONDS
        self._idle.clear()
        for handler in sorted(self._of, key=_closes_at):
            if _waits(handler):
                known = self._idle.setdefault(self._of[handler], deque())
                known.append((_closes_at(handler), handler))
        return self._close_known_idle(address)

    def _close_known_idle(self, address: str | None) -> bool:
        while self._idle:
            most = address or max(self._idle, key=lambda one: self._by_address.get(one, 0))
            known = self._idle.get(most, deque())
            while known:
                closes_at, handler = known.popleft()
                if handler in self._of and _waits(handler) and _closes_at(handler) == closes_at:
                    self._forget(handler)
                    handler.force_close()
                    return True
            self._idle.pop(most, None)
            if address is not None:
                return False
        return False


class BoundedRunner(web.AppRunner):
    """Runs an application in a `BoundedServer`; `options` are those of aiohttp's server."""

    def __init__(
        self, app: web.Application, most: int, shutdown_timeout: float, **options: Any
    ) -> None:
        super().__init__(app, shutdown_timeout=shutdown_timeout, **options)
        self._most = most
        self._options = options

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return BoundedServer(
            self._most,
            made.request_handler,
            request_factory=made.request_factory,
            logger=ServerLog(),
            **self._options,
        )


# aiohttp tells nobody outside what a connection does.
def _waits(handler: web.RequestHandler) -> bool:
    """Whether it has answered all that came, and waits for the head of a request."""
    return handler._waiter is not None and not handler._waiter.done()


def _closes_at(handler: web.RequestHandler) -> float:
    return handler._next_keepalive_close_time


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
