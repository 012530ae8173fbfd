"""What protects a server without a key from web pages, and lets chosen pages in.

A page that a browser shows may send requests to servers on the same machine. It cannot read replies
of another origin unless the server allows it (CORS), but the requests still cost; and a page whose
own host name is made to resolve to this machine (DNS rebinding) could read the replies, too.
"""

from __future__ import annotations

import hashlib
import ipaddress
import mimetypes
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from aiohttp import web

from rootlace.runtime.assets import page_folder
from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.server.http.errors import Forbidden
from rootlace.wire.errors import InvalidRequest

# Page ---------------------------------------------------------------------------------------------
#
# The page at `/`: playground, cache and load, for a browser. Its files come with the package.
#
# They hold nothing of what is served, so they are given without the API key; the page asks for it.


# Nothing is loaded from elsewhere, nothing is sent elsewhere, and no other page may frame this one.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_TYPES = {".js": "text/javascript", ".svg": "image/svg+xml"}


def is_page(path: str) -> bool:
    """Whether the path is that of the page or of one of its files."""
    return path == "/" or path.startswith("/page/")


class NoSuchFile(InvalidRequest):
    """The page has no file of this name."""

    code = "not_found"
    http_status = 404


@dataclass(frozen=True)
class _File:
    content: bytes
    content_type: str
    tag: str

    @classmethod
    def read(cls, path: Path) -> _File:
        content = path.read_bytes()
        guessed = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0]
        tag = hashlib.blake2b(content, digest_size=12).hexdigest()
        return cls(content, guessed or "application/octet-stream", tag)


class Page:
    """The handlers. The files are read once."""

    def __init__(self) -> None:
        self._files = {path.name: _File.read(path) for path in sorted(page_folder().iterdir())}

    async def index(self, request: web.Request) -> web.Response:
        return self._reply(request, "index.html")

    async def file(self, request: web.Request) -> web.Response:
        return self._reply(request, request.match_info["name"])

    def _reply(self, request: web.Request, name: str) -> web.Response:
        file = self._files.get(name)
        if file is None:
            raise NoSuchFile(f"the page has no file {name!r}")
        headers = {**_HEADERS, "ETag": f'"{file.tag}"'}
        if any(tag.value == file.tag for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=file.content, content_type=file.content_type, charset="utf-8", headers=headers
        )


# Browsers -----------------------------------------------------------------------------------------


_LOCAL = "localhost"
_PREFLIGHT_SECONDS = "600"
_EXPOSED = "X-Request-Id, X-Rootlace-Cache, X-Rootlace-Warning, Retry-After"


@dataclass(frozen=True)
class Pages:
    """Which origins may ask ("*": any), and the host names by which the server may be addressed.

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
        """Raises Forbidden for a host name or a page that is not allowed."""
        if not self.guarded:
            return
        if self.local and not self._is_ours(host := _host_of(f"//{request.host}")):
            raise Forbidden(
                f"this server is not known as {host or request.host!r}: start it with "
                "--allowed-hosts NAME, or with an API key"
            )
        if not is_browser(request):
            return
        origin = request.headers.get("Origin", "")
        if not self.may_read(origin) and self._is_foreign(request, origin):
            raise Forbidden(
                f"pages of {origin or 'other origins'} may not ask: start the server with "
                f"--cors-origins {origin or 'ORIGIN'}"
            )

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a preflight request of a page; None for other requests. Raises Forbidden
        where the page may not ask."""
        if request.method != "OPTIONS":
            return None
        origin = request.headers.get("Origin")
        asked = request.headers.get("Access-Control-Request-Method")
        if origin is None or asked is None:
            return None
        if not self.may_read(origin):
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


def is_browser(request: web.Request) -> bool:
    """Whether a browser asks for a page: with each POST to another origin one says from where."""
    return bool(request.headers.get("Origin")) or "Sec-Fetch-Site" in request.headers


def allow_page(pages: Pages, request: web.Request, response: web.StreamResponse) -> None:
    """Let the page that asked read the reply, if it may."""
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
