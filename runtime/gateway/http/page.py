"""The page at `/`: playground, cache and load, for a browser. Its files come with the package.

They hold nothing of what is served, so they are given without the API key; the page asks for it.
"""

from __future__ import annotations

import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from rootlace.runtime.assets import page_folder
from rootlace.wire.errors import InvalidRequest

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
