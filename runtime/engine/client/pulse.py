"""Whether an engine process lives, works, or hangs: what its messages tell."""

from __future__ import annotations

import asyncio
import time

from rootlace.runtime.contracts.messages import FromEngine, Heartbeat

STALL_SECONDS = 30.0
"""A loop that stands still for this long is not healthy; a question to it fails."""
SILENCE_SECONDS = 20.0
"""A process that sends nothing for this long, not even a heartbeat, hangs."""
STUCK_SECONDS = 600.0
"""A loop that stands still for this long hangs, too, though its process sends heartbeats: no step
takes so long."""
LOADING_SECONDS = 100.0
"""One that is silent for so long before it is ready hangs: it sends heartbeats while it loads."""
NAP_SECONDS = 1.0


class Pulse:
    """Of one engine process, from when it is ready."""

    def __init__(self) -> None:
        self._moved = time.monotonic()
        self._turns = 0
        self._heard = False
        self._moving = False

    @property
    def steady(self) -> bool:
        """Whether the loop was heard of lately."""
        return time.monotonic() - self._moved < STALL_SECONDS

    def hear(self, message: FromEngine) -> None:
        """Take note of any message of the process."""
        self._heard = True
        if isinstance(message, Heartbeat):
            if message.turns == self._turns:
                return  # the process lives, but its loop is where it was
            self._turns = message.turns
        self._moving = True
        self._moved = time.monotonic()

    async def lost(self, loading: bool = False) -> str:
        """Returns, with the reason, once the process hangs; one that loads turns no loop.

        Time is counted in naps: a pause of this process is not taken for one of the engine.
        """
        silence = LOADING_SECONDS if loading else SILENCE_SECONDS
        silent = stuck = 0.0
        while True:
            self._heard = self._moving = False
            await asyncio.sleep(NAP_SECONDS)
            silent = 0.0 if self._heard else silent + NAP_SECONDS
            stuck = 0.0 if self._moving else stuck + NAP_SECONDS
            if silent >= silence:
                return f"nothing was heard of it for {silent:g} seconds"
            if stuck >= STUCK_SECONDS and not loading:
                return f"its loop has stood at turn {self._turns} for {stuck:g} seconds"
