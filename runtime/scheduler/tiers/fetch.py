"""Blocks on their way from below the pool to a prompt that matches them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rootlace.runtime.cache import Node
from rootlace.runtime.scheduler.sequence import Sequence


@dataclass(slots=True, eq=False)
class Fetch:
    """The blocks from number `first` on of a sequence's tokens are read from `slots`: pairs of a
    level and a slot.

    The handle `node` holds what is in the tree before them and, as they come, of them. `stop`: from
    here on they cannot be had. It is `over` when nobody waits for it any more.
    """

    sequence: Sequence
    node: Node | None
    first: int
    slots: list[tuple[int, int]]
    stop: int = 0
    landed: int = 0
    """So many are in the tree."""
    read: set[int] = field(default_factory=set)
    over: bool = False

    def __post_init__(self) -> None:
        self.stop = len(self.slots)

    @property
    def finished(self) -> bool:
        return self.over or self.landed >= self.stop

    def next(self) -> int:
        """How many more are there behind those that landed, without a gap."""
        at = self.landed
        while at < self.stop and at in self.read:
            at += 1
        return at - self.landed
