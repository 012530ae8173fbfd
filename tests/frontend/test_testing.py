"""`rootlace.testing`: the backends and fixtures for tests of programs."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

import rootlace as rl
from rootlace.client.endpoint import endpoint_of
from rootlace.testing import Recorded, Scripted, plugin
from rootlace.wire.errors import InvalidRequest, ServerUnavailable
from tests.frontend.fake_server import FakeServer


@dataclass
class Person:
    name: str
    age: int


@rl.function
def triage(s, message):
    s += rl.user("Label this: " + message)
    s += rl.assistant(rl.select("label", ["refund", "delivery"]) + rl.gen("why", stop="\n"))


def test_replies_by_name_pattern_and_default() -> None:
    backend = Scripted({"parcel": "delivery"}, default="refund", why="So.\nNo more.")
    states = triage.run_batch([{"message": "my parcel"}, {"message": "my money"}], backend=backend)
    assert [state["label"] for state in states] == ["delivery", "refund"]
    assert {state["why"] for state in states} == {"So."}
    assert backend.open_branches == 0
    first = next(call for call in backend.calls if call.name == "label")
    assert first.choices == ("refund", "delivery") and first.reply in first.choices
    assert first.prompt.startswith("<|user|>Label this: my ")
    assert [call.params.stop for call in backend.calls if call.name == "why"] == [("\n",)] * 2


def test_patterns_stop_a_reply_or_are_refused() -> None:
    @rl.function
    def program(s, pattern):
        s += "x" + rl.gen("a", stop_regex=pattern)
        return s["a"]

    backend = Scripted(default="It costs 12 dollars.")
    assert program.run("[0-9]+ ?d", backend=backend).ret_value == "It costs "
    refused = {"(": r"stop_regex\[0\]: missing \)", "b*": "matches the empty text"}
    for pattern, reason in refused.items():
        with pytest.raises(rl.ProgramError, match=reason) as failure:
            program.run(pattern, backend=Scripted(default="x"))
        assert failure.value.code == "invalid_request"


def test_replies_in_turn_end() -> None:
    @rl.function
    def program(s):
        s += "x" + rl.gen("a", n=2) + rl.gen("b")
        return s["a"], s["b"]

    backend = Scripted(["1", "2", "3"])
    assert program.run(backend=backend).ret_value == (["1", "2"], "3")
    with pytest.raises(rl.ProgramError, match=r"no reply is left for gen\('a'\) after 'x'"):
        program.run(backend=backend)
    with pytest.raises(rl.ProgramError, match=r"nothing is scripted for gen\('a'\) after 'x'"):
        program.run(backend=Scripted(b="3"))
    with pytest.raises(rl.ProgramError, match=r"after 'x'; by the variable's name: Scripted\(a="):
        program.run(backend=Scripted({"a": "3"}))


def test_values_functions_and_failures() -> None:
    @rl.function
    def program(s):
        s += "x" + rl.gen("person", type=Person) + rl.gen("echo") + rl.gen("end")
        return s["person"], s["echo"], s["end"]

    said = {"person": Person("Ida", 47), "echo": lambda prompt: f"<{prompt[:4]}>"}
    state = program.run(backend=Scripted(**said, end="."))
    assert state.ret_value == (Person("Ida", 47), '<x{"n>', ".")
    with pytest.raises(rl.ProgramError, match="gone") as caught:
        program.run(backend=Scripted(**said, end=ServerUnavailable("gone")))
    assert isinstance(caught.value.__cause__, ServerUnavailable)
    with pytest.raises(rl.ProgramError, match="ValueError: no"):
        program.run(backend=Scripted(**said, end=[ValueError("no")]))


@pytest.mark.parametrize(
    ("asked", "reply", "reason"),
    [
        (rl.gen("x", regex="a+"), "b", "does not match"),
        (rl.gen("x", type=Person), "{", "is no JSON"),
        (rl.gen("x", type=Person), {"name": 1, "age": 1}, "1 is not of type 'string'"),
        (rl.select("x", ["a"]), "b", r"is none of \['a'\]"),
    ],
)
def test_replies_keep_to_what_was_asked(asked, reply, reason: str) -> None:
    @rl.function
    def program(s):
        s += "x" + asked

    with pytest.raises(rl.ProgramError, match=reason):
        program.run(backend=Scripted(x=reply))
    if not reason.startswith("is none"):
        assert program.run(backend=Scripted(x=reply, check=False)).text("x")


async def test_tokens_streams_and_the_cache() -> None:
    @rl.function
    async def program(s):
        s += "one two three" + rl.gen("x", max_tokens=2)

    backend = Scripted(default=" four five six")
    state = await program.run_async(stream=True, backend=backend)
    assert [text async for text in state.text_async_iter("x")] == [" four", " five"]
    meta = state.get_meta_info("x")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (3, 0, 2)
    assert meta["finish_reason"]["type"] == "length"
    again = await program.run_async(backend=backend)
    assert again.get_meta_info("x")["cached_tokens"] == 3
    longer = await program.run_async(backend=backend, after=again)
    assert longer.text() == "one two three four fiveone two three four five"
    assert backend.calls[-1].prompt == "one two three four fiveone two three"
    assert longer.get_meta_info("x")["cached_tokens"] == 4


async def test_many_at_once_and_in_threads() -> None:
    seen = set()

    @rl.function
    def ordinary(s, i):
        s += f"{i}:"
        with s.fork(3) as forks:
            forks += rl.gen("x")
        s += rl.gen("y")
        seen.add(threading.current_thread().name)
        return s["x"], s["y"]

    @rl.function
    async def asynchronous(s, i):
        s += f"{i}:" + rl.gen("y")
        return await s["y"]

    backend = Scripted(default=lambda prompt: prompt.partition(":")[0])
    states = ordinary.run_batch([(i,) for i in range(50)], backend=backend, num_threads=8)
    assert [s.ret_value for s in states] == [([str(i)] * 3, str(i)) for i in range(50)]
    assert len(seen) > 1 and backend.open_branches == 0
    runs = [asynchronous.run_async(i, backend=backend) for i in range(50)]
    assert [s.ret_value for s in await asyncio.gather(*runs)] == [str(i) for i in range(50)]
    assert backend.get_server_info()["branches"] == 0


def test_what_is_not_there_is_refused() -> None:
    backend = Scripted()
    backend.flush_cache()
    with pytest.raises(InvalidRequest, match="no Embed here"):
        backend.embed(["x"])
    assert rl.testing.Scripted is Scripted


def test_calls_that_no_model_could_write_are_refused() -> None:
    def add(a: int) -> int:
        return a

    @rl.function
    def agent(s, choice):
        said = rl.gen("said", tools=rl.tools(add), tool_choice=choice)
        s += rl.user("Go.") + rl.assistant(said)
        return len(s.call_tools())

    right = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    wrong = right.replace(": ", ":"), right.replace("add", "sub")
    for choice in ("auto", "required", "add"):
        assert agent.run(choice, backend=Scripted(said=right)).ret_value == 1
        for reply in wrong:
            with pytest.raises(rl.ProgramError, match=r"no tag at '<tool_call>.*begin with '<tool"):
                agent.run(choice, backend=Scripted(said=reply))
    assert agent.run("auto", backend=Scripted(said=f"So: {right}")).ret_value == 1
    assert agent.run("auto", backend=Scripted(said="No.")).ret_value == 0
    with pytest.raises(rl.ProgramError, match=r"no tag at 'No.'"):
        agent.run("required", backend=Scripted(said="No."))
    assert agent.run("auto", backend=Scripted(said=wrong[0], check=False)).ret_value == 0

    def watch(triggers: list[str]) -> str:
        return ", ".join(triggers)

    @rl.function
    def watcher(s):
        s += rl.user("Go.") + rl.assistant(rl.gen("said", tools=rl.tools(watch)))
        return s.call_tools()[0].result

    # Arguments may have any name and hold any text.
    said = right.replace("add", "watch").replace(
        '{"a": 1}', '{"triggers": ["type", "<tool_call>"]}'
    )
    assert watcher.run(backend=Scripted(said=said)).ret_value == "type, <tool_call>"


# ---------------------------------------------------------------- cassettes


def test_what_was_recorded_is_said_again(
    backend: rl.RuntimeEndpoint, server: FakeServer, tmp_path: Path
) -> None:
    counter = iter(range(100))
    server.script = lambda text, op: f"{next(counter)}: {len(text)}"
    path = tmp_path / "folder" / "talk.json"

    def talk(on) -> list[str]:
        runs = [triage.run("my parcel", backend=on) for _ in range(2)]
        streamed = "".join(triage.stream("my money", backend=on))
        return [*(run.text() for run in runs), streamed]

    recorded = talk(Recorded(path, backend))
    server.stop()
    assert talk(Recorded(path)) == recorded
    assert recorded[0] != recorded[1]  # two requests, two answers
    replayed = Recorded(path)
    assert replayed.model_info == server.model
    with pytest.raises(rl.ProgramError, match="has no answer to 'label' after"):
        triage.run("another", backend=replayed)


def test_files_that_are_no_cassettes(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    with pytest.raises(InvalidRequest, match="there is no cassette"):
        Recorded(path)
    path.write_text("[]")
    with pytest.raises(InvalidRequest, match="is no cassette"):
        Recorded(path)


# ---------------------------------------------------------------- pytest


def test_the_plugin(tmp_path: Path, backend: rl.RuntimeEndpoint, server: FakeServer) -> None:
    inner = tmp_path
    (inner / "test_inner.py").write_text(
        "import rootlace as rl\n"
        "@rl.function\n"
        "def program(s):\n"
        "    s += 'x' + rl.gen('y')\n"
        "def test_one(scripted):\n"
        "    backend = scripted(y='z')\n"
        "    assert program.run()['y'] == 'z' and len(backend.calls) == 1\n"
        "def test_two(cassette):\n"
        "    assert program.run()['y'].startswith(' w')\n"
    )
    own = ["-q", "-p", "no:cacheprovider", "--rootdir", str(inner), "-c", str(inner / "none.ini")]
    (inner / "none.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    plugins = [] if _installed() else [plugin]

    def run(*arguments: str) -> int:
        return int(pytest.main([*own, *arguments, str(inner)], plugins=plugins))

    assert run() == 1  # nothing is recorded yet
    assert endpoint_of() is backend  # restored after the tests
    assert run("--rootlace-record", server.address) == 0
    server.stop()
    assert run() == 0


def _installed() -> bool:
    from importlib.metadata import entry_points

    return any(point.value == plugin.__name__ for point in entry_points(group="pytest11"))


def test_a_saved_state_goes_on_elsewhere_as_text() -> None:
    state = triage.run("my money", backend=Scripted(label="refund", why="So it is."))
    other = Scripted(label="refund", why="Yes.")
    triage.run("and now?", backend=other, after=rl.State.from_json(state.to_json()))
    assert other.calls[0].prompt.startswith(state.text())
