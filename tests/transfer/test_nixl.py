"""What is asked of NIXL where givers are lost, of a stand-in for it: it reads memory of this
process, and refuses what NIXL 1.5.1 does. `test_transfers` has the package itself, where it is."""

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rootlace.runtime import transfer
from rootlace.runtime.contracts.block_store import BlockLost
from rootlace.runtime.transfer import Nixl
from rootlace.wire.errors import InvalidRequest

SIZE, SLOTS = 64, 4
Read = tuple[tuple[int, int, int], tuple[int, int, int]]


class Agent:
    """One of NIXL's. Reads from those who are `silent` go on until they are not."""

    silent: set[str] = set()  # noqa: RUF012

    def __init__(self, name: str, config: object) -> None:
        self.name, self.backends = name, ["UCX"]
        self.known: set[str] = set()
        self.registered: list[Any] = []
        self.open: set[int] = set()
        self.reads: list[tuple[Read, str]] = []

    def register_memory(self, regions: list[Any], kind: str) -> Any:
        self.registered.append(regions)
        return regions

    def deregister_memory(self, regions: Any) -> None:
        self.registered.remove(regions)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        self.known.add(metadata.decode())
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_xfer_descs(self, regions: list[Any], kind: str) -> Any:
        return regions[0]

    def initialize_xfer(self, how: str, near: Any, far: Any, name: str) -> int:
        if how != "READ" or name not in self.known:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self.reads.append(((near, far), name))
        self.open.add(len(self.reads) - 1)
        return len(self.reads) - 1

    def transfer(self, handle: int) -> str:
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: int) -> str:
        (near, far), name = self.reads[handle]
        if name in self.silent:
            return "PROC"
        ctypes.memmove(near[0], far[0], far[1])
        return "DONE"

    def release_xfer_handle(self, handle: int) -> None:
        if self.reads[handle][1] in self.silent:
            raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")
        self.open.remove(handle)


@pytest.fixture(autouse=True)
def api(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(nixl_agent=Agent, nixl_agent_config=lambda backends: backends)
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_api=found))
    monkeypatch.setitem(sys.modules, "nixl._api", found)
    monkeypatch.setattr(transfer, "LOST_SECONDS", 0.0)
    monkeypatch.setattr(Agent, "silent", set())
    return found


def taken(taker: Nixl, giver: Nixl, slot: int) -> int:
    into = np.empty(SIZE, np.uint8)
    taker.take(giver.address, slot, into)
    assert (into == into[0]).all()
    return int(into[0])


def full(patience: float = 0.0) -> Nixl:
    found = Nixl(SIZE, SLOTS, patience)
    for slot in range(SLOTS):
        found.put(slot, np.full(SIZE, slot + 1, np.uint8))
    return found


def test_a_giver_that_is_lost_again_and_again_costs_nothing() -> None:
    giver, other, taker = full(), full(), full()
    agent: Agent = taker._agent
    memory = len(agent.registered)
    assert (taken(taker, giver, 1), taken(taker, other, 2)) == (2, 3)
    for _ in range(20):
        Agent.silent.add(giver._agent.name)
        with pytest.raises(BlockLost, match="says nothing"):
            taken(taker, giver, 0)
        assert agent.known == {other._agent.name} and taken(taker, other, 3) == 4
        assert len(agent.open) == 1  # it goes on, and cannot be let go of
        Agent.silent.clear()
        assert taken(taker, giver, 2) == 3
        assert not agent.open
    assert len(agent.registered) == memory
    taker.close()
    assert not agent.registered and not agent.known


def test_no_more_givers_are_known_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MOST_GIVERS", 2)
    first, second, third, taker = full(), full(), full(), full()
    for giver in (first, second, first, third, first):
        assert taken(taker, giver, 0) == 1
    assert taker._agent.known == {first._agent.name, third._agent.name}


@pytest.mark.parametrize("what", ["nixl_agent", "nixl_agent_config"])
def test_what_does_not_start_is_refused_by_name(api: SimpleNamespace, what: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    setattr(api, what, refuse)
    with pytest.raises(InvalidRequest, match=r"--disaggregate-by nixl: .*NIXL_ERR_BACKEND"):
        Nixl(SIZE, SLOTS)


def test_one_without_ucx_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agent, "register_memory", None)

    def without(agent: Agent, name: str, config: object) -> None:
        agent.name, agent.backends = name, []

    monkeypatch.setattr(Agent, "__init__", without)
    with pytest.raises(InvalidRequest, match="built without UCX"):
        Nixl(SIZE, SLOTS)
