"""An endpoint: what the routes, the OpenAPI document and the message of a 404 know of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rootlace.runtime.gateway.http.errors import Handler


@dataclass(frozen=True)
class Endpoint:
    """`says` is one line for people. `body` is the type that its handler decodes."""

    method: str
    path: str
    handler: Handler
    says: str
    body: type[msgspec.Struct] | None = None
