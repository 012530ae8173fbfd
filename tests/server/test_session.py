"""A session over the fake engine: operations in order, bounds, end."""

import asyncio
import random

import pytest

from rootlace.runtime.server.auth import Account, new_key
from rootlace.runtime.server.session import Session
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.errors import InternalError
from rootlace.wire.protocol import (
    Append,
    Cancel,
    Chunk,
    Close,
    Done,
    Failed,
    FlushCache,
    Generate,
    Generated,
    GetStatus,
    Goodbye,
    Op,
    Open,
    Ping,
    Prefill,
    Quote,
    SamplingParams,
    Select,
    Status,
    Text,
    Tokens,
)
from tests.server.fake_engine import FakeEngine
from tests.server.operations import MakeClient, failed, prompt_of, text
from tests.waiting import until


async def test_what_need_not_wait_is_done_at_once(client: MakeClient) -> None:
    c = client()
    c.send(Open(1, 1), Append(2, 1, text("Once")), Open(3, 2, parent=1), Generate(4, 2))
    assert len(c.engine.submitted) == 1, "the fork and its request wait for nobody"
    c.send(Append(5, 2, text("more")), Cancel(6, 2), Close(7, 2))
    assert isinstance(await c.result(4), Failed)
    assert isinstance(await c.result(5), Failed)
    assert isinstance(await c.result(7), Done)
    assert isinstance(await c.result(2), Done)


async def test_open_append_generate_streams(client: MakeClient) -> None:
    c = client()
    words = c.model.tokenizer.encode(" there was a little girl", add_special_tokens=False)[1:]
    c.engine.script = lambda _: [*words, 2, 5, 5]
    c.send(
        Open(1, 7),
        Append(2, 7, text("Once upon a")),
        Append(3, 7, text(" time,")),
        Generate(4, 7, stream=True),
        Close(5, 7),
    )
    generated = await c.result(4)
    assert isinstance(generated, Generated)
    assert await c.result(5) == Done(5)
    (output,) = generated.outputs
    assert output.finish_reason == "stop" and output.matched == 2
    assert output.token_ids == (*words, 2)
    chunks = [e for e in c.of(4) if isinstance(e, Chunk)]
    assert len(chunks) > 2
    assert "".join(e.text for e in chunks) == output.text == " there was a little girl"
    assert [i for e in chunks for i in e.token_ids] == [*words, 2]
    assert prompt_of(c) == c.model.tokenizer.encode("Once upon a time,")
    assert generated.usage.prompt_tokens == len(prompt_of(c))
    assert generated.usage.completion_tokens == len(words) + 1
    assert [e.op for e in c.events if not isinstance(e, Chunk)] == [1, 2, 3, 4, 5]
    assert c.model.branch_count == 0


async def test_generated_ids_are_kept(client: MakeClient) -> None:
    c = client()
    # An unusual tokenization of "hello": never replaced by the usual one.
    ids = [c.model.tokenizer.id_of(x) for x in ("h", "e", "l", "l", "o")]
    c.engine.script = lambda _: [i for i in ids if i is not None]
    c.send(
        Open(1, 1),
        Append(2, 1, text("Say")),
        Generate(3, 1, params=SamplingParams(max_tokens=5)),
        Append(4, 1, text(" again")),
        Generate(5, 1),
    )
    await c.result(5)
    tokenizer = c.model.tokenizer
    after = tokenizer.encode_pieces((Piece(" again"),), previous=ids[-1])
    assert prompt_of(c) == tokenizer.encode("Say") + ids + after


async def test_many_short_appends_are_one_text(client: MakeClient) -> None:
    c = client()
    words = [f" w{i}" for i in range(2000)]
    c.send(Open(1, 1), *(Append(2 + i, 1, text(word)) for i, word in enumerate(words)))
    await c.result(2001)
    branch = c.session._branches[1]
    assert 1 < len(branch.state.pending) < 10
    assert "".join(piece.text for piece in branch.state.pending) == "".join(words)
    c.send(Append(3000, 1, (Text("<s>", special=True), Text("<s>"), Text("</s>", special=True))))
    await c.result(3000)
    assert branch.state.pending[-3:] == (Piece("<s>", True), Piece("<s>"), Piece("</s>", True))


async def test_close_frees_everything(client: MakeClient) -> None:
    c = client()
    c.engine.paused = True
    c.send(Open(1, 1, program="p"), Append(2, 1, text("x")), Generate(3, 1))
    c.send(Open(4, 2, parent=1, program="ignored"), Open(5, 3, program="q", namespace="n"))
    c.send(Append(6, 3, text("x")), Generate(7, 3))
    await c.settle()
    assert c.engine.submitted[0].program != c.engine.submitted[1].program
    assert [m.namespace for m in c.engine.submitted] == ["", "n"]
    count = len(c.events)
    c.session.close()
    await c.settle()
    assert not c.engine.running and c.model.branch_count == 0 and c.model.session_count == 0
    assert len(c.events) == count
    assert len(c.engine.released) == 2
    c.send(Ping(8))
    c.session.close()
    await c.settle()
    assert len(c.events) == count


async def test_operations_of_the_session(client: MakeClient) -> None:
    c = client()
    c.send(Ping(1), FlushCache(2), GetStatus(3))
    await c.result(3)
    assert c.terminal(1) == Done(1) and c.terminal(2) == Done(2) and c.engine.flushes == 1
    status = c.terminal(3)
    assert isinstance(status, Status)
    assert status.values == {"submitted": 0, "sessions": 1, "branches": 0}
    c.send(Open(4, 1), Goodbye(5), Ping(6))
    await c.settle()
    assert c.terminal(5) == Done(5) and c.terminal(6) is None
    assert c.session.closed and c.model.branch_count == 0


async def test_long_texts_are_tokenized_in_order(client: MakeClient) -> None:
    """Texts long enough for a thread keep their place among short ones."""
    c = client(engine=FakeEngine(4096, context_length=100_000, capacity_tokens=100_000))
    long = "once upon a time " * 500
    c.send(Open(1, 1), Append(2, 1, text(long)), Generate(3, 1), Append(4, 1, text("x")))
    c.send(Open(5, 2, parent=1), Close(6, 1), Generate(7, 2))
    await until(lambda: c.terminal(7) is not None)
    assert [e.op for e in c.events if e.op in (2, 3, 4, 6)] == [2, 3, 4, 6]
    assert prompt_of(c, 0) == c.model.tokenizer.encode(long)


@pytest.mark.parametrize("seed", range(30))
async def test_one_terminal_event_per_operation(client: MakeClient, seed: int) -> None:
    """Holds for all operations, cancellations and engine failures."""
    rng = random.Random(seed)
    c = client(max_branches=12)
    c.engine.tokens_per_step = rng.randrange(1, 4)
    c.engine.script = lambda m: (
        InternalError("boom") if rng.random() < 0.1 else [rng.randrange(3, 4096) for _ in range(6)]
    )
    sent: dict[int, Op] = {}
    for number in range(1, 150):
        branch, other = rng.randrange(8), rng.randrange(8)
        op: Op = rng.choice(
            [
                Open(number, branch),
                Open(number, branch, parent=other, program="p"),
                Append(number, branch, text(rng.choice(("abc", " x", "<s>", "é")))),
                Append(number, branch, (Text("y"), Quote(other), Tokens((rng.randrange(5000),)))),
                Generate(number, branch, stream=True, params=SamplingParams(n=2, stop=("e",))),
                Generate(number, branch),
                Prefill(number, branch),
                Select(number, branch, ("yes", "no")),
                Cancel(number, branch),
                Close(number, branch),
                Ping(number),
                GetStatus(number),
            ]
        )
        sent[number] = op
        c.send(op)
        for _ in range(rng.choice((0, 0, 0, 1, 5, 40))):
            await asyncio.sleep(0)
    for number in sent:
        await c.result(number)
    per_branch: dict[int, list[int]] = {}
    for event in c.events:
        branch_id = getattr(sent[event.op], "branch", None)
        if branch_id is not None and not isinstance(event, Chunk):
            message = getattr(event, "message", "")
            if "is not open" not in message and "open already" not in message:
                per_branch.setdefault(branch_id, []).append(event.op)
    for order in per_branch.values():
        spans = "".join("C" if isinstance(sent[n], Close) else "." for n in order)
        for span, ops in zip(spans.split("C"), _split(order, sent), strict=True):
            assert ops == sorted(ops), span
    assert all(
        e.code != "internal" or e.message == "boom" for e in c.events if isinstance(e, Failed)
    )
    c.session.close()
    await c.settle()
    assert not c.engine.running and c.model.branch_count == 0


def _split(order: list[int], sent: dict[int, Op]) -> list[list[int]]:
    """Split the operations of one branch id into a list for each branch with that id."""
    groups: list[list[int]] = [[]]
    for number in order:
        groups[-1].append(number)
        if isinstance(sent[number], Close):
            groups.append([])
    return groups


async def test_what_may_wait_is_bounded(client: MakeClient) -> None:
    c = client(max_message_bytes=100_000)
    c.engine.paused = True
    c.send(Open(1, 1), Append(2, 1, text("x")), Generate(3, 1), Open(4, 2))
    for op in range(5, 105):
        c.send(Append(op, 1, text("y" * 10_000)))
    c.send(Append(200, 2, text("z")))
    await c.settle()
    assert failed(c, 104)[0] == "overloaded" and failed(c, 5)[0] == "cancelled"
    assert "overloaded" in {failed(c, op)[0] for op in range(5, 105)}
    assert c.terminal(200) == Done(200)  # the other branch works, and there is room again
    assert c.session._backlog._waiting == 0


async def test_a_key_is_told_of_its_own_counters_alone(client: MakeClient) -> None:
    c = client()
    _, entry = new_key("a")
    account = Account(entry, lambda *given: None, lambda: None)
    session = Session(c.model, c.events.extend, account=account)
    session.handle([GetStatus(7)])
    told = await c.result(7)
    assert isinstance(told, Status) and told.values == {"branches": 0}
