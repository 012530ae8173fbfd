"""What has to be computed before a request can be done: whether its timeout can be met."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from rootlace.runtime.cache.tree import common_prefix
from rootlace.runtime.scheduler.prompt_order import key_of
from rootlace.runtime.scheduler.sequence import Sequence

CONSIDERED = 256
"""Only so many requests are looked at: their prompts alone are a lower bound."""


def uncached_tokens(sequences: Iterable[Sequence], cached: Callable[[Sequence], int]) -> int:
    """How many tokens of `sequences` are to be computed, at least. `cached` says how many leading
    ones of each need not be; what several begin with counts once."""
    first = islice(sequences, CONSIDERED)
    # In lexicographic order neighbours share most.
    ordered = sorted(first, key=key_of)
    tokens, before = 0, None
    for one in ordered:
        known = cached(one)
        if before is not None and before.namespace == one.namespace:
            shorter = min(before.length, one.length)
            known = max(known, common_prefix(before.tokens[:shorter], one.tokens[:shorter]))
        tokens += max(one.length - known, 0)
        before = one
    return tokens
