"""What has to be computed before a request can be done: whether its timeout can be met."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from rootlace.runtime.cache.tree import common_prefix
from rootlace.runtime.scheduler.pace import PromptPace
from rootlace.runtime.scheduler.priorities import PriorityQueues
from rootlace.runtime.scheduler.prompt_order import key_of
from rootlace.runtime.scheduler.running import RunningSet
from rootlace.runtime.scheduler.sequence import Sequence
from rootlace.wire.errors import DeadlineImpossible

CONSIDERED = 256
"""Only so many requests are looked at: their prompts alone are a lower bound."""


def check_deadline(
    sequence: Sequence,
    waiting: PriorityQueues,
    running: RunningSet,
    cached: Callable[[Sequence], int],
    pace: PromptPace,
) -> None:
    """Raises DeadlineImpossible if the prompts that come first take too long by themselves.

    Half of what they would take at the pace of the last steps counts: who is refused would
    hardly have been in time, and who might be is not refused.
    """
    timeout = sequence.request.handling.timeout
    if timeout is None:
        return
    queued = [sequence, *running.retracted, *waiting.ahead(sequence)]
    tokens = _uncached_tokens(queued, cached)
    tokens += sum(one.target() - one.computed for one in running.sequences)
    seconds = pace.seconds(tokens) / 2
    if seconds > timeout:
        raise DeadlineImpossible(
            f"the prompts of {len(queued) - 1} requests come first; with them this one takes "
            f"{seconds:.3g} s or more, and its timeout is {timeout:.3g} s"
        )


def _uncached_tokens(sequences: Iterable[Sequence], cached: Callable[[Sequence], int]) -> int:
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
