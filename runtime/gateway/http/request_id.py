"""The id of a request: the client's, or one of ours, in every reply and in the log."""

from __future__ import annotations

import re
import uuid

from aiohttp import web

HEADER = "X-Request-Id"
# Longer or stranger ids could forge lines of the log.
_SENSIBLE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Write the id into the reply's headers."""
    given = request.headers.get(HEADER, "")
    response.headers[HEADER] = given if _SENSIBLE.fullmatch(given) else uuid.uuid4().hex
