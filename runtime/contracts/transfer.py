"""How blocks of KV come from the engine that computed them to the one that goes on from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np

TransferKind = Literal["memory", "tcp", "nixl"]


class TransferConfig(msgspec.Struct, frozen=True):
    """What an engine hands blocks over by. At most so many `bytes` of them wait for others: in one
    `memory` (a file descriptor) of all engines, or of each engine. `host` is the interface of this
    machine that the others reach."""

    by: TransferKind
    bytes: int
    memory: int = -1
    host: str = "127.0.0.1"


class BlockLost(Exception):
    """A block does not come: its giver is gone, says nothing, or has it no more."""


class Transfer(Protocol):
    """An engine's end of what it gives and takes.

    A giver puts a block into a slot of its own, and says where that is (`address`) and what the
    checksum of key and content is; the gateway shares out the slots, and tells the taker. The taker
    asks for the blocks that its tree lacks, one after the other as it can take them in, and
    compares the checksum: a giver waits for nobody, and what does not come is computed.

    One thread calls `put`, another one `expect` and `take`. Both may wait, `take` for seconds.
    """

    address: bytes
    """What takers have to know; nobody else may. Empty where all have the same slots."""

    def put(self, slot: int, block: np.ndarray) -> None:
        """Have a block (uint8) where takers find it. What was there is gone. Raises OSError."""
        ...

    def expect(self, source: bytes, slots: Sequence[int]) -> None:
        """These slots of a giver are taken next, in this order: they may come already."""
        ...

    def take(self, source: bytes, slot: int, into: np.ndarray) -> None:
        """Copy what is in the slot of a giver (uint8). Raises `BlockLost`, or OSError where nothing
        can be taken from anybody any more."""
        ...

    def close(self) -> None:
        """Nobody calls the other methods any more."""
        ...
