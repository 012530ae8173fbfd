"""Blocks by NIXL: takers read the giver's memory, by whatever UCX finds between two machines (RDMA,
shared memory, TCP). Nothing is encrypted: the network has to be trusted."""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rootlace.runtime.contracts.block_store import BlockLost
from rootlace.wire.errors import InvalidRequest

TAKE_SECONDS = 2.0
"""A block that takes longer is lost ..."""
LOST_SECONDS = 5.0
"""... and its giver is read from again after so many."""
_NAP_SECONDS = 20e-6
_MOST_GIVERS = 64


class Nixl:
    """See `Transfer`. `address` is the agent's name, where its slots begin, and its metadata."""

    def __init__(self, block_bytes: int, num_slots: int, patience: float = TAKE_SECONDS) -> None:
        """`patience`, in seconds: with each block. Raises `InvalidRequest` where NIXL is not
        installed, has no UCX, or cannot be started."""
        try:
            api = importlib.import_module("nixl._api")
        except ImportError as error:
            raise InvalidRequest(f"--disaggregate-by nixl: {error}") from error
        # It logs to the standard output, which has a meaning here.
        logger = logging.getLogger("nixl")
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.WARNING)
        name = secrets.token_hex(16)
        self._patience = patience
        self._slots = np.zeros((num_slots, block_bytes), np.uint8)
        # One is enough, though a read that was given up may still write to it: what is taken has
        # the checksum that was offered, or is computed.
        self._landing = np.zeros(block_bytes, np.uint8)
        self._givers: dict[bytes, str] = {}
        """The names of the agents that are known, those last that were read from last."""
        self._lost: dict[bytes, float] = {}
        """Until when they are not read from."""
        self._ended: list[Any] = []
        """Handles of reads that NIXL has not let go of."""
        try:
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
            if "UCX" not in self._agent.backends:
                raise InvalidRequest("--disaggregate-by nixl: it was built without UCX")
            self._registered = [self._register(self._slots), self._register(self._landing)]
            metadata = self._agent.get_agent_metadata()
        except InvalidRequest:
            raise
        except Exception as error:  # NIXL's own have no base but this one
            raise InvalidRequest(f"--disaggregate-by nixl: {error!r}") from error
        self.address = msgspec.msgpack.encode((name, self._slots.ctypes.data, metadata))

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
        except Exception as error:  # as above
            if len(self._lost) >= _MOST_GIVERS:
                self._lost.clear()
            self._lost[source] = time.monotonic() + LOST_SECONDS
            self._drop(source)
            raise BlockLost(f"{type(error).__name__}: {error}") from error
        into[:] = self._landing

    def close(self) -> None:
        for source in list(self._givers):
            self._drop(source)
        for one in self._registered:
            self._agent.deregister_memory(one)

    def _read(self, source: bytes, slot: int) -> None:
        """Into the landing; raises whatever NIXL does."""
        name, start, metadata = msgspec.msgpack.decode(source, type=tuple[str, int, bytes])
        if source not in self._givers:
            if len(self._givers) >= _MOST_GIVERS:
                self._drop(next(iter(self._givers)))
            self._agent.add_remote_agent(metadata)
        self._givers.pop(source, None)
        self._givers[source] = name
        size = len(self._landing)
        near = self._agent.get_xfer_descs([(self._landing.ctypes.data, size, 0)], "DRAM")
        far = self._agent.get_xfer_descs([(start + slot * size, size, 0)], "DRAM")
        handle = self._agent.initialize_xfer("READ", near, far, name)
        try:
            state, end = self._agent.transfer(handle), time.monotonic() + self._patience
            while state == "PROC":
                if time.monotonic() > end:
                    raise BlockLost("its giver says nothing")
                time.sleep(_NAP_SECONDS)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise BlockLost("it could not be read")
        finally:
            self._ended.append(handle)
            self._release()

    def _release(self) -> None:
        """Let go of what is over. A read that was given up and goes on cannot be let go of yet."""
        ended, self._ended = self._ended, []
        for handle in ended:
            try:
                self._agent.release_xfer_handle(handle)
            except Exception:  # as above
                self._ended.append(handle)

    def _drop(self, source: bytes) -> None:
        """End the connection to a giver: it may be gone, and others come."""
        if (name := self._givers.pop(source, None)) is not None:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(name)

    def _register(self, memory: np.ndarray) -> Any:
        return self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
