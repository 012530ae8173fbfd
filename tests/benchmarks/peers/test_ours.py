"""Both ways to drive ourselves, and a server behind a URL: the same work, the same tokens."""

from __future__ import annotations

import pytest

import rootlace as rl
from benchmarks.ideal_cache import IdealCache
from benchmarks.peers.completion_server import OpenAIServer
from benchmarks.peers.drive import PeerError, drive
from benchmarks.peers.measure import Task
from benchmarks.peers.turns import Ours, run_online
from benchmarks.peers.workloads import WORKLOADS, Request, Workload


def task(name: str) -> Task:
    return Task("a", name, seed=2, repetition=0, scale=0.05, vocab_size=260)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_programs_find_the_tokens_of_raw_requests(name: str, runtime: rl.Runtime) -> None:
    ours = Ours(runtime)
    raw, programs = ours.raw(task(name)), ours.programs(task(name))
    assert programs.outputs == raw.outputs
    assert (programs.requests, programs.prompt_tokens, programs.output_tokens) == (
        raw.requests,
        raw.prompt_tokens,
        raw.output_tokens,
    )
    assert raw.ttft_mean_s is not None and 0 < raw.ttft_mean_s < raw.wall_s
    # Both find all that any cache could have.
    ideal = IdealCache()
    workload = task(name).make()
    todo = workload.start()
    while todo:
        for request in todo:
            ideal.submit(request.prompt)
        following = []
        for request in todo:
            ideal.finish(request.prompt, raw.outputs[request.name])
            following += workload.answered(request, raw.outputs[request.name])
        todo = following
    assert raw.cached_tokens == programs.cached_tokens == ideal.cached_tokens


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_server_behind_a_url(name: str, runtime: rl.Runtime) -> None:
    assert runtime.url is not None
    server = OpenAIServer("itself", runtime.url)
    assert server.can_flush
    row, raw = run_online(server, "itself", task(name)), Ours(runtime).raw(task(name))
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
        name = "W4"

        def start(self) -> list[Request]:
            return [Request("r0", [150] * 9000, 4)]

    from benchmarks.peers.raw_requests import RawRequests

    with pytest.raises(rl.RootlaceError, match="9000"):
        drive(RawRequests(runtime.endpoint), TooLong())
    assert runtime.url is not None
    with pytest.raises(PeerError, match="9000"):
        drive(OpenAIServer("itself", runtime.url), TooLong())
