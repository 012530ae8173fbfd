"""Blocks from one engine to another, by each of the ways; and what becomes of givers and takers
that are slow, gone, or not who they should be."""

import importlib.util
import os
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import zmq

from rootlace.runtime import transfer as ways
from rootlace.runtime.contracts.block_store import BlockLost, Transfer
from rootlace.runtime.offload.disk_store import DamagedBlock, checksum
from rootlace.runtime.offload.slot_store import HandedBlocks
from rootlace.runtime.processes import new_memory
from rootlace.runtime.transfer import PIECE_BYTES, Nixl, SharedMemory, Tcp
from rootlace.wire import sockets
from rootlace.wire.errors import InvalidRequest
from tests.waiting import eventually

SLOTS = 8
SIZE = PIECE_BYTES + 1000
KEY = b"k" * 16
Make = Callable[[], Transfer]
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed"
)


def block_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


@pytest.fixture(params=["memory", "tcp", pytest.param("nixl", marks=needs_nixl)])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    memory, made = new_memory(), []

    def one() -> Transfer:
        ways: dict[str, Make] = {
            "memory": lambda: SharedMemory(memory, SIZE),
            "tcp": lambda: Tcp("127.0.0.1", SIZE, SLOTS),
            "nixl": lambda: Nixl(SIZE, SLOTS),
        }
        made.append(ways[request.param]())
        return made[-1]

    yield one
    for transfer in made:
        transfer.close()
    os.close(memory)


@pytest.fixture
def giver() -> Iterator[Tcp]:
    found = Tcp("127.0.0.1", SIZE, SLOTS)
    for slot in range(SLOTS):
        found.put(slot, block_of(slot))
    yield found
    if not found._giving.closed:
        found.close()


@pytest.fixture
def taker() -> Iterator[Tcp]:
    found = Tcp("127.0.0.1", SIZE, SLOTS, patience=20.0)
    yield found
    found.close()


def taken(transfer: Transfer, source: bytes, slot: int) -> np.ndarray:
    into = np.empty(SIZE, np.uint8)
    transfer.take(source, slot, into)
    return into


def test_what_is_put_is_taken_in_any_order_and_by_several(make: Make) -> None:
    one, first, second = make(), make(), make()
    for slot in (5, 0, 3):
        one.put(slot, block_of(slot))
    first.expect(one.address, [3, 5])
    for slot in (3, 5, 0, 3):
        assert (taken(first, one.address, slot) == block_of(slot)).all()
        assert (taken(second, one.address, slot) == block_of(slot)).all()
    one.put(3, block_of(30))
    assert (taken(first, one.address, 3) == block_of(30)).all()
    assert HandedBlocks(one, SIZE, SLOTS).block_seconds() > 0


def test_what_is_not_what_was_offered_is_refused(make: Make) -> None:
    one, other = make(), make()
    one.put(2, block_of(2))
    blocks, into = HandedBlocks(other, SIZE, SLOTS), np.empty(SIZE, np.uint8)
    blocks.offer(7, one.address, 2, checksum(KEY, block_of(2)))
    blocks.read(7, KEY, into)
    assert (into == block_of(2)).all()
    with pytest.raises(DamagedBlock):  # the same content at another place in a prompt
        blocks.read(7, b"x" * 16, into)
    changed = block_of(2)
    changed[SIZE // 2] ^= 1
    one.put(2, changed)
    with pytest.raises(DamagedBlock):
        blocks.read(7, KEY, into)
    assert blocks.lost == 0


def test_a_giver_that_is_gone_is_noticed_at_once_and_asked_again_later(
    giver: Tcp, taker: Tcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (taken(taker, giver.address, 1) == block_of(1)).all()
    taker.expect(giver.address, [1, 2])
    source = giver.address
    giver.close()
    for _ in range(3):  # what was on its way may have come
        try:
            taken(taker, source, 4)
        except BlockLost:
            break
    with pytest.raises(BlockLost, match="a moment ago"):
        taken(taker, source, 1)
    taker.expect(source, [1])
    monkeypatch.setattr(taker, "_lost", {})
    with pytest.raises(BlockLost, match="gone"):
        taken(taker, source, 1)
    # Others are not meant.
    taker.put(1, block_of(9))
    assert (taken(taker, taker.address, 1) == block_of(9)).all()


def test_a_giver_that_says_nothing_is_not_waited_for(giver: Tcp) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        public, secret = zmq.curve_keypair()
        source = msgspec.msgpack.encode((sockets.bind(mute, "127.0.0.1", secret), public))
        hasty = Tcp("127.0.0.1", SIZE, SLOTS, patience=0.05)
        with pytest.raises(BlockLost, match="says nothing"):
            taken(hasty, source, 1)
        hasty.close()


def test_who_was_not_told_the_key_gets_nothing(giver: Tcp, taker: Tcp) -> None:
    address, _ = msgspec.msgpack.decode(giver.address, type=tuple[str, bytes])
    wrong = msgspec.msgpack.encode((address, zmq.curve_keypair()[0]))
    with pytest.raises(BlockLost):
        Tcp.take(taker, wrong, 1, np.empty(SIZE, np.uint8))
    assert (taken(taker, giver.address, 1) == block_of(1)).all()


def test_a_slot_that_there_is_not_and_what_is_no_question(giver: Tcp, taker: Tcp) -> None:
    with pytest.raises(BlockLost, match="0 bytes"):
        taken(taker, giver.address, SLOTS)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        address, public = msgspec.msgpack.decode(giver.address, type=tuple[str, bytes])
        sockets.connect(stranger, address, public)
        stranger.send_multipart([b"what", b"is", b"this"])
        stranger.send(b"")
        eventually(lambda: stranger.poll(0) > 0)  # the empty one is slot 0
        assert len(stranger.recv_multipart()) == 3
    taker._lost.clear()
    assert (taken(taker, giver.address, 3) == block_of(3)).all()


def test_who_reads_nothing_holds_nobody_up(giver: Tcp, taker: Tcp) -> None:
    """It asks for more than fits between the two; others get theirs, and it gets the first ones."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as slow:
        slow.linger, slow.rcvhwm = 0, 1
        address, public = msgspec.msgpack.decode(giver.address, type=tuple[str, bytes])
        sockets.connect(slow, address, public)
        asked, came = 100, []
        for _ in range(asked):
            slow.send((1).to_bytes(4, "little"))
        wanted = [block_of(slot) for slot in range(SLOTS)]
        # The giver hears both in turns: then it has heard all that the slow one asked.
        for number in range(asked):
            slot = number % SLOTS
            assert (taken(taker, giver.address, slot) == wanted[slot]).all()

        def reads() -> bool:
            while slow.poll(0):
                came.append(b"".join(slow.recv_multipart()[1:]))
            return len(came) >= ways.MOST_REPLIES

        eventually(reads)
    assert set(came) == {wanted[1].tobytes()} and len(came) < asked


def test_an_interface_that_is_not_there_is_refused() -> None:
    with pytest.raises(OSError, match=r"203\.0\.113\.1"):
        Tcp("203.0.113.1", SIZE, SLOTS)


@pytest.mark.skipif(importlib.util.find_spec("nixl") is not None, reason="nixl is installed")
def test_nixl_is_refused_by_name_where_it_is_not_installed() -> None:
    with pytest.raises(InvalidRequest, match="--disaggregate-by nixl: No module named 'nixl'"):
        Nixl(SIZE, SLOTS)
