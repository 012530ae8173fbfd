"""`x-rootlace-cache`: what the cache knew of a request's prompts, in a header of its reply."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.http.errors import Handler
from rootlace.wire.cache_report import CacheReport
from rootlace.wire.protocol import Usage

HEADER = "x-rootlace-cache"
MAX_REPORTS = 16


@dataclass
class _Seen:
    cached: int | None = None
    prompt: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)


_SEEN: ContextVar[_Seen | None] = ContextVar("cache_seen", default=None)


@web.middleware
async def cache_header_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let what the handler learns of the cache be kept until its reply begins."""
    _SEEN.set(_Seen())
    return await handler(request)


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


def add_cache_header(response: web.StreamResponse) -> None:
    """What is known so far: of a stream, what its first piece knew."""
    seen = _SEEN.get()
    if seen is None or seen.cached is None:
        return
    value: dict[str, Any] = {"cached": seen.cached}
    if seen.prompt:
        value["prompt"] = seen.prompt
    if seen.reports:
        value["reports"] = seen.reports
    response.headers[HEADER] = msgspec.json.encode(value).decode()
