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
    where `content` does not. `other_body`: another type that is taken in place of `body`; both are
    described where they belong."""

    method: str
    path: str
    handler: Handler
    says: str
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    reply: Any = None
    content: str = JSON
    takes: str = JSON
    other_body: type[msgspec.Struct] | None = None

    @property
    def bodies(self) -> list[type[msgspec.Struct]]:
        return [each for each in (self.body, self.other_body) if each is not None]

    @property
    def streams(self) -> bool:
        """Whether its reply may be a stream: where one of two bodies is taken, none is answered."""
        return len(self.bodies) == 1 and "stream" in self.bodies[0].__struct_fields__
