"""Upper bounds of the hit rate of any cache on a workload."""

from __future__ import annotations

import heapq

import numpy as np

from rootlace.runtime.simulation.trace import Workload


def infinite_bound(workload: Workload, served: np.ndarray | None = None) -> float:
    """The hit rate of a cache that forgets nothing: no other has more, in any order of service.

    A unit of the prompts' common trie is computed once, and the last unit of a prompt always is:
    its logits are wanted. So a unit that some prompt ends with is found by all others that have it,
    and any other unit by all but one. `served`: the numbers of the requests that count (all).
    """
    uses = _Uses(workload, served)
    count = int(uses.blocks.max(initial=0)) + 1
    times = np.bincount(uses.blocks, minlength=count)
    size = np.zeros(count, np.int64)
    size[uses.blocks] = uses.units
    ends = np.bincount(uses.blocks[uses.last], minlength=count)
    hits = int(((times - 1) * size)[times > 0].sum()) - int(np.maximum(ends - 1, 0).sum())
    return hits / max(int(uses.sizes.sum()), 1)


def clairvoyant_bound(
    workload: Workload, cache_units: int, served: np.ndarray | None = None
) -> float:
    """The best hit rate of `cache_units` units for a cache that knows the future.

    Requests are served in the order of `served` (by default that of arrival, without those that do
    not fit), one prompt after the other.

    This is Belady's rule, with the freedom not to keep a unit at all: whenever too much is kept,
    the unit that is used again latest is dropped. Whoever uses a continuation uses its prefix too,
    so continuations go first, and what is kept is always a tree. A prompt takes its own room while
    it is computed; outputs, and prompts of requests that decode, take none here, so a real cache
    has less. The rule is optimal by an exchange argument: at the first moment with too little room
    some unit must go, and of all that are kept then, this one would take room the longest.
    """
    if served is None:
        served = workload.fitting(cache_units)
    uses = _Uses(workload, served)
    by_block = np.argsort(uses.blocks, kind="stable")
    again = uses.blocks[by_block[1:]] == uses.blocks[by_block[:-1]]
    use, following = by_block[:-1][again], by_block[1:][again]
    # The last unit of a prompt is computed in any case: not worth keeping for it.
    worth = uses.units[use] - uses.last[following]
    turns = np.repeat(np.arange(len(served)), uses.lengths)
    del by_block, again
    # Blocks of one prompt that are used next by the same one are kept and given up together.
    spans, which = np.unique(turns[use] * len(served) + turns[following], return_inverse=True)
    amounts = np.bincount(which, weights=worth, minlength=len(spans)).astype(np.int64)
    begins, ends = np.divmod(spans, max(len(served), 1))
    hits = _keep_nearest(begins, ends, amounts, uses.sizes, cache_units)
    return hits / max(int(uses.sizes.sum()), 1)


class _Uses:
    """The blocks of requests, in order of service.

    Arrays over all uses of blocks: `blocks`, `units` and whether it is the `last` of its prompt;
    over the requests: how many blocks (`lengths`) and units (`sizes`) each has.
    """

    def __init__(self, workload: Workload, served: np.ndarray | None) -> None:
        blocks, units, starts = workload.all_blocks()
        if served is None:
            served = np.arange(len(workload))
        self.lengths = np.diff(starts)[served]
        self.sizes = workload.prompt_units[served]
        ends = np.cumsum(self.lengths)
        places = np.arange(int(self.lengths.sum()))
        places += np.repeat(starts[:-1][served] - (ends - self.lengths), self.lengths)
        self.blocks, self.units = blocks[places], units[places]
        self.last = np.zeros(len(places), bool)
        self.last[ends - 1] = True


def _keep_nearest(
    begins: np.ndarray, ends: np.ndarray, amounts: np.ndarray, sizes: np.ndarray, room: int
) -> int:
    """How many units are found again, with `room` units in all, if `amounts` may be kept from turn
    `begins` (ascending) to turn `ends`. At turn t, prompt t takes `sizes[t]` of the room."""
    kept: dict[int, int] = {}  # end -> units kept until then
    heap: list[int] = []  # ends, the latest first; some have passed
    total = found = at = 0
    spans = list(zip(begins.tolist(), ends.tolist(), amounts.tolist(), strict=True))
    for turn, size in enumerate(sizes.tolist()):
        used = kept.pop(turn, 0)
        found += used
        total -= used
        # What is kept beyond this turn is no part of this prompt and has to fit beside it.
        while total > room - size:
            end = -heap[0]
            amount = kept.get(end, 0)
            if amount <= total - (room - size):
                heapq.heappop(heap)
                total -= kept.pop(end, 0)
            else:
                kept[end] = amount - (total - (room - size))
                total = room - size
        while at < len(spans) and spans[at][0] == turn:
            _, end, amount = spans[at]
            if end not in kept:
                heapq.heappush(heap, -end)
            kept[end] = kept.get(end, 0) + amount
            total += amount
            at += 1
    return found
