"""What protects a server without a key from web pages, and lets chosen pages in.

A page that a browser shows may send requests to servers on the same machine. It cannot read replies
of another origin unless the server allows it (CORS), but the requests still cost; and a page whose
own host name is made to resolve to this machine (DNS rebinding) could read the replies, too.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.gateway.http.errors import Forbidden, Handler
from rootlace.runtime.gateway.http.page import is_page

_LOCAL = "localhost"
_PREFLIGHT_SECONDS = "600"
_EXPOSED = "X-Request-Id, X-Rootlace-Cache, X-Rootlace-Warning, Retry-After"


@dataclass(frozen=True)
class Pages:
    """Which origins may ask ("*": any), and the host names by which the server may be addressed.

    `guarded`: no key keeps strangers out, and the server listens on this machine only, so whoever
    comes by another name, or from a page of another host, is refused.
    """

    origins: frozenset[str]
    hosts: frozenset[str]
    guarded: bool

    @classmethod
    def of(cls, config: GatewayConfig) -> Self:
        return cls(
            origins=frozenset(_listed(config.cors_origins)),
            hosts=frozenset(_listed(config.allowed_hosts)),
            guarded=not (config.api_key or config.keys_file) and _is_loopback(config.host),
        )

    def may_read(self, origin: str) -> bool:
        return "*" in self.origins or origin.lower() in self.origins

    def check(self, request: web.Request) -> None:
        """Raises Forbidden for a host name or a page that is not allowed."""
        if not self.guarded:
            return
        host = _host_of(f"//{request.host}")
        if not self._is_ours(host):
            raise Forbidden(
                f"this server is not known as {host or request.host!r}: start it with "
                "--allowed-hosts NAME, or with an API key"
            )
        origin = request.headers.get("Origin", "")
        if not self.may_read(origin) and self._is_foreign(request, origin):
            raise Forbidden(
                f"pages of {origin or 'other origins'} may not ask: start the server with "
                f"--cors-origins {origin or 'ORIGIN'}"
            )

    def _is_foreign(self, request: web.Request, origin: str) -> bool:
        """Whether a page of another origin asks, be it of this machine's: each port is another.

        Browsers send Sec-Fetch-Site with every request, but Origin not with that of an image or a
        link. A link to our own page, which shows nothing to whoever links to it, may be followed.
        """
        site = request.headers.get("Sec-Fetch-Site")
        if site in ("cross-site", "same-site"):
            return not (request.method == "GET" and is_page(request.path))
        if site == "same-origin" or not origin:
            return False
        _, found, asked = origin.lower().partition("://")
        if found and asked == request.host.lower():
            return False
        return _host_of(origin) not in self.hosts  # a proxy may have rewritten the Host

    def _is_ours(self, host: str | None) -> bool:
        """Whether the name is this machine's: an address cannot be made to resolve elsewhere."""
        if host is None:
            return False
        name = host.rstrip(".").lower()
        if name == _LOCAL or name.endswith("." + _LOCAL) or self.hosts & {name, "*"}:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def pages_middleware(pages: Pages) -> Middleware:
    """Check who asks, and answer the preflight requests of pages that may."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        pages.check(request)
        origin = request.headers.get("Origin")
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or origin is None or asked is None:
            return await handler(request)
        if not pages.may_read(origin):
            raise Forbidden(
                f"pages of {origin} may not ask: start the server with --cors-origins {origin}"
            )
        wanted = request.headers.get("Access-Control-Request-Headers", "Authorization")
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": asked,
                "Access-Control-Allow-Headers": wanted,
                "Access-Control-Max-Age": _PREFLIGHT_SECONDS,
            },
        )

    return check


def allow_page(pages: Pages, request: web.Request, response: web.StreamResponse) -> None:
    """Let the page that asked read the reply, if it may."""
    if not pages.origins:
        return
    response.headers["Vary"] = "Origin"
    origin = request.headers.get("Origin")
    if origin is not None and pages.may_read(origin):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED


def _listed(names: str) -> list[str]:
    return [name.strip().rstrip("/").lower() for name in names.split(",") if name.strip()]


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # such as an address that lacks its closing bracket
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == _LOCAL
