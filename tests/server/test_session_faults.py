"""Faults and cancellation: a failed operation breaks its branch and no other."""

import pytest

from rootlace.wire.errors import Overloaded
from rootlace.wire.protocol import (
    Append,
    Cancel,
    Chunk,
    Close,
    Done,
    Generate,
    Generated,
    GetStatus,
    Hello,
    Op,
    Open,
    Quote,
    SamplingParams,
    Select,
    Text,
    Tokens,
)
from tests.server.conftest import load
from tests.server.operations import MakeClient, failed, text


@pytest.mark.parametrize(
    ("op", "needle"),
    [
        (Append(2, 1, (Tokens((99999,)),)), "99999 is not a token id"),
        (Append(2, 1, (Tokens((-1,)),)), "-1 is not a token id"),
        (Append(2, 1, (Tokens((5, 2**40)),)), "1099511627776 is not a token id"),
        (Append(2, 1, (Quote(77),)), "quoted branch 77 is not open"),
        (Append(2, 1, (Text("\ud800"),)), "not valid Unicode"),
        (Generate(2, 1, params=SamplingParams(stop_token_ids=(5000,))), "stop_token_ids: 5000"),
        (Generate(2, 1, params=SamplingParams(logit_bias={-3: 1.0})), "logit_bias: -3"),
        (Generate(2, 1, params=SamplingParams(stop=("a", "b" * 2000))), "stop[1] has 2000"),
        (Select(2, 1, ()), "no choices"),
        (Select(2, 1, ("a", "")), "choice 1 is empty"),
    ],
)
async def test_bad_operations_break_their_branch_only(
    client: MakeClient, op: Op, needle: str
) -> None:
    c = client()
    c.send(
        Open(1, 1),
        Open(10, 9, parent=1),
        op,
        Append(3, 1, text("x")),
        Open(4, 2, parent=1),
        Generate(5, 2),
        Close(6, 1),
        Append(11, 9, text("fine")),
        Generate(12, 9),
    )
    assert isinstance(await c.result(12), Generated)
    code, message = failed(c, 2)
    assert code == "invalid_request" and needle in message
    for later in (3, 4, 5):
        assert failed(c, later) == ("cancelled", message)
    assert c.terminal(6) == Done(6)


async def test_what_nobody_expected_names_no_path(
    client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device", "/srv/secret")

    c = client()
    for name in ("submit", "stats"):
        monkeypatch.setattr(c.engine, name, broken)
    c.send(Open(1, 1), Append(2, 1, text("x")), Generate(3, 1), GetStatus(4))
    for op in (3, 4):
        await c.result(op)
        assert failed(c, op) == ("internal", "internal error (OSError)")


async def test_empty_branch(client: MakeClient) -> None:
    c = client(tokenizer=load("gpt2"))
    c.send(Open(1, 1), Generate(2, 1))
    await c.result(2)
    assert failed(c, 2)[0] == "invalid_request" and "empty" in failed(c, 2)[1]


async def test_unknown_and_duplicate_branches(client: MakeClient) -> None:
    c = client()
    c.send(
        Generate(1, 5),
        Open(2, 1),
        Open(3, 1),
        Append(4, 1, text("still there")),
        Open(5, 6, parent=44),
        Append(6, 6, text("x")),
        Open(0, 8),
        Hello(7, 1),
        Close(8, 1),
        Close(9, 1),
        Open(10, 1),
    )
    await c.result(10)
    await c.result(6)
    assert failed(c, 1)[1] == "branch 5 is not open"
    assert "open already" in failed(c, 3)[1]
    assert c.terminal(4) == Done(4)
    assert failed(c, 5)[0] == "invalid_request" and failed(c, 6)[0] == "cancelled"
    assert failed(c, 0)[0] == "invalid_request" and failed(c, 7)[0] == "protocol"
    assert c.terminal(8) == Done(8) and failed(c, 9)[0] == "invalid_request"
    assert c.terminal(10) == Done(10)


async def test_engine_errors_keep_their_type(client: MakeClient) -> None:
    c = client()
    c.engine.script = lambda m: Overloaded("too many") if m.rid == 2 else [5] * 1000
    c.send(
        Open(1, 1),
        Append(2, 1, text("x")),
        Generate(3, 1, params=SamplingParams(n=3, max_tokens=1000)),
        Generate(4, 1),
    )
    await c.result(4)
    assert failed(c, 3) == ("overloaded", "too many")
    assert failed(c, 4) == ("cancelled", "too many")
    # The other samples ended, too.
    assert not c.engine.running and sorted(c.engine.aborted) == [1, 3]


async def test_cancel_running_and_queued(client: MakeClient) -> None:
    c = client()
    c.engine.paused = True
    c.send(
        Open(1, 1),
        Append(2, 1, text("x")),
        Open(20, 2, parent=1),
        Generate(3, 1, params=SamplingParams(max_tokens=8), stream=True),
        Append(4, 1, text("y")),
        Open(5, 3, parent=1),
        Generate(21, 2),
        Append(22, 2, (Quote(1),)),
    )
    await c.settle()
    c.engine.step()
    assert len(c.engine.running) == 2
    c.send(Cancel(6, 1), Append(7, 1, text("z")), Close(8, 1))
    await c.settle()
    for op in (3, 4, 5, 7):
        assert failed(c, op) == ("cancelled", "cancelled by the client")
    assert c.terminal(6) == Done(6) and c.terminal(8) == Done(8)
    order = [e.op for e in c.events if e.op in (3, 4, 6, 7, 8) and not isinstance(e, Chunk)]
    assert order == [3, 4, 6, 7, 8]
    assert c.engine.aborted == [1] and list(c.engine.running) == [2]
    c.engine.paused = False
    c.engine._schedule()
    assert isinstance(await c.result(21), Generated)
    await c.result(22)
    assert failed(c, 22)[0] == "cancelled" and "quoted branch 1" in failed(c, 22)[1]


async def test_cancel_behind_a_close(client: MakeClient) -> None:
    c = client()
    c.engine.paused = True
    c.send(Open(1, 1), Append(2, 1, text("x")), Generate(3, 1), Close(4, 1))
    c.send(Open(5, 1), Append(6, 1, text("y")), Generate(7, 1), Close(8, 1))  # the id is used again
    await c.settle()
    assert len(c.engine.running) == 2
    c.send(Cancel(9, 1))
    await c.settle()
    assert failed(c, 7) == ("cancelled", "cancelled by the client")
    assert c.terminal(8) == Done(8) and c.terminal(9) == Done(9) and c.terminal(3) is None
    c.engine.paused = False
    c.engine._schedule()
    assert isinstance(await c.result(3), Generated)
    await c.settle()
    c.send(Cancel(10, 1))
    await c.settle()
    assert failed(c, 10) == ("invalid_request", "branch 1 is not open")


async def test_cancel_while_waiting_for_a_parent(client: MakeClient) -> None:
    c = client()
    c.engine.paused = True
    c.send(Open(1, 1), Append(2, 1, text("x")), Generate(3, 1), Open(4, 2, parent=1))
    await c.settle()
    c.send(Cancel(5, 2))
    await c.settle()
    assert failed(c, 4)[0] == "cancelled" and c.terminal(5) == Done(5)
    assert c.terminal(3) is None
    c.engine.paused = False
    c.engine._schedule()
    assert isinstance(await c.result(3), Generated)
