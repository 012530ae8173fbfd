"""Where a client's engines run, as far as the client knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from rootlace.runtime.contracts.messages import FromEngine, Ready, ToEngine


class PlacedEngine(Protocol):
    """One engine, from before it is there until it has ended."""

    def send(self, message: ToEngine) -> None: ...

    async def ready(self) -> Ready:
        """Wait until it can be used."""
        ...

    async def ended(self) -> int | None:
        """Its exit status, once it has ended; None where nobody knows it."""
        ...

    def kill(self) -> None: ...

    def in_step(self) -> Mapping[int, int] | None:
        """Who was in the steps in which it ended, and how long they were to become; None where
        nobody knows, or where it ended because it was to."""
        ...

    async def end(self, patience: float = 0.0) -> None:
        """Have it end, with `patience` seconds for what it writes."""
        ...

    def close(self) -> None: ...


class Place(Protocol):
    """Has one engine after another."""

    @property
    def patient(self) -> bool:
        """Whether somebody else starts them, when there is one to start."""
        ...

    def open(self, hear: Callable[[FromEngine], None]) -> PlacedEngine:
        """The next one; `hear` gets what it says when it is ready, and before."""
        ...

    def close(self) -> None: ...
