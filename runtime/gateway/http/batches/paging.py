"""Lists of records, in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from aiohttp import web

from rootlace.runtime.gateway.http.batches.records import Record
from rootlace.runtime.gateway.http.errors import InvalidParameter

R = TypeVar("R", bound=Record)

MAX_PAGE = 10_000


def page(request: web.Request, records: Sequence[R], limit: int) -> dict[str, Any]:
    """Those behind the one named by `after`, at most `limit` unless the query says otherwise. The
    latest come first, or last with `order=asc`. `records` are in the order of their times."""
    if (asked := request.query.get("limit")) is not None:
        if not asked.isascii() or not asked.isdigit() or not 0 < int(asked[:9]) <= MAX_PAGE:
            raise InvalidParameter("limit", f"limit must be from 1 to {MAX_PAGE}")
        limit = int(asked)
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidParameter("order", "order must be asc or desc")
    ordered = list(records) if order == "asc" else list(reversed(records))
    if after := request.query.get("after"):
        ids = [record.id for record in ordered]
        if after not in ids:
            raise InvalidParameter("after", f"after: {after!r} is not in the list")
        ordered = ordered[ids.index(after) + 1 :]
    shown = ordered[:limit]
    return {
        "object": "list",
        "data": shown,
        "has_more": len(ordered) > len(shown),
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
    }
