"""The fields that say how a request is served; they follow from `rootlace.wire.handling`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import msgspec

from rootlace.runtime.gateway.http.body import Body
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.wire.handling import Cache, Handling, Priority, Seconds

_WAITED: ContextVar[float] = ContextVar("waited", default=0.0)


class HandlingBody(Body, kw_only=True):
    """What every body that computes something may say. Higher priorities are served first."""

    priority: Priority | None = None
    timeout: Seconds | None = None
    cache: Cache | None = None


class Handled(Protocol):
    """A body with these fields."""

    priority: Priority | None
    timeout: Seconds | None
    cache: Cache | None


@contextmanager
def waited(seconds: float) -> Iterator[None]:
    """What is read in this block has waited so long already, which its timeout includes."""
    token = _WAITED.set(seconds)
    try:
        yield
    finally:
        _WAITED.reset(token)


def handling_of(body: Handled) -> Handling:
    """What the body asks for; what it leaves out is the default."""
    handling = Handling(body.priority or 0, body.timeout, body.cache or Cache())
    return remaining(handling, _WAITED.get())


def handling_without_pin(body: Handled) -> Handling:
    """The same where there is not one prompt that could be pinned. Raises InvalidParameter."""
    handling = handling_of(body)
    if handling.cache.pin:
        raise InvalidParameter("cache.pin", "cache.pin: nothing is pinned here; pin a prompt")
    return handling


def remaining(handling: Handling, seconds: float) -> Handling:
    """With the timeout what is left of it when so many `seconds` have passed."""
    if handling.timeout is None:
        return handling
    return msgspec.structs.replace(handling, timeout=max(handling.timeout - seconds, 1e-9))
