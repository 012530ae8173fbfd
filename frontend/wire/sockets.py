"""Messages of ZeroMQ sockets in an asyncio event loop, without a future for each.

`zmq.asyncio` makes futures for each message, and tasks wake to await them: several times what it
takes to read the message, for every step of a model that runs thousands a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

BURST = 16
"""Messages taken at once; then others have their turn in the event loop."""


class MessageReader:
    """Calls `take` with the frames of each message that comes, in the loop that it is made on.

    The socket's descriptor tells once that something has changed, and any call on the socket may
    be the one that is told: so who sends on it calls `look` afterwards. `take` may close the
    reader.
    """

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], object]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._descriptor: int = socket.get(zmq.FD)  # type: ignore[assignment]
        self._scheduled = False
        self._closed = False
        self._loop.add_reader(self._descriptor, self._read)
        self._schedule()  # of what came before nobody tells

    def look(self) -> None:
        """See whether something has come."""
        if not self._scheduled:
            events = self._socket.get(zmq.EVENTS)
            if events & zmq.POLLIN:  # type: ignore[operator,arg-type]
                self._schedule()

    def close(self) -> None:
        """Read no more; to be called before the socket is closed."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._scheduled = False
        for _ in range(BURST):
            if self._closed:
                return
            try:
                message = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(message)
            except BaseException:
                # Of the messages behind it the descriptor may not tell again.
                if not self._closed:
                    self._schedule()
                raise
        if not self._closed:
            self._schedule()
