"""The id of a request: the client's, or one of ours, in every reply and in the log."""

from __future__ import annotations

import re
import uuid

from aiohttp import web

from rootlace.runtime.gateway.http.errors import Handler, InvalidParameter
from rootlace.runtime.logs import request_id

HEADER = "X-Request-Id"
# Longer or stranger ids could forge lines of the log.
_SENSIBLE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


@web.middleware
async def request_id_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Choose the id; all that is logged for this request has it."""
    given = request.headers.get(HEADER, "")
    # It stays set: the reply's headers are written after the handler's end, in the same task.
    request_id.set(given if _SENSIBLE.fullmatch(given) else uuid.uuid4().hex)
    return await handler(request)


def chosen_id(given: str | None) -> str | None:
    """The id that a body asks for as `request_id`. Raises InvalidParameter for one that could not
    be a header's: every event of a stream has it."""
    if given is not None and not _SENSIBLE.fullmatch(given):
        raise InvalidParameter(
            "request_id",
            "request_id must have 1 to 128 characters: letters, digits and any of _.:/+=@-",
        )
    return given


def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Write the id into the reply's headers."""
    response.headers[HEADER] = request_id.get()
