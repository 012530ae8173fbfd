"""Deadlines, pins and privacy of operations, as far as the server sees to them."""

from rootlace.wire.protocol import (
    Append,
    Close,
    Done,
    Generate,
    Generated,
    Open,
    Prefill,
    SamplingParams,
)
from rootlace.wire.sampling import Cache, Handling
from tests.server.operations import MakeClient, failed, text
from tests.waiting import skip, until

TRY = Cache(pin="try")


async def test_an_operation_ends_at_its_deadline_and_with_it_its_branch(
    client: MakeClient,
) -> None:
    c = client()
    c.engine.paused = True
    late = Handling(timeout=3600)
    c.send(
        Open(1, 1),
        Append(2, 1, text("x")),
        Generate(3, 1, handling=late),
        Generate(4, 1),
        Open(5, 2),
        Append(6, 2, text("y")),
        Generate(7, 2, params=SamplingParams(max_tokens=1)),
        Generate(8, 2, params=SamplingParams(max_tokens=1), handling=Handling(timeout=1e-9)),
    )
    await until(lambda: len(c.engine.submitted) == 2)
    skip(3600)
    await c.result(4)
    code, message = failed(c, 3)
    assert code == "deadline_exceeded" and "its timeout of 3600 s" in message
    assert failed(c, 4)[0] == "cancelled"
    assert len(c.engine.aborted) == 1
    c.engine.paused = False
    c.engine.step()
    await c.result(8)
    assert isinstance(await c.result(7), Generated)
    assert failed(c, 8)[0] == "deadline_exceeded"  # its time had passed when its turn came


async def test_pins_reach_the_engine_and_are_named(client: MakeClient) -> None:
    c = client()
    pin = Handling(1, cache=Cache(pin=True, ttl=7.0))
    c.send(
        Open(1, 1, namespace="n"),
        Append(2, 1, text("one two three")),
        Prefill(3, 1, pin),
        Generate(4, 1, params=SamplingParams(max_tokens=1), handling=pin),
    )
    generated = await c.result(4)
    assert isinstance(generated, Generated) and isinstance(await c.result(3), Done)
    assert [request.handling for request in c.engine.submitted] == [pin, pin]
    assert {request.client for request in c.engine.submitted} == {"session 1"}
    assert generated.facts.pin == "p1"
    # For one that it only tries the engine finds no room.
    c.send(Generate(5, 1, params=SamplingParams(max_tokens=1), handling=Handling(cache=TRY)))
    refused = await c.result(5)
    assert isinstance(refused, Generated) and not refused.facts.pin


async def test_what_is_not_shared_has_a_namespace_until_its_last_branch_is_closed(
    client: MakeClient,
) -> None:
    c = client()
    c.send(Open(1, 1, namespace="n", share=False), Append(2, 1, text("x")), Open(3, 2, parent=1))
    c.send(Append(4, 2, text("y")), Generate(5, 2, params=SamplingParams(max_tokens=1)))
    c.send(Open(6, 3, namespace="n", share=False), Close(7, 1))
    await c.result(5)
    await c.result(7)
    (request,) = c.engine.submitted
    assert request.namespace.startswith("n~") and not c.engine.forgotten
    c.send(Prefill(10, 3, Handling(cache=Cache(pin=True))), Close(8, 2), Close(9, 3))
    await c.result(9)
    assert failed(c, 10)[0] == "invalid_request"
    assert len(c.engine.forgotten) == 2 and c.engine.forgotten[0] == request.namespace
