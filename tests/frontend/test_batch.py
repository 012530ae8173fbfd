"""`run_batch`: order, isolation, the shared prefix, and stopping in the middle."""

from __future__ import annotations

import contextvars
import csv
import inspect
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rootlace as rl
from rootlace.program.batch import bodies
from rootlace.testing import Scripted
from rootlace.wire import protocol
from rootlace.wire.errors import Cancelled, InvalidConstraint, InvalidRequest
from tests.frontend.fake_server import FakeServer, default_script
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("backend")

EXAMPLES = "Label the review.\nReview: fine\nLabel: good\nReview: "


@rl.function
def classify(s, review, fail=False):
    s += EXAMPLES
    if fail:
        raise LookupError(review)
    s += review + "\nLabel:" + rl.gen("bad" if review == "broken" else "label", stop="\n")
    s += rl.gen("why")


def failing(text: str, op: protocol.Generate) -> str:
    if op.name == "bad":
        raise InvalidConstraint("no")
    return default_script(text, op)


def test_results_are_in_order_and_the_prefix_is_sent_once(server: FakeServer) -> None:
    reviews = [f"number {i}" for i in range(40)]
    states = classify.run_batch([{"review": review} for review in reviews], num_threads=8)
    for review, state in zip(reviews, states, strict=True):
        assert state.text().startswith(EXAMPLES + review + "\nLabel:")
    sent = "".join(
        part.text for op in server.sent(protocol.Append) for part in op.parts if part.text
    )
    assert sent.count("Label the review.") == 1
    assert len(server.sent(protocol.Prefill)) == 1
    roots = [op for op in server.sent(protocol.Open) if op.parent is None]
    assert len(roots) == 1 and len(server.sent(protocol.Open)) == 41
    eventually(lambda: server.open_branches == 0)
    # The server generated from the whole text, prefix included.
    label = states[7]["label"]
    prompt = EXAMPLES + "number 7\nLabel:"
    assert label == default_script(prompt, server.sent(protocol.Generate)[0])


def test_a_failed_program_disturbs_no_other(server: FakeServer) -> None:
    server.script = failing
    states = classify.run_batch(
        [
            {"review": "a"},
            {"review": "broken"},
            {"review": "b"},
            {"review": "c", "fail": True},
            {"review": "d"},
        ]
    )
    assert [type(state.error()).__name__ for state in states] == [
        "NoneType", "ProgramError", "NoneType", "LookupError", "NoneType",
    ]  # fmt: skip
    for index in (0, 2, 4):
        assert states[index]["label"] and states[index]["why"]
    with pytest.raises(rl.ProgramError, match=r"gen\('bad'\) failed: no"):
        states[1]["why"]
    with pytest.raises(LookupError):
        states[3]["label"]
    eventually(lambda: server.open_branches == 0)


def test_programs_that_start_otherwise_get_a_branch_of_their_own(server: FakeServer) -> None:
    calls = []

    @rl.function
    def moody(s, mood):
        calls.append(mood)
        # The trace sees "Common ", some programs stop before its end or differ in it.
        s += "Common start" if len(calls) != 3 else "Com"
        if len(calls) == 4:
            s += rl.gen("early")
        s += mood + rl.gen("x")

    states = moody.run_batch([{"mood": str(i)} for i in range(4)], num_threads=1)
    starts = [state.text().split(" w")[0] for state in states]
    assert starts == ["Common start0", "Com1", "Common start", "Common start3"]
    for state, prompt in ((states[0], "Common start0"), (states[1], "Com1")):
        assert state["x"] == default_script(prompt, server.sent(protocol.Generate)[0])
    eventually(lambda: server.open_branches == 0)


def test_the_prefix_of_a_chat_includes_its_template(server: FakeServer) -> None:
    @rl.function
    def chat(s, question):
        s += rl.system("You are terse.")
        s += rl.user(question)
        s += rl.assistant(rl.gen("answer"))

    states = chat.run_batch([{"question": "one"}, {"question": "two"}])
    appended = [op.parts for op in server.sent(protocol.Append)]
    assert appended[0] == (
        protocol.Text("<s><|system|>", special=True),
        protocol.Text("You are terse."),
        protocol.Text("<|end|><|user|>", special=True),
    )
    assert sum("terse" in part.text for parts in appended for part in parts) == 1
    assert states[1].messages()[1] == {"role": "user", "content": "two"}


def test_arguments_common_to_the_batch_belong_to_the_prefix(server: FakeServer) -> None:
    @rl.function
    def program(s, examples, question, ending="?"):
        s += f"{examples}Q: {question}{ending}" + rl.gen("x")

    shots = "Q: 1? A: 2\n" * 3
    batch = [{"examples": shots, "question": str(i)} for i in range(5)]
    states = program.run_batch(batch)
    assert states[4].text().startswith(shots + "Q: 4?")
    sent = [part.text for op in server.sent(protocol.Append) for part in op.parts]
    assert sent[0] == shots + "Q: " and sorted(sent[1:]) == ["0?", "1?", "2?", "3?", "4?"]


def test_no_prefix_is_computed_where_the_server_keeps_none(server: FakeServer) -> None:
    server.model = msgspec.structs.replace(server.model, caching=False)
    backend = rl.RuntimeEndpoint(server.address)
    states = classify.run_batch([{"review": "one"}, {"review": "two"}], backend=backend)
    assert [state.text()[: len(EXAMPLES) + 3] for state in states] == [
        EXAMPLES + "one",
        EXAMPLES + "two",
    ]
    assert not server.sent(protocol.Prefill)
    assert all(op.parent is None for op in server.sent(protocol.Open))


@pytest.mark.parametrize("style", [False, True])
def test_empty_single_and_generator(server: FakeServer, style: bool) -> None:
    assert list(classify.run_batch([], generator_style=style)) == []
    states = classify.run_batch([{"review": "one"}], generator_style=style)
    assert [state.text()[: len(EXAMPLES) + 3] for state in states] == [EXAMPLES + "one"]
    assert not server.sent(protocol.Prefill)  # a single program shares with no other


def test_the_generator_yields_before_all_are_done(server: FakeServer) -> None:
    def script(text: str, op: protocol.Generate) -> str:
        if "number 2" in text:
            eventually(first_seen.is_set)
        return default_script(text, op)

    first_seen = threading.Event()
    server.script = script
    states = classify.run_batch(
        [{"review": f"number {i}"} for i in range(4)], generator_style=True, num_threads=1
    )
    assert "number 0" in next(states).text()
    first_seen.set()
    assert len(list(states)) == 3


def test_a_generator_that_is_given_up_cancels_the_rest(server: FakeServer) -> None:
    states = classify.run_batch([{"review": str(i)} for i in range(50)], generator_style=True)
    next(states)
    server.hold()
    states.close()
    eventually(lambda: server.open_branches == 0)


@pytest.mark.parametrize("style", [False, True])
def test_rows_come_from_an_iterator(server: FakeServer, tmp_path: Path, style: bool) -> None:
    rows = csv.DictReader(["review", "one", "two"])
    states = classify.run_batch(rows, checkpoint=tmp_path / "rows", generator_style=style)
    assert [state.text()[len(EXAMPLES) :][:3] for state in states] == ["one", "two"]
    assert len(server.sent(protocol.Prefill)) == 1  # the common prefix is that of all rows


async def test_rows_of_an_async_program_come_from_an_iterator(server: FakeServer) -> None:
    @rl.function
    async def program(s, i):
        s += i

    states = await program.run_batch_async((number,) for number in "ab")
    assert [state.text() for state in states] == ["a", "b"]


def test_rows_of_a_method_share_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    class Judge:
        @rl.function
        def rate(self, s, text):
            s += text

    read, signature = [], inspect.signature
    program = Judge().rate
    monkeypatch.setattr(
        inspect, "signature", lambda *given: read.append(given) or signature(*given)
    )
    bodies(program, [{"text": str(number)} for number in range(100)])
    assert len(read) <= 1


def test_progress_bar(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    classify.run_batch([{"review": "a"}, {"review": "b"}], progress_bar=True)
    assert "classify" in capsys.readouterr().out


def test_wrong_arguments_are_found_before_anything_runs(server: FakeServer) -> None:
    with pytest.raises(TypeError, match=r"batch\[1\].*'review'"):
        classify.run_batch([{"review": "a"}, {"revue": "b"}])
    with pytest.raises(TypeError, match=r"batch\[0\]"):
        classify.run_batch(["a"])
    for wrong in ({"review": "a"}, 3):
        with pytest.raises(TypeError, match=r"list of dictionaries or tuples, not one (dict|int)"):
            classify.run_batch(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="temprature"):
        classify.run_batch([{"review": "a"}], temprature=1)
    with pytest.raises(InvalidRequest, match="num_threads"):
        classify.run_batch([{"review": "a"}], num_threads=0)
    assert not server.sent(protocol.Open)


def interrupt_when(condition: Any) -> threading.Thread:
    def wait_and_interrupt() -> None:
        eventually(condition)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait_and_interrupt)
    thread.start()
    return thread


def test_ctrl_c_cancels_a_batch_on_the_server(server: FakeServer) -> None:
    server.hold()
    thread = interrupt_when(lambda: len(server.sent(protocol.Generate)) >= 16)
    with pytest.raises(KeyboardInterrupt):
        classify.run_batch([{"review": str(i)} for i in range(30)], num_threads=8)
    thread.join()
    eventually(lambda: server.open_branches == 0)
    assert len(server.sent(protocol.Cancel)) >= 8


def test_ctrl_c_cancels_a_single_run(server: FakeServer) -> None:
    server.hold()
    thread = interrupt_when(lambda: len(server.sent(protocol.Generate)) == 2)
    with pytest.raises(KeyboardInterrupt):
        classify.run("a")
    thread.join()
    eventually(lambda: server.open_branches == 0)
    server.release()
    assert classify.run("a").error() is None


def test_cancelled_programs_stop_at_their_next_operation(server: FakeServer) -> None:
    states: list[Any] = []

    @rl.function
    def endless(s):
        states.append(s)
        s += "a" + rl.gen("x")
        while True:
            s += s["x"] + rl.gen("x")

    run = endless.run(stream=True)
    eventually(lambda: len(server.sent(protocol.Generate)) > 10)
    run.branch.run.cancel()
    error = run.error()
    assert isinstance(error, (rl.ProgramError, Cancelled)) and error.code == "cancelled"
    eventually(lambda: server.open_branches == 0)


def test_cache_computes_the_prefix(server: FakeServer) -> None:
    assert classify.cache() == EXAMPLES
    assert len(server.sent(protocol.Prefill)) == 1
    assert rl.function(lambda s, x: s.append(x)).cache() == ""
    assert classify.cache(adapter="formal") == EXAMPLES
    assert [op.adapter for op in server.sent(protocol.Open)] == [None, "formal"]
    eventually(lambda: server.open_branches == 0)


def test_ctrl_c_while_following_a_stream_cancels_it(server: FakeServer) -> None:
    server.hold()
    state = classify.run("a", stream=True)
    following = state.branch.run.signal
    thread = interrupt_when(
        lambda: len(server.sent(protocol.Generate)) == 2 and bool(following._subscribers)
    )
    with pytest.raises(KeyboardInterrupt):
        list(state.text_iter())
    thread.join()
    eventually(lambda: server.open_branches == 0)
    assert isinstance(state.error(), rl.ProgramError)


def test_ctrl_c_cancels_coroutines(server: FakeServer) -> None:
    @rl.function
    async def program(s, i):
        s += "start " + i + rl.gen("x")
        await s["x"]

    server.hold()
    thread = interrupt_when(lambda: len(server.sent(protocol.Generate)) == 20)
    with pytest.raises(KeyboardInterrupt):
        program.run_batch([{"i": str(i)} for i in range(20)])
    thread.join()
    eventually(lambda: server.open_branches == 0)


def test_closing_a_stream_cancels_it(server: FakeServer) -> None:
    server.hold()
    stream = classify.stream("a")
    assert next(stream) == EXAMPLES
    stream.close()
    eventually(lambda: server.open_branches == 0)


def test_what_a_streamed_run_returned_is_waited_for(server: FakeServer) -> None:
    """Readers that see the stream's end find the value."""

    @rl.function
    def program(s):
        s += "a" + rl.gen("x")
        return s["x"]

    server.hold()
    state = program.run(stream=True)
    heard: list[Any] = []
    state.branch.run.ended.add_callback(lambda: heard.append(state._value))
    server.release()
    assert state.ret_value == state["x"] and heard == [state["x"]]
    with pytest.raises(KeyError, match=r"^no variable 'y'.*: x"):
        list(program.run(stream=True).text_iter("y"))


def test_a_failed_run_returned_nothing() -> None:
    good, bad = classify.run_batch([("a",), ("b", True)])
    streamed = classify.run("b", True, stream=True)
    assert good.ret_value is None
    for state in (bad, streamed):
        with pytest.raises(LookupError, match="b"):
            _ = state.ret_value


def test_what_a_program_returned_is_there_unless_the_run_failed() -> None:
    """The run fails only if an operation fails that the program has not read."""

    @rl.function
    def program(s, handled):
        s += rl.gen("x")
        if not handled:
            return "returned before it failed"
        with pytest.raises(rl.ProgramError):
            return s["x"]
        return None

    failing = Scripted(x=InvalidRequest("no"))
    unseen, seen = program.run_batch([(False,), (True,)], backend=failing)
    streamed = [program.run(how, stream=True, backend=failing) for how in (False, True)]
    for state in (unseen, streamed[0]):
        with pytest.raises(rl.ProgramError, match="no"):
            _ = state.ret_value
    assert seen.ret_value is streamed[1].ret_value is None


def test_a_called_program_s_value_is_not_waited_for(backend: rl.RuntimeEndpoint) -> None:
    counters = backend.connect().counters

    @rl.function
    def inner(s):
        s += rl.gen("x")
        return "at once"

    @rl.function
    def program(s):
        before = counters.round_trips
        return inner(s).ret_value, counters.round_trips - before

    state = program.run(stream=True)
    state.branch.run.thread.join()
    assert state.ret_value == ("at once", 0)


def test_programs_in_threads_know_the_context() -> None:
    user = contextvars.ContextVar("user", default="nobody")
    seen: list[str] = []

    @rl.function
    def program(s, i):
        s += "a"
        _ = s.text()  # the end of the prefix that is traced
        seen.append(user.get())

    user.set("Ida")
    program.run(0, stream=True).sync()
    program.run_batch([(1,), (2,)])
    assert seen == ["Ida"] * 3


def test_a_program_may_stop_following_itself(server: FakeServer) -> None:
    @rl.function
    def program(s):
        s += "a" + rl.gen("x")
        first = next(s.text_iter("x"))
        s += rl.gen("y")
        return first, s["y"]

    for streams in (False, True):
        state = program.run(stream=streams)
        assert state.ret_value[1] == state["y"] and state.ret_value[0]


@pytest.mark.parametrize("follow", ["text_iter", "value_iter"])
def test_who_leaves_a_stream_cancels_it(server: FakeServer, follow: str) -> None:
    @rl.function
    def program(s):
        s += "a"
        with s.var_scope("x"):
            s += "[1, 2"
        s += rl.gen("y")

    server.hold()
    state = program.run(stream=True)
    other = state.text_iter()
    assert next(other) == "a"
    for said in getattr(state, follow)("x"):
        assert said in ("[1, 2", [1], [1, 2])
        break
    assert not server.sent(protocol.Cancel) and not state.branch.run.cancelled
    other.close()  # the last program that follows
    eventually(lambda: server.open_branches == 0)
    with pytest.raises(rl.ProgramError, match="the reader of its text left before the end"):
        _ = state["y"]


def test_who_waits_for_a_value_wants_the_run(server: FakeServer) -> None:
    @rl.function
    def program(s):
        s += "a" + rl.gen("y")
        return s["y"]

    server.hold()
    state = program.run(stream=True)
    stream = state.text_iter()
    assert next(stream) == "a"
    with ThreadPoolExecutor(2) as pool:
        read = [pool.submit(lambda: state["y"]), pool.submit(lambda: state.ret_value)]
        try:
            eventually(lambda: len(state.branch.run.signal._subscribers) == 3)
            stream.close()
        finally:
            server.release()
        assert read[0].result() == read[1].result() == state["y"]
