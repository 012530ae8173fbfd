"""Budgets of runs."""

from __future__ import annotations

import pytest

import rootlace as rl
from rootlace.wire import protocol
from rootlace.wire.errors import BudgetExceeded, InvalidRequest
from tests.frontend.fake_server import FakeServer
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("backend")


@rl.function
def three(s):
    for name in "abc":
        s += "x" + rl.gen(name, max_tokens=4)
        s["last"] = s[name]


def test_a_run_generates_no_more_than_its_budget(server: FakeServer) -> None:
    server.script = lambda text, op: "1234567"[: 3 if op.name == "a" else 7]
    assert three.run(token_budget=11).text() == "x123x1234x1234"
    # The rest of the budget bounds a generation; one that needs more fails.
    with pytest.raises(rl.ProgramError, match="10 tokens is used up") as caught:
        three.run(token_budget=10)
    assert isinstance(caught.value.__cause__, BudgetExceeded)
    assert caught.value.filename == __file__ and caught.value.what == "gen('c')"
    assert server.sent(protocol.Generate)[-1].params.max_tokens == 3
    with pytest.raises(rl.ProgramError, match=r"gen\('c'\).*\(7 generated\)"):
        three.run(token_budget=7)
    server.script = lambda text, op: "12"
    assert three.run(token_budget=6).text() == "x12x12x12"


def test_forks_that_run_side_by_side_share_it(server: FakeServer) -> None:
    server.script = lambda text, op: "12345"

    @rl.function
    def program(s):
        s += "x"
        with s.fork(3) as forks:
            forks += rl.gen("y", max_tokens=5)
        return s["y"]

    assert program.run(token_budget=15).ret_value == ["12345"] * 3
    with pytest.raises(rl.ProgramError, match="14 tokens"):
        program.run(token_budget=14)
    states = program.run_batch([{}, {}], token_budget=15)  # each run has its own budget
    assert [state.error() for state in states] == [None, None]
    eventually(lambda: server.open_branches == 0)


def test_budgets_that_are_none() -> None:
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(InvalidRequest, match="token_budget must be a number of tokens"):
            three.run(token_budget=wrong)

    @rl.function
    def own(s, token_budget):
        s += token_budget

    assert own.run(token_budget="mine").text() == "mine"


def test_tokens_of_what_was_cancelled_count(server: FakeServer) -> None:
    @rl.function
    def program(s):
        s += "x"
        (lost,) = s.fork(1)
        lost += rl.gen("lost", max_tokens=9)
        asked = s.branch.run.recording.timeline("", "", None).spans
        assert [span.state for span in asked] == ["running"]
        operation = lost.branch.variables["lost"]
        for text in ("ab", "c"):  # as if the server had sent these
            operation(protocol.Chunk(0, 0, text, tuple(range(len(text)))))
        lost.branch.drop()
        lost.sync()
        s += rl.gen("rest", max_tokens=9)

    server.script = lambda text, op: "1234"
    server.hold()
    state = program.run(token_budget=7, stream=True)
    eventually(lambda: len(server.sent(protocol.Generate)) == 2)
    server.release()
    assert state.text() and len(state["rest"]) == 4
    lost, rest = server.sent(protocol.Generate)
    assert lost.stream and (lost.params.max_tokens, rest.params.max_tokens) == (7, 4)
    assert {span.name: span.completion_tokens for span in state.trace().spans}["lost"] == 3
