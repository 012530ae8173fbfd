"""How much one client may have waiting."""

from __future__ import annotations

from functools import partial

from rootlace.wire.errors import Overloaded
from rootlace.wire.protocol import (
    Append,
    Embed,
    Explain,
    Generate,
    Prefill,
    Select,
    Text,
    Tokens,
)

# This many messages of the largest size.
_MESSAGES = 4
# The memory of a waiting operation beside its text.
_OPERATION_BYTES = 1024

Sized = Append | Prefill | Generate | Select | Explain | Embed


class Backlog:
    """The bytes of the operations that wait."""

    def __init__(self, max_message_bytes: int) -> None:
        self._bound = _MESSAGES * max_message_bytes
        self._waiting = 0

    def add(self, op: Sized) -> partial[None]:
        """Count `op`; what is returned is to be called when it has ended. Raises Overloaded where
        too much waits already."""
        size = _size(op)
        if self._waiting + size > self._bound:
            raise Overloaded(
                f"operations of {self._waiting} bytes wait already; at most {self._bound} may"
            )
        self._waiting += size
        return partial(self._remove, size)

    def _remove(self, size: int) -> None:
        self._waiting -= size


def _size(op: Sized) -> int:
    """Roughly how many bytes a waiting operation takes."""
    size = _OPERATION_BYTES
    if isinstance(op, Append | Embed):
        for part in op.parts if isinstance(op, Append) else op.inputs:
            size += len(part.text) if isinstance(part, Text) else 64
            size += 32 * len(part.ids) if isinstance(part, Tokens) else 0
    elif isinstance(op, Select):
        size += sum(map(len, op.choices))
    elif isinstance(op, Generate) and op.constraint is not None:
        size += len(op.constraint.source)
    return size
