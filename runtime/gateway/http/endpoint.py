"""An endpoint: what the routes, the OpenAPI document and the message of a 404 know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from rootlace.runtime.gateway.http.errors import Handler

JSON = "application/json"


@dataclass(frozen=True)
class Endpoint:
    """`says` is one line for people. `body` and `query` are the types that its handler decodes,
    `reply` is the one that it writes. Bodies are JSON where `takes` does not say otherwise, replies
    where `content` does not."""

    method: str
    path: str
    handler: Handler
    says: str
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    reply: Any = None
    content: str = JSON
    takes: str = JSON
