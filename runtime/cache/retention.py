"""Retention of prefixes: times to live (expiry), and pins."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from rootlace.runtime.cache.node import Node
from rootlace.runtime.cache.radix_tree import RadixTree

# Expiry -------------------------------------------------------------------------------------------


MAX_TOKENS = 1 << 22
"""Tokens remembered until their time is over; beyond that the next ones expire early."""


LOOKED_AT = 256
"""Entries checked per step: held tokens return to the queue each time, however short their time."""


class _Expiring(msgspec.Struct, frozen=True, eq=False):
    """A prefix `tokens`, of which the tokens from position `start` on expire."""

    namespace: Hashable
    tokens: np.ndarray
    start: int
    seconds: float
    tick: int


class Expiry:
    """Tokens that requests with a time to live added to the tree.

    The last use is checked each time the time is over, so tokens go between once and twice that
    time after their last use.
    """

    def __init__(self, tree: RadixTree, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._clock = clock
        self._heap: list[tuple[float, int, _Expiring]] = []
        self._numbers = itertools.count()
        self._tokens = 0

    def keep(self, namespace: Hashable, tokens: np.ndarray, start: int, seconds: float) -> None:
        """Let `tokens` (int32) from `start` on, held by no handle any more, live for `seconds`."""
        self._push(_Expiring(namespace, tokens.copy(), start, seconds, self._tree.tick))
        if self._tree.expiring is not None:
            self._tree.expiring(namespace, tokens, start)
        while self._tokens > MAX_TOKENS:
            self._end(self._pop())

    @property
    def next_end(self) -> float:
        """The earliest time at which `expire` has something to do."""
        return self._heap[0][0] if self._heap else math.inf

    def expire(self) -> None:
        """Forget at most `LOOKED_AT` expired entries."""
        now = self._clock()
        for _ in range(LOOKED_AT):
            if not self._heap or self._heap[0][0] > now:
                return
            self._end(self._pop())

    def end(self) -> None:
        """Forget all entries without a handle, whatever their last use."""
        for _, _, entry in self._heap:
            self._tree.forget(entry.namespace, entry.tokens, entry.start, self._tree.tick)
        self.reset()

    def reset(self) -> None:
        """Forget all entries after the tree was lost."""
        self._heap.clear()
        self._tokens = 0

    def _push(self, entry: _Expiring) -> None:
        self._tokens += len(entry.tokens)
        heapq.heappush(self._heap, (self._clock() + entry.seconds, next(self._numbers), entry))

    def _pop(self) -> _Expiring:
        entry = heapq.heappop(self._heap)[2]
        self._tokens -= len(entry.tokens)
        return entry

    def _end(self, entry: _Expiring) -> None:
        if self._tree.forget(entry.namespace, entry.tokens, entry.start, entry.tick):
            return
        if self._tokens + len(entry.tokens) <= MAX_TOKENS:
            tick = self._tree.tick
            self._push(_Expiring(entry.namespace, entry.tokens, entry.start, entry.seconds, tick))
        elif self._tree.forgetting is not None:
            self._tree.forgetting(entry.namespace, entry.tokens, entry.start)


# Pins ---------------------------------------------------------------------------------------------


MAX_PINS = 4096


@dataclass(eq=False)
class Pin:
    """A handle on leading `tokens`; `id` names the tokens, `holder` is the first client that
    pinned."""

    id: str
    namespace: Hashable
    tokens: int
    node: Node
    until: float
    holder: str = ""


class Pins:
    """Handles that belong to no request, each with its own expiry.

    `blocks` counts the blocks of all pinned paths, each once; at most `most`.
    """

    def __init__(self, tree: RadixTree, limit: int, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._clock = clock
        self._pins: dict[str, Pin] = {}
        self.next_end = math.inf
        """No pin expires before this time."""
        self.limit = limit
        self.blocks = 0
        self.lost = 0
        """Count of pins lost with the tree, until `take_lost`."""

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, name: str) -> bool:
        return name in self._pins

    def held_by(self, holder: str) -> int:
        """Count of the pins of `holder`."""
        return sum(pin.holder == holder for pin in self._pins.values())

    def all(self) -> list[Pin]:
        """Return all current pins, in no order."""
        return list(self._pins.values())

    def nodes(self) -> list[Node]:
        """Nodes at which the handles end."""
        return [pin.node for pin in self._pins.values()]

    def needed(self, namespace: Hashable, tokens: np.ndarray) -> int:
        """Upper bound on the blocks added by pinning `tokens` (int32).

        These are unpinned blocks in the tree, and blocks still to be added.
        """
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
        """Pin `tokens` (int32), which are in the tree, for `seconds`, or renew the pin `name`.

        The caller respects `most` and `MAX_PINS`.
        """
        until = self._clock() + seconds
        known = self._pins.get(name)
        if known is not None:
            known.until = max(known.until, until)
            return
        node = self._tree.enter(namespace)
        node = self._tree.advance(node, tokens, len(tokens), program)
        self._pins[name] = Pin(name, namespace, node.end, node, until, holder)
        self._count()
        self.next_end = min(self.next_end, until)

    def release(self, name: str) -> bool:
        """Release a pin; False if the id is unknown."""
        if name not in self._pins:
            return False
        self._leave([name])
        return True

    def expire(self) -> None:
        """Release expired pins."""
        now = self._clock()
        if now < self.next_end:
            return
        self._leave([name for name, pin in self._pins.items() if pin.until <= now])
        self.next_end = min((pin.until for pin in self._pins.values()), default=math.inf)

    def reset(self) -> None:
        """Forget all pins after the tree was lost."""
        self.lost += len(self._pins)
        self._pins.clear()
        self.blocks = 0
        self.next_end = math.inf

    def take_lost(self) -> int:
        """Count of pins lost with the tree since the last call."""
        lost, self.lost = self.lost, 0
        return lost

    def _leave(self, names: Iterable[str]) -> None:
        for name in names:
            self._tree.leave(self._pins.pop(name).node)
        self._count()  # once for all: counting looks at every pin

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
