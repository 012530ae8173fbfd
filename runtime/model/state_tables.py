"""Automata on the device: what each class of tokens does to each state, kept from step to step.

With them an automaton is stepped by the tokens that were sampled (`KernelSet.advance_states`)
without asking the host.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import numpy as np
import torch

MAX_BYTES = 64 << 20
"""Tables kept on the device, unless one alone is larger."""


class Classes(Protocol):
    @property
    def token_class(self) -> np.ndarray:
        """int32 [vocab_size]: the class of each token."""

    @property
    def next_state(self) -> np.ndarray:
        """int32 [states, classes]: the state after a token of a class; -1: forbidden."""


class SteppedTable(Protocol):
    """A mask table whose automaton can be stepped on a device."""

    @property
    def key(self) -> int: ...

    def classes(self) -> Classes | None:
        """None where the automaton is too large for that. Always the same."""


class StateTables:
    """The tables used latest. Not thread-safe."""

    def __init__(self, device: torch.device | str, max_bytes: int = MAX_BYTES) -> None:
        self._device = torch.device(device)
        self._max_bytes = max_bytes
        self._tables: OrderedDict[int, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self.nbytes = 0

    def get(self, table: SteppedTable) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(token_class int32 [vocab_size], next_state int32 [states, classes]), on the device; on
        the CPU they are the host's own arrays."""
        known = self._tables.get(table.key)
        if known is not None:
            self._tables.move_to_end(table.key)
            return known
        classes = table.classes()
        if classes is None:
            return None
        known = (
            torch.from_numpy(classes.token_class).to(self._device),
            torch.from_numpy(classes.next_state).to(self._device),
        )
        self._tables[table.key] = known
        self.nbytes += _nbytes(known)
        while self.nbytes > self._max_bytes and len(self._tables) > 1:
            _, dropped = self._tables.popitem(last=False)
            self.nbytes -= _nbytes(dropped)
        return known


def _nbytes(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
