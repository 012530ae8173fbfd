"""Options of programs for the handling of their requests."""

from __future__ import annotations

import time

import pytest

import rootlace as rl
from rootlace.wire import protocol
from rootlace.wire.errors import DeadlineExceeded, InvalidRequest
from rootlace.wire.sampling import Cache, Handling
from tests.frontend.fake_server import FakeServer


@rl.function
def two(s):
    s += "a" + rl.gen("x", timeout=3, cache=rl.Cache(pin=True, ttl=60))
    s += rl.gen("y") + rl.select("z", ["b", "c"])


def _sent(server: FakeServer, *kinds: type) -> list[Handling]:
    return [op.handling for op in server.ops if isinstance(op, kinds)]


def test_options_of_a_gen_and_defaults_of_a_run(
    server: FakeServer, backend: rl.RuntimeEndpoint
) -> None:
    two.run(priority=2, cache={"ttl": 9})
    assert _sent(server, protocol.Generate, protocol.Select) == [
        Handling(2, 3, Cache(True, 60)),
        Handling(2, None, Cache(ttl=9)),
        Handling(2, None, Cache(ttl=9)),
    ]


def test_a_run_as_a_whole_has_a_time_and_shares_nothing(
    server: FakeServer, backend: rl.RuntimeEndpoint
) -> None:
    states = two.run_batch([{}, {}], timeout=100, cache=rl.Cache(share=False))
    assert all(state.error() is None for state in states)
    first, second = _sent(server, protocol.Generate)[:2]
    assert first.timeout == 3
    assert second.timeout is not None and 3 < second.timeout <= 100
    opened = [op for op in server.ops if isinstance(op, protocol.Open)]
    assert len(opened) == 2 and not any(op.share for op in opened)

    def late(text: str, op: protocol.Generate) -> str:
        time.sleep(0.02)
        raise DeadlineExceeded(f"the request was not done within its timeout of {op}")

    server.script = late
    for seconds in (1e-9, 0.01):
        told = f"the run was not done within its timeout of {seconds:g} s"
        with pytest.raises(rl.ProgramError, match=told) as caught:
            two.run(timeout=seconds)
        assert isinstance(caught.value.__cause__, DeadlineExceeded)
    with pytest.raises(rl.ProgramError, match="the request was not done"):
        two.run(timeout=100)


def test_what_cannot_be_meant(backend: rl.RuntimeEndpoint) -> None:
    for wrong in ({"priority": 101}, {"timeout": -1}, {"cache": {"pin": 5}}, {"cache": True}):
        with pytest.raises(InvalidRequest):
            rl.gen("x", **wrong)
    with pytest.raises(InvalidRequest, match=r"gen\(\): cache takes an rl.Cache, not True"):
        rl.gen("x", cache=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not shared"):
        rl.Cache(pin=True, share=False)

    @rl.function
    def alone(s):
        s += rl.gen("x", cache=rl.Cache(share=False))

    with pytest.raises(rl.ProgramError, match="only a whole run is not shared"):
        alone.run()
