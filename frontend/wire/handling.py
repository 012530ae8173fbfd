"""How a request is served, whatever it computes: its turn, its time, and its place in the cache.

`Handling` is the one description: programs, bodies of HTTP and the engine's requests carry it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

PRIORITIES = 100
"""A priority is from minus this to this."""
PIN_SECONDS = 300.0
"""How long a pin lives that says nothing else."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Priority = Annotated[int, msgspec.Meta(ge=-PRIORITIES, le=PRIORITIES)]


class Cache(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What becomes of a prompt's KV.

    `pin`: it is held in the cache for `ttl` seconds (`PIN_SECONDS` by default), whatever else wants
    the memory; to pin it again renews that time. Where there is no room for it the request fails,
    unless it is only to "try". Without a pin, `ttl` is how long what the request
    added stays there when nobody uses it. With `share` false the request finds nothing that others
    computed, they find nothing of it, and all of it is forgotten when it ends.
    """

    pin: bool | Literal["try"] = False
    ttl: Seconds | None = None
    share: bool = True

    def __post_init__(self) -> None:
        if not self.share and (self.pin or self.ttl is not None):
            raise ValueError("what is not shared ends with the request: it has no pin and no ttl")


class Handling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """`priority`: higher ones are served first; one more is worth some seconds of waiting (the
    server's `priority_seconds`). `timeout`: seconds until the request fails."""

    priority: Priority = 0
    timeout: Seconds | None = None
    cache: Cache = Cache()


PLAIN = Handling()
