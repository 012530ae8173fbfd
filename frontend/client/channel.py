"""What programs need of a connection: `Connection` is one, others need no socket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rootlace.wire import protocol
from rootlace.wire.errors import RootlaceError

Sink = Callable[[protocol.Event], None]
"""Gets every event of one operation; the last one is terminal."""


@dataclass
class Counters:
    """What went over one connection so far; `round_trips`: how often a program had to wait."""

    messages_sent: int = 0
    messages_received: int = 0
    ops_sent: int = 0
    round_trips: int = 0


class Channel(Protocol):
    """Takes operations and gives their events to the sinks that came with them."""

    counters: Counters

    @property
    def model(self) -> protocol.ModelInfo: ...

    @property
    def lost(self) -> RootlaceError | None:
        """Why the channel is of no use any more, or None."""

    def next_op(self) -> int: ...

    def next_branch(self) -> int: ...

    def next_program(self) -> str:
        """An id for one run of a program, unlike any of this or another channel."""

    def send(self, op: protocol.Op, sink: Sink) -> None:
        """Queue `op`; never blocks. Raises InvalidRequest for what cannot be sent."""

    def flush(self) -> None:
        """Send now what is queued."""

    def count_round_trip(self) -> None: ...

    def close(self) -> None: ...
