"""Messages, round trips, order, and cleanup."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

import rootlace as rl
from rootlace.client.channel import Signal
from rootlace.client.connection import IO_THREAD, Outbox, Packed
from rootlace.testing import Scripted
from rootlace.wire import protocol
from rootlace.wire.errors import InvalidRequest
from tests.frontend.fake_server import FakeServer
from tests.waiting import eventually


@rl.function
def straight(s, question):
    s += "Q: " + question + "\nA:" + rl.gen("first", stop="\n")
    s += "\nAnd:" + rl.gen("second") + "\nAlso:" + rl.gen("third")
    s += rl.select("verdict", ["good", "bad"])


def test_a_straight_line_program_is_one_message_and_one_round_trip(
    server: FakeServer, backend: rl.RuntimeEndpoint
) -> None:
    counters = backend.connect().counters
    before = counters.messages_sent, counters.round_trips
    state = straight.run("why?")
    assert counters.messages_sent - before[0] == 1
    assert counters.round_trips - before[1] == 1
    assert [type(op).__name__ for op in server.ops[1:]] == [
        "Open", "Append", "Generate", "Append", "Generate", "Append", "Generate", "Select", "Close",
    ]  # fmt: skip
    assert state.text() == (
        "Q: why?\nA:" + state["first"] + "\nAnd:" + state["second"] + "\nAlso:" + state["third"]
        + state["verdict"]
    )  # fmt: skip
    assert counters.round_trips - before[1] == 1


def test_token_ids_go_as_they_are(server: FakeServer, backend: rl.RuntimeEndpoint) -> None:
    @rl.function
    def told(s, tokens):
        s += rl.ids(tokens) + "and" + rl.ids([]) + rl.ids([9]) + rl.gen("x")

    state = told.run([5, 6])
    appended = [part for op in server.ops if isinstance(op, protocol.Append) for part in op.parts]
    assert appended == [
        protocol.Tokens((5, 6)),
        protocol.Text("and"),
        protocol.Tokens((9,)),
    ]
    assert state.text() == "and" + state["x"]


def test_a_read_costs_one_round_trip_and_waits_for_nothing_behind_it(
    server: FakeServer, backend: rl.RuntimeEndpoint
) -> None:
    @rl.function
    def reading(s):
        s += "a" + rl.gen("x")
        value = s["x"]
        assert value == s["x"]
        s += "b" + rl.gen("y")

    counters = backend.connect().counters
    before = counters.round_trips
    reading.run()
    assert counters.round_trips - before == 2


def test_forks_run_side_by_side_without_threads_or_waiting(
    server: FakeServer, backend: rl.RuntimeEndpoint
) -> None:
    threads = threading.active_count()

    @rl.function
    def tree(s):
        s += "root"
        forks = s.fork(50)
        forks += lambda i: f" {i}:" + rl.gen("tip")
        forks.join()
        assert threading.active_count() <= threads  # threads of earlier tests may end
        assert not server.sent(protocol.Generate)  # the program has not waited for a value
        s += " end" + rl.gen("end")

    counters = backend.connect().counters
    before = counters.messages_sent
    state = tree.run()
    assert counters.messages_sent - before == 1
    assert len(state["tip"]) == 50 and len(set(state["tip"])) == 50
    eventually(lambda: server.open_branches == 0)


def test_a_new_connection_has_nothing_to_repeat_and_sends_no_half_filled_frame() -> None:
    async def fill() -> tuple[list[list[Packed]], list[list[Packed]]]:
        outbox = Outbox(asyncio.get_running_loop(), coalesce=3600.0)
        sent: list[list[Packed]] = []
        outbox.put_back([])
        outbox.put(1, msgspec.Raw(b"first"))
        writing = asyncio.create_task(outbox.write(sent.append))
        for _ in range(5):
            await asyncio.sleep(0)
        early = list(sent)
        outbox.put(2, msgspec.Raw(b"second"))
        outbox.flush()
        for _ in range(5):
            await asyncio.sleep(0)
        writing.cancel()
        return early, sent

    early, sent = asyncio.run(fill())
    assert early == []
    assert [[number for number, _ in frame] for frame in sent] == [[1, 2]]


def test_concatenate_and_append_needs_no_round_trip(
    server: FakeServer, backend: rl.RuntimeEndpoint
) -> None:
    @rl.function
    def both(s):
        s += "Facts."
        with s.fork(2) as forks:
            forks += [" One" + rl.gen("a"), " Two" + rl.gen("a")]
            forks.join("concate_and_append")
        s += " So" + rl.gen("conclusion")

    counters = backend.connect().counters
    before = counters.messages_sent, counters.round_trips
    state = both.run()
    assert counters.round_trips - before[1] == 1
    seen = "Facts." + state.text()[len("Facts.") : state.text().index(" So")]
    assert state.text().startswith("Facts. One w") and " Two w" in state.text()

    from tests.frontend.fake_server import default_script

    assert state["conclusion"] == default_script(seen + " So", server.sent(protocol.Generate)[0])
    eventually(lambda: server.open_branches == 0)
    # The forks are closed once the join has their text; no reader waits for that message.
    assert counters.messages_sent - before[0] == 2
    assert all(isinstance(op, protocol.Close) for op in server.ops[-2:])


def test_dropped_forks_are_cancelled_and_closed(
    server: FakeServer, backend: rl.RuntimeEndpoint
) -> None:
    server.hold()

    @rl.function
    def wasteful(s):
        s += "x"
        forks = s.fork(3)
        forks += rl.gen("unused")
        del forks
        gc.collect()
        s += "done"
        return 7

    state = wasteful.run()
    assert state.ret_value == 7 and state.text() == "xdone"
    eventually(lambda: server.open_branches == 0)
    assert len(server.sent(protocol.Cancel)) == 3


def test_children_outlive_a_dropped_parent(server: FakeServer, backend: rl.RuntimeEndpoint) -> None:
    @rl.function
    def beam(s):
        s += "x"
        beam = [s.fork(1)[0] for _ in range(2)]
        for _ in range(3):
            grown = []
            for state in beam:
                children = state.fork(2)
                children += lambda i: f"/{i}" + rl.gen("step")
                grown += list(children)
            beam = grown[:2]
        s["best"] = beam[0].text()

    assert beam.run()["best"].count("/0") == 3
    gc.collect()
    eventually(lambda: server.open_branches == 0)


def test_a_connection_closed_in_the_thread_of_another_does_not_hold_it_up(
    server: FakeServer, backend: rl.RuntimeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector closes unreferenced connections in any thread."""
    others = [rl.RuntimeEndpoint(server.address) for _ in range(3)]
    name = f"{IO_THREAD} {server.address}"
    threads = [thread for thread in threading.enumerate() if thread.name == name]
    assert len(threads) == 4
    joined: list[str] = []
    join = threading.Thread.join

    def noted(thread: threading.Thread, timeout: float | None = None) -> None:
        joined.append(threading.current_thread().name)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", noted)
    channel = backend.connect()
    closed = threading.Event()

    def drop(_: protocol.Event) -> None:
        others.clear()
        closed.set()

    channel.send(protocol.Ping(op=channel.next_op()), drop)
    channel.flush()
    assert closed.wait(60)
    assert not joined
    eventually(lambda: sum(thread.is_alive() for thread in threads) == 1)
    assert backend.get_model_name()


class Greeter:
    async def __call__(self, s, who):
        s += who + rl.gen("reply")


def test_any_callable_is_a_program(backend: rl.RuntimeEndpoint) -> None:
    assert rl.function(Greeter()).run("Ida")["reply"]
    greet = rl.function(
        functools.partial(lambda s, who: s.append(who + rl.gen("reply")), who="Ida")
    )
    assert [state.text()[:3] for state in (greet.run(), *greet.run_batch([{}]))] == ["Ida"] * 2


@dataclasses.dataclass
class Guide:
    city: str
    other = straight

    @rl.function
    def tell(self, s, what):
        s += f"{what} of {self.city}" + rl.gen("told")

    say = tell
    paint = tell.bind(what="Art")

    @rl.function
    async def both(self, s):
        await self.tell_async(s)
        return await s.text()

    @rl.function
    async def tell_async(self, s):
        s += self.city


class Leader(Guide):
    speak = Guide.tell


def test_a_method_is_a_program_of_its_object(backend: rl.RuntimeEndpoint) -> None:
    guide = Guide("Rome")
    for method in (guide.say, Leader("Rome").tell, Leader("Rome").speak):
        assert method.run("Art").text()[:11] == "Art of Rome"
    assert guide.tell.arg_names == ["what"] and guide.tell.run("Food").text()[:12] == "Food of Rome"
    assert guide.both.run().ret_value == "Rome"
    bound = [
        pickle.loads(pickle.dumps(each)) for each in (guide.paint, guide.tell.bind(what="Art"))
    ]
    states = pickle.loads(pickle.dumps(guide.tell)).run_batch([("Art",)])
    states += [guide.paint.run(), *(each.run() for each in bound)]
    assert [state.text()[:11] for state in states] == ["Art of Rome"] * 4
    assert guide.other is Guide.other is straight  # no method: defined elsewhere


def test_programs_and_failures_are_pickled(backend: rl.RuntimeEndpoint) -> None:
    """Programs and failures are pickled by name, so a program runs in the processes of a pool."""
    assert pickle.loads(pickle.dumps(straight)) is straight
    bound = pickle.loads(pickle.dumps(straight.bind(question="why?")))
    assert bound.run().text().startswith("Q: why?")
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(rl.function(lambda s: None))

    with pytest.raises(rl.ProgramError) as caught:
        rl.function(lambda s: s.append(rl.user("x") + rl.user_end())).run()
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value) and error.lineno == caught.value.lineno > 0
    assert isinstance(error.__cause__, InvalidRequest) and error.code == "invalid_request"


def test_an_endpoint_is_pickled_as_its_address(backend: rl.RuntimeEndpoint) -> None:
    another = pickle.loads(pickle.dumps(backend))
    assert another.connect() is not backend.connect()
    assert straight.run("why?", backend=another)["first"]
    another.close()
    with pytest.raises(TypeError, match="Scripted cannot be pickled: make one in each process"):
        pickle.dumps(Scripted("x"))


def test_state_is_readable_but_closed_after_the_run(
    server: FakeServer, backend: rl.RuntimeEndpoint
) -> None:
    state = straight.run("why?")
    assert "first" in state and "nothing" not in state
    with pytest.raises(InvalidRequest, match="program has ended"):
        state += "more"
    with pytest.raises(KeyError, match="first, second, third, verdict"):
        state["nothing"]
    assert state.error() is None


def test_several_threads_share_one_connection(server: FakeServer) -> None:
    endpoint = rl.RuntimeEndpoint(server.address)
    results: dict[int, str] = {}

    def work(number: int) -> None:
        for repeat in range(5):
            state = straight.run(f"{number}-{repeat}", backend=endpoint)
            results[number * 100 + repeat] = state.text()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    for key, text in results.items():
        assert text == straight.run(f"{key // 100}-{key % 100}", backend=endpoint).text()
    eventually(lambda: server.open_branches == 0)
    endpoint.close()


def test_who_waited_for_a_variable_is_woken_no_more(backend) -> None:
    @rl.function
    def program(s):
        s += rl.gen("x")

    state = program.run(stream=True, backend=backend)
    signal = state.branch.run.signal
    assert state["x"]
    state.sync()
    assert not signal.heard


def test_followers_that_come_and_go_at_once_lose_nobody() -> None:
    signal, switching = Signal(), sys.getswitchinterval()

    def follow() -> bool:
        heard = True
        for _ in range(10_000):
            wake = threading.Event().set
            signal.subscribe(wake)
            heard &= signal.heard
            signal.unsubscribe(wake)
        return heard

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            assert all(done.result() for done in [pool.submit(follow) for _ in range(3)])
    finally:
        sys.setswitchinterval(switching)
    assert not signal.heard


def test_the_adapter_of_a_program_and_of_its_forks(
    server: FakeServer, backend: rl.RuntimeEndpoint
) -> None:
    @rl.function
    def forking(s, word):
        s += "a constant beginning, " + word
        for fork in (*s.fork(1), *s.fork(1, adapter="short"), *s.fork(1, adapter="")):
            fork += rl.gen("x")

    def opened() -> list[str | None]:
        found = [op.adapter for op in server.ops if isinstance(op, protocol.Open)]
        server.ops.clear()
        return found

    forking.run("b", adapter="formal")
    assert opened() == ["formal", None, "short", ""]
    forking.run("b")
    assert opened() == [None, None, "short", ""]
    forking.run_batch([{"word": "b"}, {"word": "c"}], adapter="formal", num_threads=1)
    assert opened()[:2] == ["formal", "formal"]  # the common beginning, and a program behind it
    assert str(forking.trace("b", adapter="formal")) == str(forking.trace("b"))

    @rl.function
    def own(s, adapter):
        s += adapter

    assert own.run(adapter="mine").text() == "mine"
    assert own.trace(adapter="mine").prefix == "mine"
    assert opened() == [None]
