"""`async def` programs: on the caller's loop, without threads."""

from __future__ import annotations

import asyncio
import threading

import pytest

import rootlace as rl
from rootlace.wire import protocol
from rootlace.wire.errors import Cancelled, InvalidConstraint, InvalidRequest
from tests.frontend.fake_server import FakeServer, default_script
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("backend")


@rl.function
async def agent(s, question):
    s += "Q: " + question + "\nA:" + rl.gen("answer", stop="\n")
    answer = await s["answer"]
    s += f" ({len(answer)})" + rl.gen("more")
    return answer


async def test_two_thousand_at_once_on_one_loop(server: FakeServer) -> None:
    server.hold()
    threads = threading.active_count()
    programs = [asyncio.ensure_future(agent.run_async(str(i))) for i in range(2000)]
    while len(server.sent(protocol.Generate)) < 2000:
        await asyncio.sleep(0.01)  # all of them are waiting now
    assert threading.active_count() <= threads  # threads of earlier tests may end
    assert server.open_branches == 2000
    server.release()
    states = await asyncio.gather(*programs)
    op = server.sent(protocol.Generate)[0]
    for i, state in enumerate(states):
        assert state["answer"] == state.ret_value == default_script(f"Q: {i}\nA:", op)
        assert state["more"]
    # A frame holds the operations of thousands of programs.
    assert server.frames < 1000
    eventually(lambda: server.open_branches == 0)


async def test_batch_with_bounded_concurrency(server: FakeServer) -> None:
    running = 0
    most = 0

    @rl.function
    async def counted(s, i):
        nonlocal running, most
        s += "Shared beginning. " + str(i) + rl.gen("x")
        running += 1  # later than the trace for the common prefix reaches
        most = max(most, running)
        await s["x"]
        running -= 1

    states = await counted.run_batch_async([{"i": i} for i in range(50)], concurrency=7)
    assert [state.text().split(" w")[0] for state in states] == [
        f"Shared beginning. {i}" for i in range(50)
    ]
    assert most == 7
    assert len(server.sent(protocol.Prefill)) == 1
    eventually(lambda: server.open_branches == 0)


async def test_failures_stay_in_their_state(server: FakeServer) -> None:
    def script(text: str, op: protocol.Generate) -> str:
        if "Q: 7" in text:
            raise InvalidConstraint("seven")
        return default_script(text, op)

    server.script = script
    states = await agent.run_batch_async([{"question": str(i)} for i in range(6, 9)])
    assert [state.error() is None for state in states] == [True, False, True]
    with pytest.raises(rl.ProgramError, match="seven") as caught:
        await agent.run_async("7")
    assert caught.value.filename == __file__


async def test_forks_joins_and_every_way_to_read(server: FakeServer) -> None:
    @rl.function
    async def program(s):
        s += "x"
        with s.fork(3) as forks:
            forks += lambda i: f" {i}" + rl.gen("tip")
        assert await s["tip"] == await s.get("tip") == await s.get_var("tip")
        again = s.fork(2)
        again += rl.gen("y")
        both = await again["y"]
        one, two = await asyncio.gather(*[fork["y"] for fork in s.fork(2) if grow(fork)])
        with s.user():
            s += "hello"
        assert await s.messages() == [{"role": "user", "content": "hello"}]
        assert (await s.text()).startswith("x")
        assert (await s.get_meta_info("tip"))[0]["completion_tokens"]
        await s.sync()
        assert await s.error() is None
        return [*both, one, two]

    def grow(fork):
        fork += rl.gen("y")
        return True

    state = await program.run_async()
    assert len(state.ret_value) == 4 and all(state.ret_value)
    eventually(lambda: server.open_branches == 0)


async def test_forks_are_not_cancelled_while_they_are_awaited(server: FakeServer) -> None:
    @rl.function
    async def program(s):
        s += "x"
        return await grown(s)["y"]

    def grown(s):
        forks = s.fork(2)
        forks += rl.gen("y")
        return forks

    server.hold()
    running = asyncio.ensure_future(program.run_async())
    while len(server.sent(protocol.Generate)) < 2:
        await asyncio.sleep(0.01)
    server.release()
    assert len((await running).ret_value) == 2
    assert not server.sent(protocol.Cancel)


async def test_cancelling_a_task_cancels_on_the_server(server: FakeServer) -> None:
    server.hold()
    task = asyncio.ensure_future(agent.run_async("x"))
    while not server.sent(protocol.Generate):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while server.open_branches:
        await asyncio.sleep(0.01)
    assert len(server.sent(protocol.Cancel)) == 1


async def test_cancelling_a_task_that_follows_cancels_on_the_server(server: FakeServer) -> None:
    """A web framework cancels so when the client of a streamed answer leaves."""

    async def answer() -> None:
        state = await agent.run_async("x", stream=True)
        async for _ in state.text_async_iter():
            pass

    server.hold()
    task = asyncio.ensure_future(answer())
    while not server.sent(protocol.Generate):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while server.open_branches:
        await asyncio.sleep(0.01)
    assert len(server.sent(protocol.Cancel)) == 1


@pytest.mark.parametrize("follow", ["text_async_iter", "value_async_iter"])
async def test_who_leaves_a_stream_cancels_it(server: FakeServer, follow: str) -> None:
    @rl.function
    async def program(s):
        with s.var_scope("x"):
            s += "[1, 2"
        s += rl.gen("y")

    server.hold()
    state = await program.run_async(stream=True)
    async for _ in getattr(state, follow)("x"):
        break
    while not state.branch.run.ended.done:
        await asyncio.sleep(0.01)
    assert len(server.sent(protocol.Cancel)) == 1


async def test_who_leaves_a_stream_cancels_what_the_program_waits_for(
    server: FakeServer,
) -> None:
    ended: list[str] = []

    @rl.function
    async def program(s):
        s += "a"
        try:
            await asyncio.Event().wait()  # a tool's answer, for example
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    state = await program.run_async(stream=True)
    async for _ in state.text_async_iter():
        break
    while not state.branch.run.ended.done:
        await asyncio.sleep(0.01)
    assert ended == ["cancelled"]
    for read in (lambda: state["x"], lambda: state.ret_value):
        with pytest.raises(Cancelled, match="the reader of its text left"):
            read()


@pytest.mark.parametrize("streams", [False, True])
async def test_a_program_may_stop_following_itself(server: FakeServer, streams: bool) -> None:
    async def first(s) -> str:
        async for piece in s.text_async_iter("x"):
            return str(piece)
        return ""

    @rl.function
    async def program(s):
        s += "a" + rl.gen("x")
        found = [await first(s), *await asyncio.gather(first(s))]
        await asyncio.sleep(0.01)
        s += rl.gen("y")
        return found, await s["y"]

    state = await program.run_async(stream=streams)
    if streams:
        while not state.branch.run.ended.done:
            await asyncio.sleep(0.01)
    assert state.ret_value[1] == state["y"] and all(state.ret_value[0])


async def test_streaming(server: FakeServer) -> None:
    server.script = lambda text, op: "one two three"
    state = await agent.run_async("x", stream=True)
    pieces = [piece async for piece in state.text_async_iter()]
    assert "".join(pieces) == state.text() == "Q: x\nA:one two three (13)one two three"
    state = await agent.run_async("x", stream=True)
    pairs = [pair async for pair in state.text_async_iter("answer", return_meta_data=True)]
    assert "".join(text for text, _ in pairs) == "one two three"
    assert all(text for text, _ in pairs)
    assert [meta["completion_tokens"] for _, meta in pairs] == [3, 6, 9, 12, 13]
    assert state.get_meta_info("answer")["finish_reason"]["type"] == "stop"


async def test_an_ordinary_program_streams_into_a_loop(server: FakeServer) -> None:
    @rl.function
    def ordinary(s):
        s += "a" + rl.gen("x")

    state = ordinary.run(stream=True)
    assert "".join([piece async for piece in state.text_async_iter()]).startswith("a w")
    state = ordinary.run()
    assert [piece async for piece in state.text_async_iter("x")] == [state["x"]]


async def test_failed_streams_raise(server: FakeServer) -> None:
    def script(text: str, op: protocol.Generate) -> str:
        raise InvalidConstraint("no")

    server.script = script
    state = await agent.run_async("x", stream=True)
    with pytest.raises(rl.ProgramError, match="no"):
        async for _ in state.text_async_iter():
            pass
    with pytest.raises(rl.ProgramError, match="no"):
        async for _ in state.text_async_iter("never_named"):
            pass


def test_from_ordinary_code(server: FakeServer) -> None:
    state = agent.run("x")
    assert state["answer"] == state.ret_value
    states = agent.run_batch([{"question": "a"}, {"question": "b"}])
    assert [state.text()[:4] for state in states] == ["Q: a", "Q: b"]
    assert "".join(agent.stream("x")).startswith("Q: x")


async def test_blocking_in_a_loop_is_refused() -> None:
    with pytest.raises(RuntimeError, match="event loop is running"):
        agent.run("x")
    with pytest.raises(TypeError, match="async def"):
        await rl.function(lambda s: None).run_async()


USES = {
    "==": lambda value: value == "refund",
    "in a list": lambda value: value in ["refund"],
    "in a set": lambda value: value in {"refund"},
    "if": lambda value: "yes" if value else "no",
    "str": str,
    "f-string": lambda value: f"{value}",
    "+": lambda value: "label: " + value,
    "len": len,
    "for": list,
    "[]": lambda value: value["name"],
    ".": lambda value: value.name,
    "user": rl.user,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_forgotten_await_fails_at_the_line(use) -> None:
    @rl.function
    async def program(s):
        s += "x" + rl.gen("label")
        use(s["label"])

    with pytest.raises(rl.ProgramError, match=r"write `await s\['label'\]`") as caught:
        await program.run_async()
    assert caught.value.filename == __file__


async def test_nor_is_what_was_not_awaited_kept_or_appended() -> None:
    @rl.function
    async def program(s):
        s += "x" + rl.gen("label")
        for wrong in (
            lambda: s.append(s["label"]),
            lambda: s.set_var("copy", s["label"]),
            lambda: bool(s.error()),
            lambda: s.text() == "x",
            lambda: s.messages()[0],
            lambda: s.get_meta_info("label")["prompt_tokens"],
            lambda: s.fork(2)["label"] == [],
        ):
            with pytest.raises(rl.ProgramError, match="has not been awaited"):
                wrong()
        label = s["label"]
        one, two, three = await asyncio.gather(label, s["label"], asyncio.create_task(s["label"]))
        assert one == two == three == await label == await label
        assert await s.get("nothing", 7) == 7
        return one

    assert (await program.run_async()).ret_value.startswith(" w")


async def test_a_state_is_no_sequence() -> None:
    @rl.function
    async def program(s):
        s += rl.gen("a") + rl.gen("b")
        with pytest.raises(TypeError, match=r"await s.keys\(\)"):
            list(s)
        return await s.keys()

    assert (await program.run_async()).ret_value == ["a", "b"]


async def test_what_is_never_awaited_is_found() -> None:
    @rl.function
    async def returned(s):
        s += rl.gen("a")
        return s["a"]

    @rl.function
    async def calls(s):
        return (await returned(s)).ret_value

    for program in (returned, calls):
        with pytest.raises(rl.ProgramError, match=r"write `await s\['a'\]`") as caught:
            await program.run_async()
        assert (caught.value.filename, caught.value.function) == (__file__, "returned")

    @rl.function
    async def lets_go(s):
        s += rl.gen("a")
        with pytest.warns(RuntimeWarning, match=r"`returned\(s\)` was never awaited") as found:
            returned(s)
        assert found[0].filename == __file__
        choice = rl.best_of(s, 2, rl.gen("b"), key=lambda fork: 1)
        assert await choice == 1
        with pytest.raises(InvalidRequest, match="made once"):
            await choice

    await lets_go.run_async()
