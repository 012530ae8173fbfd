"""The answer to an operation that is not part of a program's branch."""

from __future__ import annotations

from rootlace.client.completion import Completion
from rootlace.wire import protocol
from rootlace.wire.errors import from_code


class Answer(Completion):
    """The sink of one operation; keeps its terminal event."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        super().__init__()
        self.event: protocol.Event | None = None

    def __call__(self, event: protocol.Event) -> None:
        self.event = event
        self.finish()

    def get(self) -> protocol.Event:
        """The event, once it is there. Raises the typed error of an operation that failed."""
        self.wait()
        return self._event()

    async def get_async(self) -> protocol.Event:
        """The same, for an event loop."""
        await self.wait_async()
        return self._event()

    def _event(self) -> protocol.Event:
        event = self.event
        assert event is not None
        if isinstance(event, protocol.Failed):
            raise from_code(event.code, event.message)
        return event
