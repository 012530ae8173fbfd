"""Two engines of the embedded model behind one gateway."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rootlace.wire import protocol
from rootlace.wire.protocol import Append, Generate, Open, SamplingParams, Text
from tests.e2e.conftest import END_SECONDS, RawClient, Server
from tests.processes import alive
from tests.waiting import eventually

GREEDY = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
STORY = "The story of number {} began {}"
REST = "on a long day, where the road ends and the river begins, and it went on and on. " * 3


@pytest.fixture(scope="module")
def pair(start_server) -> Iterator[Server]:
    yield start_server(replicas=2, drain_seconds=0.1)


@pytest.fixture
def asking(pair: Server) -> Iterator[RawClient]:
    client = RawClient(pair.address)
    assert isinstance(client.greeting, protocol.Welcome), client.greeting
    yield client
    client.close()


def engines(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children()


def of_each(client: RawClient, counter: str) -> list[int]:
    """Return a counter of each running engine."""
    return [one[counter] for one in client.status()["replicas"] if one["up"]]


def begin(client: RawClient, branch: int, text: str, params: SamplingParams = GREEDY) -> int:
    op = client.op()
    client.send(
        Open(client.op(), branch, program=f"program {branch}"),
        Append(client.op(), branch, (Text(text),)),
        Generate(op, branch, params=params, stream=True),
    )
    return op


def ended(client: RawClient, op: int) -> protocol.Generated:
    event = client.wait(op)
    assert isinstance(event, protocol.Generated), event
    return event


def get(server: Server, path: str) -> Any:
    with urllib.request.urlopen(server.url + path, timeout=END_SECONDS) as reply:
        text = reply.read().decode()
    return json.loads(text) if text.startswith("{") else text


def test_a_program_with_forks_stays_where_its_prefix_is(asking: RawClient) -> None:
    few = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    before = of_each(asking, "requests_added")
    ended(asking, begin(asking, 1, STORY.format("one", REST), few))
    ops = []
    for branch in range(2, 8):
        ops.append(asking.op())
        asking.send(
            Open(asking.op(), branch, parent=1),
            Append(asking.op(), branch, (Text(f" And {branch}"),)),
            Generate(ops[-1], branch, params=few),
        )
    # Another client's prompt with the same prefix goes to its holder, too.
    ops.append(begin(asking, 9, STORY.format("one", REST) + "Then", few))
    assert min(ended(asking, op).usage.cached_tokens for op in ops) > 70, "each found the prefix"
    after = of_each(asking, "requests_added")
    assert sorted(now - then for now, then in zip(after, before, strict=True)) == [0, 8]


def test_what_http_says_of_several_engines(pair: Server, asking: RawClient) -> None:
    ended(asking, begin(asking, 60, STORY.format("sixty", REST)))
    metrics = get(pair, "/metrics")
    for replica in (0, 1):
        assert f'rootlace_up{{replica="{replica}"}} 1.0' in metrics
    info = get(pair, "/get_server_info")
    assert info["max_total_num_tokens"] == 2 * 1024 * 16
    assert info["status"]["prefixes_known"] > 0
    tree = get(pair, "/cache/tree?namespace=&limit=50")["nodes"]
    assert {node["replica"] for node in tree} <= {0, 1} and tree
    below = get(pair, f"/cache/tree?namespace=&under={tree[0]['id']}")["nodes"]
    assert all(node["replica"] == tree[0]["replica"] for node in below)
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(pair.url + "/flush_cache", b"{}", headers)
    urllib.request.urlopen(request, timeout=END_SECONDS).close()
    eventually(lambda: asking.status()["prefixes_known"] == 0)


def test_streams_of_a_killed_engine_go_on_elsewhere(pair: Server, asking: RawClient) -> None:
    texts = [STORY.format(number, REST) for number in range(20, 26)]
    calm = [begin(asking, 20 + at, text) for at, text in enumerate(texts)]
    wanted = [ended(asking, op).outputs[0] for op in calm]
    before = of_each(asking, "requests_added")
    assert min(before) > 0, "both were given some"
    for attempt in range(1, 6):
        shaken = [begin(asking, 100 * attempt + at, text) for at, text in enumerate(texts)]
        while not set(shaken) <= {event.op for event in asking.events}:
            asking.receive()
        victim = engines(pair)[0]
        os.kill(victim.pid, signal.SIGKILL)
        got = [ended(asking, op).outputs[0] for op in shaken]
        assert [one.token_ids for one in got] == [one.token_ids for one in wanted]
        for op, one in zip(shaken, got, strict=True):
            chunks = [e for e in asking.events if isinstance(e, protocol.Chunk) and e.op == op]
            assert "".join(chunk.text for chunk in chunks) == one.text
        assert get(pair, "/health") == {"status": "ok"}
        assert get(pair, "/ready") == {"status": "ready"}
        eventually(lambda victim=victim: not alive(victim))
        if asking.status()["requests_moved"]:
            break  # otherwise the engine had answered all before the kill
    assert asking.status()["requests_moved"] > 0


def test_both_engines_end_with_the_gateway(pair: Server) -> None:
    eventually(lambda: len(engines(pair)) == 2)  # the killed engine is restarting
    both = engines(pair)
    pair.process.send_signal(signal.SIGTERM)
    assert pair.process.wait(END_SECONDS) == 0
    assert not any(alive(engine) for engine in both)
