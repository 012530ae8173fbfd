"""Prefixes that are held in the cache on purpose, for some time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from rootlace.runtime.cache.node import Node
from rootlace.runtime.cache.radix_tree import RadixTree

# Expiry -------------------------------------------------------------------------------------------
#
# Prefixes that are to be forgotten when nobody has used them for some time.


MAX_TOKENS = 1 << 22
"""Tokens that are remembered until their time is over; beyond it the next ones go early."""


LOOKED_AT = 256
"""So much is looked at in one step: what is held comes back each time, however short its time."""


@dataclass(frozen=True, eq=False)
class _Kept:
    """What is to go of `tokens`: those from position `start` on."""

    namespace: Hashable
    tokens: np.ndarray
    start: int
    seconds: float
    tick: int


class Expiry:
    """What requests with a time to live have added to the tree.

    Whether tokens were used is looked at each time their time is over, so they go between once and
    twice that time after their last use.
    """

    def __init__(self, tree: RadixTree, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._clock = clock
        self._heap: list[tuple[float, int, _Kept]] = []
        self._numbers = itertools.count()
        self._tokens = 0

    def keep(self, namespace: Hashable, tokens: np.ndarray, start: int, seconds: float) -> None:
        """`tokens` (int32) from `start` on, which nobody holds any more, live for so long."""
        self._push(_Kept(namespace, tokens.copy(), start, seconds, self._tree.tick))
        if self._tree.expiring is not None:
            self._tree.expiring(namespace, tokens, start)
        while self._tokens > MAX_TOKENS:
            self._end(self._pop())

    def expire(self) -> None:
        """Forget what has had its time, `LOOKED_AT` of it at most. Costs nothing while nothing
        has."""
        if not self._heap:
            return
        now = self._clock()
        for _ in range(LOOKED_AT):
            if not self._heap or self._heap[0][0] > now:
                return
            self._end(self._pop())

    def end(self) -> None:
        """Forget all of it that nobody holds, whoever used it last."""
        for _, _, kept in self._heap:
            self._tree.forget(kept.namespace, kept.tokens, kept.start, self._tree.tick)
        self.reset()

    def reset(self) -> None:
        """The tree is gone."""
        self._heap.clear()
        self._tokens = 0

    def _push(self, kept: _Kept) -> None:
        self._tokens += len(kept.tokens)
        heapq.heappush(self._heap, (self._clock() + kept.seconds, next(self._numbers), kept))

    def _pop(self) -> _Kept:
        kept = heapq.heappop(self._heap)[2]
        self._tokens -= len(kept.tokens)
        return kept

    def _end(self, kept: _Kept) -> None:
        if self._tree.forget(kept.namespace, kept.tokens, kept.start, kept.tick):
            return
        if self._tokens + len(kept.tokens) <= MAX_TOKENS:
            tick = self._tree.tick
            self._push(_Kept(kept.namespace, kept.tokens, kept.start, kept.seconds, tick))
        elif self._tree.forgetting is not None:
            self._tree.forgetting(kept.namespace, kept.tokens, kept.start)


# Pins ---------------------------------------------------------------------------------------------


MAX_PINS = 4096


@dataclass(eq=False)
class Pin:
    """A handle on so many leading `tokens`; `id` is the name for them, `holder` who asked first."""

    id: str
    namespace: Hashable
    tokens: int
    node: Node
    until: float
    holder: str = ""


class Pins:
    """Handles that belong to no request, each until a time of its own.

    `blocks` counts the blocks of all pinned paths, each once; it is at most `most`.
    """

    def __init__(self, tree: RadixTree, most: int, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._clock = clock
        self._pins: dict[str, Pin] = {}
        self._next_end = float("inf")
        self.most = most
        self.blocks = 0
        self._lost = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, name: str) -> bool:
        return name in self._pins

    def held_by(self, holder: str) -> int:
        """How many pins are this holder's."""
        return sum(pin.holder == holder for pin in self._pins.values())

    def all(self) -> list[Pin]:
        """Those that live, in no order."""
        return list(self._pins.values())

    def nodes(self) -> list[Node]:
        """Where the handles end."""
        return [pin.node for pin in self._pins.values()]

    def needed(self, namespace: Hashable, tokens: np.ndarray) -> int:
        """How many blocks more are pinned, at most, when `tokens` (int32) are: those in the tree
        that are not pinned yet, and those of what is still to be put there."""
        size = self._tree.block_size
        path, known = self._tree.descend(namespace, tokens, len(tokens))
        held = self._held()
        missing = [(node.start, min(node.end, known)) for node in path if node not in held]
        if known < len(tokens):
            missing.append((known, len(tokens)))
        return sum(-(-end // size) - start // size for start, end in missing)

    def hold(
        self,
        name: str,
        namespace: Hashable,
        tokens: np.ndarray,
        seconds: float,
        program: int = 0,
        holder: str = "",
    ) -> None:
        """Hold `tokens` (int32), which are in the tree, for so many seconds, or renew the pin of
        this name. The caller keeps to `most` and `MAX_PINS`."""
        until = self._clock() + seconds
        known = self._pins.get(name)
        if known is not None:
            known.until = max(known.until, until)
            return
        node = self._tree.enter(namespace)
        node = self._tree.advance(node, tokens, len(tokens), program)
        self._pins[name] = Pin(name, namespace, node.end, node, until, holder)
        self._count()
        self._next_end = min(self._next_end, until)

    def release(self, name: str) -> bool:
        """Let a pin go; False if there is none of this id."""
        if name not in self._pins:
            return False
        self._leave([name])
        return True

    def expire(self) -> None:
        """Let go what has had its time. Costs nothing while nothing has."""
        now = self._clock()
        if now < self._next_end:
            return
        self._leave([name for name, pin in self._pins.items() if pin.until <= now])
        self._next_end = min((pin.until for pin in self._pins.values()), default=float("inf"))

    def reset(self) -> None:
        """The tree is gone, and all pins with it."""
        self._lost += len(self._pins)
        self._pins.clear()
        self.blocks = 0
        self._next_end = float("inf")

    def take_lost(self) -> int:
        """How many were lost with the tree since this was last asked."""
        lost, self._lost = self._lost, 0
        return lost

    def _leave(self, names: Iterable[str]) -> None:
        for name in names:
            self._tree.leave(self._pins.pop(name).node)
        self._count()  # once for all of them: it looks at every pin

    def _held(self) -> set[Node]:
        """Every node of a pinned path, roots included."""
        held: set[Node] = set()
        for node in self.nodes():
            link: Node | None = node
            while link is not None and link not in held:
                held.add(link)
                link = link.parent
        return held

    def _count(self) -> None:
        # A split leaves a block with two nodes, so ids are counted, not lengths added.
        blocks = [node.blocks for node in self._held()]
        self.blocks = len(np.unique(np.concatenate(blocks))) if blocks else 0
