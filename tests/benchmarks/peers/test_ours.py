"""Both ways to drive ourselves, and a server behind a URL: the same work, the same tokens."""

from functools import partial

import pytest

import rootlace as rl
from benchmarks.ideal_cache import ideal_hits
from benchmarks.peers.completion_server import OpenAIServer
from benchmarks.peers.drive import PeerError, drive
from benchmarks.peers.measure import Task
from benchmarks.peers.turns import here, ours
from benchmarks.peers.workloads import WORKLOADS, Request, Workload


def task(name: str) -> Task:
    return Task("a", name, seed=2, repetition=0, scale=0.05, vocab_size=260)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_programs_find_the_tokens_of_raw_requests(name: str, runtime: rl.Runtime) -> None:
    raw, programs = (engine.row(task(name)) for engine in ours(runtime))
    assert programs.outputs == raw.outputs
    assert (programs.requests, programs.prompt_tokens, programs.output_tokens) == (
        raw.requests,
        raw.prompt_tokens,
        raw.output_tokens,
    )
    assert raw.ttft_mean_s is not None and 0 < raw.ttft_mean_s < raw.wall_s
    # Both find all that any cache could have.
    best = ideal_hits(task(name).make(), raw.outputs)
    assert raw.cached_tokens == programs.cached_tokens == best


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_server_behind_a_url(name: str, runtime: rl.Runtime) -> None:
    assert runtime.url is not None
    server = OpenAIServer("itself", runtime.url)
    assert server.can_flush
    row = here("itself", partial(drive, server)).row(task(name))
    raw = next(ours(runtime)).row(task(name))
    assert (row.requests, row.prompt_tokens, row.output_tokens) == (
        raw.requests,
        raw.prompt_tokens,
        raw.output_tokens,
    )
    assert row.fixed_replies is not server.replies_are_ids
    if name in ("W1", "W4", "W5") or server.replies_are_ids:
        assert row.cached_tokens == raw.cached_tokens
    if server.replies_are_ids:
        assert row.outputs == raw.outputs
    assert row.ttft_mean_s is not None and 0 < row.ttft_mean_s < row.wall_s


def test_no_server_behind_a_url() -> None:
    with pytest.raises(PeerError, match="no model"):
        OpenAIServer("nobody", "http://127.0.0.1:9")


def test_a_refused_request_is_an_error(runtime: rl.Runtime) -> None:
    class TooLong(Workload):
        def start(self) -> list[Request]:
            return [Request("0", [150] * 9000, 4)]

    from benchmarks.peers.raw_requests import RawRequests

    with pytest.raises(rl.RootlaceError, match="9000"):
        drive(RawRequests(runtime.endpoint), TooLong("W4"))
    assert runtime.url is not None
    with pytest.raises(PeerError, match="9000"):
        drive(OpenAIServer("itself", runtime.url), TooLong("W4"))
