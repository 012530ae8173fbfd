"""What was sent and is not answered yet: what a client sends again on its next connection."""

from __future__ import annotations

from rootlace.client.outbox import Packed
from rootlace.wire import protocol


class Unanswered:
    """Belongs to the I/O thread. `heard`: how many terminal events came."""

    def __init__(self) -> None:
        self.heard = 0
        self._sent: dict[int, Packed] = {}
        self._chunks: dict[int, dict[int, list[int]]] = {}
        """By operation and sample: characters and tokens of its chunks."""

    @property
    def waiting(self) -> bool:
        """Whether anything is unanswered."""
        return bool(self._sent)

    def sent(self, ops: list[Packed]) -> None:
        """These are on their way."""
        for packed in ops:
            self._sent[packed[0]] = packed

    def hear(self, event: protocol.Event) -> None:
        """Take note of an event of an operation."""
        if isinstance(event, protocol.Chunk):
            counts = self._chunks.setdefault(event.op, {}).setdefault(event.index, [0, 0])
            counts[0] += len(event.text)
            counts[1] += len(event.token_ids)
        else:
            self.heard += 1
            self._sent.pop(event.op, None)
            self._chunks.pop(event.op, None)

    def chunks(self) -> tuple[tuple[int, int, int, int], ...]:
        """What came of streams that have not ended, as `Hello` says it."""
        return tuple(
            (op, index, characters, tokens)
            for op, samples in self._chunks.items()
            for index, (characters, tokens) in samples.items()
        )

    def take(self) -> list[Packed]:
        """What is to be sent again, in the order in which it was sent."""
        ops = list(self._sent.values())
        self._sent.clear()
        return ops
