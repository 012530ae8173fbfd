"""Headers of a reply that tell what became known while it was made: `x-rootlace-cache`, what the
cache knew of the request's prompts, and `X-Rootlace-Warning`, what in the request says nothing or
is read otherwise than it may be meant."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from rootlace.wire.protocol import CacheReport, Usage

CACHE = "x-rootlace-cache"
WARNING = "X-Rootlace-Warning"
MAX_REPORTS = 16
MAX_WARNINGS = 8
MAX_WARNING = 256
"""Characters of one."""
log = logging.getLogger(__name__)


@dataclass
class _Seen:
    cached: int | None = None
    prompt: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


_SEEN: ContextVar[_Seen | None] = ContextVar("told_in_headers", default=None)


def begin_telling() -> None:
    """Keep what the handler has to tell until its reply begins."""
    _SEEN.set(_Seen())


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
