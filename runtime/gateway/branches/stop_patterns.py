"""The patterns of `stop_regex`, made ready to be looked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from rootlace.runtime.gateway.tokens.stop_search import MAX_POSITIONS, Search
from rootlace.wire.errors import InvalidConstraint, InvalidRequest

MAX_LENGTH = 1024


async def searches_of(patterns: Sequence[str]) -> tuple[Search, ...]:
    """Raises InvalidRequest, naming the pattern, for what cannot be looked for."""
    if not patterns:
        return ()
    for index, pattern in enumerate(patterns):
        if len(pattern) > MAX_LENGTH:
            raise InvalidRequest(
                f"stop_regex[{index}] has {len(pattern)} characters, at most {MAX_LENGTH} fit"
            )
    # A class such as \w takes milliseconds where it is met first.
    return await asyncio.to_thread(_made, patterns)


def _made(patterns: Sequence[str]) -> tuple[Search, ...]:
    searches = []
    for index, pattern in enumerate(patterns):
        try:
            searches.append(_search(pattern))
        except InvalidConstraint as error:
            reason = str(error).removeprefix("regex: ")
            raise InvalidRequest(f"stop_regex[{index}]: {reason}") from None
        if sum(search.positions for search in searches) > MAX_POSITIONS:
            raise InvalidRequest(f"stop_regex: more than {MAX_POSITIONS} positions in all patterns")
    return tuple(searches)


@lru_cache(maxsize=32)
def _search(pattern: str) -> Search:
    return Search(pattern)
