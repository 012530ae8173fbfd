"""A branch's adapter: who may use it, and which requests carry it."""

from rootlace.wire.protocol import (
    Append,
    Embed,
    Generate,
    Generated,
    Open,
    Prefill,
    SamplingParams,
    Select,
    Text,
)
from tests.server.fake_engine import FakeEngine
from tests.server.operations import MakeClient, failed, text

FEW = SamplingParams(max_tokens=1)


async def test_a_branch_has_the_adapter_it_is_opened_with_or_that_of_its_parent(
    client: MakeClient,
) -> None:
    c = client(engine=FakeEngine(32000, adapters=("formal", "short")))
    c.send(Open(1, 1, adapter="formal"), Append(2, 1, text("Once upon a time")))
    c.send(Open(3, 2, parent=1), Open(4, 3, parent=1, adapter="short"))
    c.send(Open(5, 4, parent=3, adapter=""))
    for op, branch in ((7, 1), (8, 2), (9, 3), (10, 4)):
        c.send(Generate(op, branch, params=FEW))
        assert isinstance(await c.result(op), Generated)
    asked = c.engine.submitted
    assert [request.adapter for request in asked] == ["formal", "formal", "short", ""]
    # The branches start with the same text, which is computed for each adapter.
    assert len({request.token_ids.tobytes() for request in asked[1:]}) == 1
    asked.clear()
    c.send(Prefill(11, 3), Select(12, 2, (" a", " b")))
    for op in (11, 12):
        await c.result(op)
    assert sorted(request.adapter for request in asked) == ["formal", "formal", "short"]


async def test_an_adapter_that_is_not_loaded(client: MakeClient) -> None:
    c = client(engine=FakeEngine(32000, adapters=("formal",)))
    c.send(Open(1, 1, adapter="loud"), Append(2, 1, text("a")))
    for op in (1, 2):
        await c.result(op)
    assert failed(c, 1) == (
        "invalid_request",
        "the adapter 'loud' is not loaded: there are formal",
    )
    assert failed(c, 2)[0] == "cancelled"
    c.send(Embed(3, (Text("a"),), adapter="loud"), Embed(4, (Text("a"),), adapter="formal"))
    for op in (3, 4):
        await c.result(op)
    assert failed(c, 3)[0] == "invalid_request"
    assert [request.adapter for request in c.engine.submitted] == ["formal"]
