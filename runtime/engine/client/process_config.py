"""Configuration of an engine process, in its own file: the starter imports asyncio, which an engine
does not need."""

from __future__ import annotations

import msgspec

from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.block_store import TransferConfig


class EngineProcessConfig(msgspec.Struct, frozen=True):
    """Configuration of the engine process, read from its standard input."""

    engine: EngineConfig
    inbox: str
    outbox: str
    socket_folder: str
    record: str
    """Path where the engine writes the requests of its steps (`step_record`)."""
    replica: int = 0
    replicas: int = 1
    """Index among the engines of this machine, and their count."""
    digest_key: str = ""
    """Key of the digests that the engine reports of its cache, hexadecimal; empty: no reports."""
    transfer: TransferConfig | None = None
    """Configuration of block transfer, if any; a file descriptor in it is inherited."""
    host_memory: int = -1
    """Inherited descriptor of the host memory below the pool; negative: none."""
