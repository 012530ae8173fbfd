"""Lists of records, in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Generic, Literal, Protocol, TypeVar

import msgspec

from rootlace.runtime.gateway.http.errors import InvalidParameter


class Identified(Protocol):
    """What is listed."""

    id: str


R = TypeVar("R", bound=Identified)

MAX_PAGE = 10_000


class PageQuery(msgspec.Struct):
    """Which records of a list are shown: those behind the one named by `after`, at most `limit`.
    The latest come first, or last with `order=asc`."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] | msgspec.UnsetType = msgspec.UNSET
    order: Literal["asc", "desc"] = "desc"
    after: str = ""


class Listing(msgspec.Struct, Generic[R]):
    """A page of a list."""

    data: list[R]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class Deleted(msgspec.Struct):
    """A record that is no more."""

    id: str
    object: str
    deleted: bool = True


def page(query: PageQuery, records: Sequence[R], limit: int) -> Listing[R]:
    """The records that are asked for, `limit` of them unless the query says otherwise.

    `records` are in the order of their times."""
    ordered = list(records) if query.order == "asc" else list(reversed(records))
    if query.after:
        ids = [record.id for record in ordered]
        if query.after not in ids:
            raise InvalidParameter("after", f"after: {query.after!r} is not in the list")
        ordered = ordered[ids.index(query.after) + 1 :]
    shown = ordered[: query.limit or limit]
    return Listing(
        data=shown,
        has_more=len(ordered) > len(shown),
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
    )
