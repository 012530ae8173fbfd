"""Bad input gets a typed error and disturbs no other request."""

from __future__ import annotations

import random
import socket
import struct

import msgspec
import pytest

from rootlace.wire import protocol
from rootlace.wire.protocol import (
    Append,
    Close,
    Constraint,
    Failed,
    Generate,
    Generated,
    Open,
    SamplingParams,
    Text,
    Tokens,
    Welcome,
)
from tests.e2e.conftest import RawClient, Server
from tests.waiting import eventually

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def works(client: RawClient) -> None:
    """Check that the connection still serves."""
    branch = 1_000_000 + client.op()
    op = client.op()
    client.send(
        Open(client.op(), branch),
        Append(client.op(), branch, (Text("Hello there"),)),
        Generate(op, branch, params=GREEDY),
        Close(client.op(), branch),
    )
    assert isinstance(client.wait(op), Generated)


def raw(**fields: object) -> bytes:
    return msgspec.msgpack.encode([fields])


MALFORMED = {
    "not msgpack": b"\xc1\xc1\xc1",
    "not a list": msgspec.msgpack.encode({"type": "open"}),
    "empty frame": b"",
    "unknown op": raw(type="explode", op=9),
    "no op id": raw(type="open", branch=1),
    "wrong type": raw(type="open", op=9, branch="one"),
    "unknown field": raw(type="open", op=9, branch=1, colour="red"),
    "bad parameter": raw(type="generate", op=9, branch=1, params={"temperature": -1.0}),
    "nan": raw(type="generate", op=9, branch=1, params={"temperature": float("nan")}),
    "huge id": raw(
        type="append", op=9, branch=1, parts=[{"type": "tokens", "ids": [2**70 % 2**63]}]
    ),
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_frames_are_answered_and_survived(server: Server, client, frame) -> None:
    bystander = RawClient(server.address)
    client.send_frame(frame)
    failed = [e for e in client.receive() if isinstance(e, Failed)]
    assert failed
    assert failed[0].code in ("protocol", "invalid_request")
    assert failed[0].message
    works(bystander)
    works(client)
    bystander.close()


def test_random_bytes_do_not_disturb_anybody(server: Server, client: RawClient) -> None:
    rng = random.Random(0)
    noisy = RawClient(server.address)
    for _ in range(50):
        noisy.send_frame(rng.randbytes(rng.randrange(1, 200)))
    noisy.send_frame(b"many", b"frames", b"", b"\x90")
    works(client)
    noisy.close()


def test_http_clients_that_vanish_leave_nothing_behind(server: Server, client: RawClient) -> None:
    """Some clients vanish before their stream begins, some within; the engine checks its blocks."""
    before = client.status()["sessions"]
    body = b'{"prompt": "Once", "max_tokens": 500, "ignore_eos": true, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    place = server.url.removeprefix("http://").split(":")
    for number in range(40):
        with socket.create_connection((place[0], int(place[1]))) as gone:
            gone.sendall(head % len(body) + body[: -(number % 3 == 0) or None])
            if number % 3 == 1:
                gone.recv(1)
            reset = struct.pack("ii", 1, 0)
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    works(client)
    eventually(lambda: (client.status()["running"], client.status()["sessions"]) == (0, before))


def test_a_wrong_version_and_a_missing_hello_are_refused(server: Server, client) -> None:
    wrong = RawClient(server.address, version=999)
    assert isinstance(wrong.greeting, Failed)
    assert wrong.greeting.code == "protocol"
    assert "999" in wrong.greeting.message
    wrong.close()
    works(client)


def test_the_api_key_is_needed_where_one_is_set(start_server) -> None:
    server = start_server(api_key="open sesame")
    for key in ("", "wrong"):
        stranger = RawClient(server.address, api_key=key)
        assert isinstance(stranger.greeting, Failed)
        assert stranger.greeting.code == "unauthorized"
        stranger.close()
    friend = RawClient(server.address, api_key="open sesame")
    assert isinstance(friend.greeting, Welcome)
    works(friend)
    friend.close()


def test_requests_that_cannot_be_served_say_why(client: RawClient) -> None:
    model = client.greeting.model
    long, late = client.op(), client.op()
    client.send(
        Open(client.op(), 1),
        Append(long, 1, (Tokens((5,) * (model.context_length + 1)),)),
        Generate(late, 1, params=GREEDY),
    )
    event = client.wait(long)
    assert isinstance(event, Failed)
    assert event.code == "context_length_exceeded"
    assert str(model.context_length) in event.message
    broken = client.wait(late)
    assert isinstance(broken, Failed)
    assert broken.code == "cancelled"

    cases = {
        "unknown branch": (Generate(0, 77, params=GREEDY), "77"),
        "branch twice": (Open(0, 1), "1"),
        "unknown parent": (Open(0, 2, parent=78), "78"),
        "no token": (Append(0, 3, (Tokens((model.vocab_size,)),)), str(model.vocab_size)),
        "negative token": (Append(0, 4, (Tokens((-1,)),)), "-1"),
    }
    client.send(Open(client.op(), 3), Open(client.op(), 4))
    for name, (op, said) in cases.items():
        number = client.op()
        client.send(msgspec.structs.replace(op, op=number))
        event = client.wait(number)
        assert isinstance(event, Failed), name
        assert said in event.message, name
    works(client)


def test_an_empty_prompt_and_a_bad_schema_fail_alone(client: RawClient) -> None:
    empty, schema, good = client.op(), client.op(), client.op()
    client.send(
        Open(client.op(), 10),
        Generate(empty, 10, params=GREEDY),
        Open(client.op(), 11),
        Append(client.op(), 11, (Text("Hi"),)),
        Generate(schema, 11, params=GREEDY, constraint=Constraint("json_schema", '{"type": 7}')),
        Open(client.op(), 12),
        Append(client.op(), 12, (Text("Hi"),)),
        Generate(good, 12, params=GREEDY, constraint=Constraint("regex", "[a-z]{3}")),
    )
    assert isinstance(client.wait(empty), Failed)
    event = client.wait(schema)
    assert isinstance(event, Failed)
    assert event.code == "invalid_constraint"
    fine = client.wait(good)
    assert isinstance(fine, Generated)
    assert len(fine.outputs[0].text) == 3


@pytest.mark.parametrize("seed", range(3))
def test_every_op_of_a_storm_gets_exactly_one_terminal_event(server: Server, seed: int) -> None:
    """Random operations on few branches, with errors: each gets exactly one terminal event."""
    rng = random.Random(seed)
    client = RawClient(server.address)
    sent: list[int] = []
    for _ in range(150):
        op, branch, parent = client.op(), rng.randrange(6), rng.randrange(6)
        message = rng.choice(
            [
                Open(op, branch),
                Open(op, branch, parent=parent),
                Append(op, branch, (Text(rng.choice(["a", " story", "é", "<|im_end|>"])),)),
                Generate(op, branch, params=GREEDY, stream=rng.random() < 0.5),
                protocol.Select(op, branch, ("yes", "no")),
                protocol.Prefill(op, branch),
                Close(op, branch),
                protocol.Cancel(op, branch),
            ]
        )
        client.send(message)
        sent.append(op)
    for op in sent:
        client.wait(op)
    terminal = [e.op for e in client.events if not isinstance(e, protocol.Chunk) and e.op]
    assert sorted(terminal) == sorted(sent)
    # The engine may still get the last cancellations.
    eventually(lambda: client.status()["running"] == 0)
    client.close()
    watcher = RawClient(server.address)
    eventually(lambda: watcher.status()["waiting"] == 0)
    watcher.close()
