"""Parameters of the query as typed structs, with errors that name the parameter."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.http.body import as_parameter

T = TypeVar("T", bound=msgspec.Struct)


def read_query(request: web.Request, kind: type[T]) -> T:
    """The query as `kind`, numbers read from their digits; of a parameter that is given several
    times the first counts. Raises InvalidParameter for one that is wrong or unknown."""
    try:
        return msgspec.convert(dict(request.query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise as_parameter(str(error), kind) from None
