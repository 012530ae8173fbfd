"""A program called on another program's state, and states as mappings."""

from __future__ import annotations

import pytest

import rootlace as rl
from rootlace.wire import protocol
from tests.frontend.fake_server import FakeServer
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("backend")


@rl.function
def ask(s, question):
    s += rl.user(question)
    s += rl.assistant(rl.gen("answer"))
    return s["answer"].upper()


@rl.function
async def ask_async(s, question):
    s += rl.user(question) + rl.assistant(rl.gen("answer"))
    return await s["answer"]


def test_it_writes_there_and_keeps_its_variables_to_itself(server: FakeServer) -> None:
    server.script = lambda text, op: f"[{text.count('user')}]"

    @rl.function
    def talk(s):
        s += rl.system("Short.")
        s["answer"] = "mine"
        first = ask(s, "one?", temperature=0, max_tokens=7)
        second = ask(s, "two?")
        assert s["answer"] == "mine"
        return first["answer"], first.ret_value, second["answer"]

    state = talk.run(max_tokens=9)
    assert state.ret_value == ("[1]", "[1]", "[2]")
    assert [message["role"] for message in state.messages()] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    params = [op.params for op in server.sent(protocol.Generate)]
    assert [(each.temperature, each.max_tokens) for each in params] == [(0.0, 7), (1.0, 9)]
    assert len(server.sent(protocol.Open)) == 1


def test_its_forks_and_its_failures_are_those_of_the_state(server: FakeServer) -> None:
    @rl.function
    def tips(s):
        with s.fork(2) as forks:
            forks += rl.gen("tip", max_tokens=4)

    @rl.function
    def broken(s):
        s += rl.user("?") + rl.user_end()

    @rl.function
    def outer(s, inner):
        s += "x"
        return inner(s.fork(1)[0])

    assert len(outer.run(tips).ret_value["tip"]) == 2
    with pytest.raises(rl.ProgramError, match="message ends") as caught:
        outer.run(broken)
    assert caught.value.function == "broken"
    with pytest.raises(TypeError, match="unexpected keyword argument 'backend'"):
        outer.bind(inner=lambda s: ask(s, "?", backend=None)).run()


async def test_async_programs_await_it() -> None:
    @rl.function
    async def talk(s):
        first = await ask_async(s, "one?")
        with pytest.raises(rl.ProgramError, match=r"await ask_async\(s\)"):
            _ = ask_async(s, "two?").ret_value
        return await first["answer"], first.ret_value

    one, other = (await talk.run_async()).ret_value
    assert one == other

    @rl.function
    def ordinary(s):
        return ask_async(s, "?")

    with pytest.raises(TypeError, match="only such a program calls it"):
        ordinary.run()


def test_its_text_belongs_to_the_constant_prefix(server: FakeServer) -> None:
    @rl.function
    def rules(s):
        s += rl.system("Be kind.")

    @rl.function
    def outer(s, question):
        rules(s)
        s += rl.user(question)

    trace = outer.trace()
    assert trace.prefix == "SYSTEM:Be kind.\nUSER:"
    assert [node.kind for node in trace.root.nodes] == ["call", "role", "value", "role"]
    outer.run_batch([{"question": "a"}, {"question": "b"}])
    assert len(server.sent(protocol.Prefill)) == 1
    prefix = next(op for op in server.sent(protocol.Append))
    assert "".join(part.text for part in prefix.parts) == "<s><|system|>Be kind.<|end|><|user|>"


def test_a_state_is_a_mapping_of_its_variables() -> None:
    @rl.function
    def program(s):
        s += "x" + rl.gen("a") + rl.select("b", ["yes", "no"])
        s["c"] = 3

    state = program.run()
    assert dict(state) == {"a": state["a"], "b": state["b"], "c": 3}
    assert list(state) == ["a", "b", "c"]
    assert state.get("c") == 3 and state.get("d") is None and state.get("d", 4) == 4
    streaming = program.run(stream=True)
    assert sorted(dict(streaming)) == ["a", "b", "c"]


@pytest.mark.parametrize("chosen", [True, False])
def test_a_fork_chosen_inside_outlives_the_inner_state(server: FakeServer, chosen: bool) -> None:
    @rl.function
    def inner(s):
        s += "x"
        if chosen:
            rl.best_of(s, 2, rl.gen("tip"), key=lambda fork: len(fork["tip"]))
        else:
            mark = s.mark()
            s += "left"
            s.rollback(mark)

    @rl.function
    def middle(s):
        inner(s)

    @rl.function
    def outer(s):
        middle(s)
        s += " and" + rl.gen("more")
        return s["more"]

    assert outer.run().ret_value
    eventually(lambda: server.open_branches == 0)
