"""How a program's requests are served: `priority`, `timeout` and `cache` among its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec

from rootlace.wire.errors import InvalidRequest
from rootlace.wire.handling import PLAIN, Cache, Handling

NAMES = frozenset(Handling.__struct_fields__)


class HandlingKeywords(TypedDict, total=False):
    """The options, for type checkers; the values may be None."""

    priority: int | None
    timeout: float | None
    cache: Cache | Mapping[str, Any] | None


def handling_of(options: Mapping[str, Any], caller: str) -> Handling:
    """What canonical `options` say. Raises InvalidRequest for a value that makes no sense."""
    if NAMES.isdisjoint(options):  # as nearly always
        return PLAIN
    given = {name: options[name] for name in NAMES & options.keys()}
    try:
        return msgspec.convert(given, Handling)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{caller}: {error}") from None
