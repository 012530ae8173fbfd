"""Messages of sockets in an event loop: none lost, none stuck, others get their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import zmq

from rootlace.client.channel import call_in_loop, call_together
from rootlace.wire.sockets import BURST, MessageReader
from tests.waiting import until

Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    with zmq.Context() as context:
        ends = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        ends[0].bind("inproc://pair")
        ends[1].connect("inproc://pair")
        yield ends
        for end in ends:
            end.close(linger=0)


async def test_all_messages_come_in_order_also_those_before_it_began(pair: Pair) -> None:
    ours, theirs = pair
    count = 5 * BURST + 3
    for number in range(count // 2):
        theirs.send_multipart([b"n", str(number).encode()])
    got: list[int] = []
    reader = MessageReader(ours, lambda frames: got.append(int(frames[1])))
    for number in range(count // 2, count):
        theirs.send_multipart([b"n", str(number).encode()])
    await until(lambda: len(got) == count)
    assert got == list(range(count))
    reader.close()


async def test_others_have_their_turn_in_a_flood(pair: Pair) -> None:
    ours, theirs = pair
    for _ in range(10 * BURST):
        theirs.send(b"x")
    got: list[object] = []
    reader = MessageReader(ours, got.append)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < len(got) < 10 * BURST
    await until(lambda: len(got) == 10 * BURST)
    reader.close()


async def test_what_a_send_was_told_of_is_read_after_a_look(pair: Pair) -> None:
    """Ping-pong: each message is sent in reply, so each send may consume the socket's signal."""
    ours, theirs = pair
    got: list[object] = []
    readers: list[MessageReader] = []

    def answer(end: int, frames: list[bytes]) -> None:
        got.append(frames)
        if len(got) < 400:
            pair[end].send(b"again", zmq.NOBLOCK)
            readers[end].look()

    readers.append(MessageReader(ours, lambda frames: answer(0, frames)))
    readers.append(MessageReader(theirs, lambda frames: answer(1, frames)))
    ours.send(b"begin")
    readers[0].look()
    await until(lambda: len(got) == 400)
    for reader in readers:
        reader.close()


async def test_the_one_who_takes_may_close_it(pair: Pair) -> None:
    ours, theirs = pair
    got: list[object] = []

    def take(frames: list[bytes]) -> None:
        got.append(frames)
        reader.close()

    reader = MessageReader(ours, take)
    for _ in range(3):
        theirs.send(b"x")
    await until(lambda: bool(got))
    await asyncio.sleep(0.02)
    assert len(got) == 1
    reader.close()


async def test_what_loops_are_to_call_is_told_at_once_and_called_in_order() -> None:
    loop = asyncio.get_running_loop()
    called: list[int] = []
    told = 0
    plain = loop.call_soon_threadsafe

    def counted(*args: object) -> object:
        nonlocal told
        told += 1
        return plain(*args)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign,assignment]

    def deliver() -> None:
        for number in range(10):
            call_in_loop(loop, lambda number=number: called.append(number))  # type: ignore[misc]
        raise ValueError("what was gathered is told all the same")

    with pytest.raises(ValueError, match="all the same"):
        call_together(deliver)
    call_in_loop(loop, lambda: called.append(10))
    await until(lambda: len(called) == 11)
    assert called == list(range(11)) and told == 2


async def test_messages_behind_one_that_cannot_be_handled_come_nevertheless(pair: Pair) -> None:
    ours, theirs = pair
    for number in range(3):
        theirs.send(str(number).encode())
    got: list[int] = []

    def take(frames: list[bytes]) -> None:
        got.append(int(frames[0]))
        if got[-1] == 0:
            raise ValueError("not today")

    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    reader = MessageReader(ours, take)
    await until(lambda: got == [0, 1, 2])
    reader.close()
    assert len(failures) == 1
