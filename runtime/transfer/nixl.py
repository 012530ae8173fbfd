"""Blocks by NIXL: takers read the giver's memory, by whatever UCX finds between two machines (RDMA,
shared memory, TCP). Nothing is encrypted: the network has to be trusted."""

from __future__ import annotations

import importlib
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rootlace.runtime.contracts.transfer import BlockLost
from rootlace.wire.errors import InvalidRequest

TAKE_SECONDS = 2.0
"""A block that takes longer is lost ..."""
LOST_SECONDS = 5.0
"""... and its giver is read from again after so many."""
_NAP_SECONDS = 20e-6
_MOST_LOST = 64


class Nixl:
    """See `Transfer`. `address` is the agent's name, where its slots begin, and its metadata."""

    def __init__(self, block_bytes: int, num_slots: int, patience: float = TAKE_SECONDS) -> None:
        """`patience`, in seconds: with each block. Raises `InvalidRequest` where NIXL is not
        installed, or has no UCX."""
        try:
            api = importlib.import_module("nixl._api")
        except ImportError as error:
            raise InvalidRequest(f"--disaggregate-by nixl: {error}") from error
        # It logs to the standard output, which has a meaning here.
        logger = logging.getLogger("nixl")
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.WARNING)
        name = secrets.token_hex(16)
        self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        if "UCX" not in self._agent.backends:
            raise InvalidRequest("--disaggregate-by nixl: it was built without UCX")
        self._patience = patience
        self._slots = np.zeros((num_slots, block_bytes), np.uint8)
        self._given = self._register(self._slots)
        self._landing = self._new_landing()
        self._abandoned: list[Any] = []
        """Where blocks that came too late may still be written to."""
        self._known: set[bytes] = set()
        self._lost: dict[bytes, float] = {}
        """Until when they are not read from."""
        at = self._slots.ctypes.data
        self.address = msgspec.msgpack.encode((name, at, self._agent.get_agent_metadata()))

    def put(self, slot: int, block: np.ndarray) -> None:
        self._slots[slot] = block

    def expect(self, source: bytes, slots: Sequence[int]) -> None:
        """Reading is quick, and asks nobody."""

    def take(self, source: bytes, slot: int, into: np.ndarray) -> None:
        if time.monotonic() < self._lost.get(source, 0.0):
            raise BlockLost("its giver was lost a moment ago")
        if source == self.address:
            into[:] = self._slots[slot]
            return
        try:
            self._read(source, slot)
        except Exception as error:  # NIXL's own have no base but this one
            self._abandoned.append(self._landing)
            self._landing = self._new_landing()
            if len(self._lost) >= _MOST_LOST:
                self._lost.clear()
            self._lost[source] = time.monotonic() + LOST_SECONDS
            raise BlockLost(f"{type(error).__name__}: {error}") from error
        into[:] = self._landing[0]

    def close(self) -> None:
        self._agent.deregister_memory(self._given)

    def _read(self, source: bytes, slot: int) -> None:
        """Into the landing; raises whatever NIXL does."""
        name, start, metadata = msgspec.msgpack.decode(source, type=tuple[str, int, bytes])
        if source not in self._known:
            self._agent.add_remote_agent(metadata)
            self._known.add(source)
        size = self._slots.shape[1]
        near = self._agent.get_xfer_descs([(self._landing[0].ctypes.data, size, 0)], "DRAM")
        far = self._agent.get_xfer_descs([(start + slot * size, size, 0)], "DRAM")
        handle = self._agent.initialize_xfer("READ", near, far, name)
        state, end = self._agent.transfer(handle), time.monotonic() + self._patience
        while state == "PROC":
            if time.monotonic() > end:
                raise BlockLost("its giver says nothing")
            time.sleep(_NAP_SECONDS)
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise BlockLost("it could not be read")

    def _new_landing(self) -> tuple[np.ndarray, Any]:
        memory = np.zeros(self._slots.shape[1], np.uint8)
        return memory, self._register(memory)

    def _register(self, memory: np.ndarray) -> Any:
        return self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
