"""One engine of the embedded model computes prompts for another."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from rootlace.wire import protocol
from rootlace.wire.protocol import Append, Generate, Open, SamplingParams, Text
from rootlace.wire.sampling import PLAIN, Handling
from tests.e2e.conftest import END_SECONDS, RawClient, Server
from tests.processes import alive
from tests.waiting import eventually

PARAMS = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True, logprobs=True)
LEAST = 100
TEXT = "Story {}:" + " On a long day, where the road ends and the river begins, it went on." * 12
ALONE = Handling(timeout=1000.0)
"""What has a deadline is not computed apart."""


@pytest.fixture(scope="module", params=["memory", "tcp"])
def pair(start_server, request: pytest.FixtureRequest) -> Server:
    """Start engines for one way of transfer; tests of one way run together."""
    return start_server(
        replicas=2,
        disaggregate=1,
        disaggregate_from=LEAST,
        disaggregate_gb=0.02,
        disaggregate_by=request.param,
        drain_seconds=0.1,
    )


@pytest.fixture
def asking(pair: Server) -> Iterator[RawClient]:
    client = RawClient(pair.address)
    yield client
    client.close()


def begin(client: RawClient, branch: int, text: str, handling: Handling = PLAIN) -> int:
    op = client.op()
    client.send(
        Open(client.op(), branch, program=f"program {branch}"),
        Append(client.op(), branch, (Text(text),)),
        Generate(op, branch, params=PARAMS, handling=handling),
    )
    return op


def ended(client: RawClient, op: int) -> protocol.Generated:
    event = client.wait(op)
    assert isinstance(event, protocol.Generated), event
    return event


def said(event: protocol.Generated) -> tuple[tuple[int, ...], list[float | None]]:
    (output,) = event.outputs
    return tuple(output.token_ids), [one.logprob for one in output.logprobs]


def decoder_forgets(server: Server, client: RawClient) -> None:
    op = client.op()
    client.send(protocol.FlushCache(op))
    client.wait(op)


def test_tokens_and_log_probabilities_are_those_of_one_engine(
    pair: Server, asking: RawClient
) -> None:
    text = TEXT.format(1)
    wanted = ended(asking, begin(asking, 1, text, ALONE))
    assert asking.status()["prompts_apart"] == 0
    decoder_forgets(pair, asking)
    event = ended(asking, begin(asking, 2, text))
    assert said(event) == said(wanted)
    assert event.usage.cached_tokens == 0, "nobody had it before, though it came from elsewhere"
    status = asking.status()
    assert status["prompts_apart"] == 1 and status["not_handed_over"] == 0
    _, prefiller = status["replicas"]
    assert status["handed_over_blocks"] == prefiller["handed_given_blocks"] > 5
    # Whether the decoder reads them depends on which way is faster on this machine.
    assert prefiller["handed_read_bytes"] == 0
    # Only the end is transferred behind the blocks that the decoder holds.
    before = status["handed_over_blocks"]
    longer = ended(asking, begin(asking, 3, text + TEXT.format(3)))
    status = asking.status()
    assert status["prompts_apart"] == 2
    length = longer.usage.prompt_tokens
    held = (length - 1) // 16 - (status["handed_over_blocks"] - before)
    assert held >= before - 1 and longer.usage.cached_tokens > 16 * (before - 1)
    # A prompt of which little is missing goes to the decoder at once.
    ended(asking, begin(asking, 4, text + " And then?"))
    assert asking.status()["prompts_apart"] == 2


def test_the_engine_that_computes_prompts_may_die(pair: Server, asking: RawClient) -> None:
    texts = [TEXT.format(number) for number in range(10, 14)]
    calm = [begin(asking, 10 + at, text, ALONE) for at, text in enumerate(texts)]
    wanted = [said(ended(asking, op)) for op in calm]
    decoder_forgets(pair, asking)
    shaken = [begin(asking, 20 + at, text) for at, text in enumerate(texts)]
    process = max(psutil.Process(pair.process.pid).children(), key=lambda one: one.pid)
    os.kill(process.pid, signal.SIGKILL)
    assert [said(ended(asking, op)) for op in shaken] == wanted
    eventually(lambda: not alive(process))


def test_nothing_is_left(pair: Server) -> None:
    engines = psutil.Process(pair.process.pid).children()
    pair.process.send_signal(signal.SIGKILL)
    pair.process.wait(END_SECONDS)
    # The memory has no name: the last process to end frees it.
    eventually(lambda: not any(alive(engine) for engine in engines))
