"""Continued conversations: messages, ended states, states kept as JSON and as pickles."""

from __future__ import annotations

import json
import pickle
import threading
from dataclasses import dataclass

import pytest

import rootlace as rl
from rootlace.wire import protocol
from rootlace.wire.errors import InvalidConstraint, InvalidRequest, UnreadableValue
from tests.frontend.fake_server import FakeServer

pytestmark = pytest.mark.usefixtures("backend")


@dataclass
class Person:
    name: str


@rl.function
def chat(s, question):
    s += rl.user(question)
    s += rl.assistant(rl.gen("answer", stop_token_ids=[0]))
    return len(question)


@rl.function
async def chat_async(s, question):
    s += rl.user(question) + rl.assistant(rl.gen("answer"))


def prompts(server: FakeServer) -> list[str]:
    """Return the text before each generation, as the gateway saw it."""
    found: list[str] = []
    write = server.script

    def script(text: str, op: protocol.Generate) -> str:
        found.append(text)
        return str(write(text, op))

    server.script = script
    return found


def test_messages_can_be_appended_again(server: FakeServer) -> None:
    server.script = lambda text, op: "Hi."
    first = chat.run("Hello?", temperature=0)

    @rl.function
    def again(s, messages):
        s += messages
        s += [{"role": "user", "content": [{"type": "text", "text": "More"}]}]

    nothing = {"audio": None, "tool_calls": [], "refusal": None}  # as OpenAI's client writes it
    state = again.run([{**message, **nothing} for message in first.messages()])
    assert state.messages() == [*first.messages(), {"role": "user", "content": "More"}]
    assert state.text() == first.text() + "<|user|>More<|end|>"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user"}], r"messages\[0\] is no dictionary"),
        (["hello"], r"messages\[0\] is no dictionary"),
        ([{"role": "user", "content": 7}], "must be strings"),
        ([{"role": "user", "content": "x", "name": "Ida"}], "'name' cannot be appended"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "audio": None}],
            "'tool_calls' cannot be appended",
        ),
        ([{"role": "user", "content": [{"type": "audio"}]}], "parts of the types 'text' and"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "no http, https or data"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/a.png"}}]}],
            "no http, https or data",
        ),
        ([{"role": "judge", "content": "x"}], "no role 'judge'"),
    ],
)
def test_what_is_no_message_is_refused(messages, reason: str) -> None:
    @rl.function
    def program(s):
        s += messages

    with pytest.raises((TypeError, rl.RootlaceError), match=reason):
        program.run()


def test_the_text_of_another_state_keeps_its_messages(server: FakeServer) -> None:
    first = chat.run("Hello?")

    @rl.function
    def copied(s):
        s += first.text()

    @rl.function
    def quoted(s):
        s += rl.user(first.text())

    assert copied.run().messages() == first.messages()
    special = [part for op in server.sent(protocol.Append)[-4:] for part in op.parts]
    assert any(isinstance(part, protocol.Text) and part.special for part in special)
    # Within a message, the text belongs to the speaker.
    assert quoted.run().messages() == [{"role": "user", "content": first.text()}]


def test_an_ended_state_goes_on_with_its_very_tokens(server: FakeServer) -> None:
    first = chat.run("Hello?")
    first["note"] = 1
    sent = len(server.ops)
    second = chat.run("And then?", after=first)
    assert second.text().startswith(first.text() + "<|user|>And then?")
    assert [message["content"] for message in second.messages()][::2] == ["Hello?", "And then?"]
    assert second["note"] == 1 and first["answer"] != second["answer"]
    parts = [part for op in server.ops[sent:] for part in getattr(op, "parts", ())]
    (ids,) = [part.ids for part in parts if isinstance(part, protocol.Tokens)]
    assert list(ids) == first.get_meta_info("answer")["output_ids"]
    streamed = "".join(chat.stream("A third?", after=second))
    assert streamed.startswith(second.text() + "<|user|>A third?")


async def test_in_async_programs_too() -> None:
    first = await chat_async.run_async("Hello?")
    second = await chat_async.run_async("More?", after=first)
    assert len(second.messages()) == 4


def test_states_that_cannot_go_on(server: FakeServer) -> None:
    server.hold()
    running = chat.run("Hello?", stream=True)
    with pytest.raises(InvalidRequest, match="has not ended"):
        chat.run("More?", after=running)
    server.release()
    running.sync()

    def script(text: str, op: protocol.Generate) -> str:
        raise InvalidConstraint("no")

    server.script = script
    (failed,) = chat.run_batch([{"question": "x"}])
    for use in (lambda: chat.run("y", after=failed), failed.to_json, lambda: pickle.dumps(failed)):
        with pytest.raises(rl.ProgramError, match="no"):
            use()
    with pytest.raises(TypeError, match="after= takes a state"):
        chat.run("y", after=running.text())

    @rl.function
    def own(s, after):
        s += after

    assert own.run(after="mine").text() == "mine"


def full() -> rl.ProgramState:
    @rl.function
    def program(s):
        s += rl.user("Hello") + rl.assistant_begin() + "So: "
        with s.var_scope("said"):
            s += rl.select("pick", ["yes", "no"]) + "!"
        s += rl.gen("text", n=2) + rl.gen("person", type=Person) + rl.ids([5, 6])
        with s.fork(2) as forks:
            forks += rl.gen("tip")
        s["note"] = {"x": [1]}
        return s["note"]

    return program.run()


@pytest.fixture
def script(server: FakeServer) -> None:
    def write(text: str, op: protocol.Generate) -> str | list[str]:
        if op.name == "person":
            return '{"name": "Ida"}'
        return ["a", "b"][: op.params.n] if op.params.n > 1 else str(len(text))

    server.script = write


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("how", ["json", "pickle"])
def test_a_state_that_was_saved_reads_the_same(how: str, server: FakeServer) -> None:
    state = full()
    if how == "json":
        copy = rl.State.from_json(state.to_json(), types={"person": Person})
        assert rl.State.from_json(copy.to_json())["person"] == {"name": "Ida"}
    else:
        copy = pickle.loads(pickle.dumps(state))
    assert dict(copy) == dict(state) and copy["person"] == Person("Ida")
    assert copy.text() == state.text() and copy.text("person") == '{"name": "Ida"}'
    assert copy.messages() == state.messages() == [{"role": "user", "content": "Hello"}]
    assert copy.ret_value == {"x": [1]} and copy.error() is None
    assert copy.get_meta_info("tip") == state.get_meta_info("tip")
    assert "".join(copy.text_iter()) == state.text()
    with pytest.raises(KeyError, match=r"^no variable 'nothing'"):
        copy["nothing"]
    with pytest.raises(InvalidRequest, match="not appended to"):
        copy += "x"

    @rl.function
    def more(s):
        s += " and" + rl.gen("more") + rl.assistant_end()

    seen = prompts(server)
    more.run(after=state)
    more.run(after=copy)
    assert seen[0] == seen[1] and seen[0].endswith("[5][6] and")


@pytest.mark.usefixtures("script")
def test_another_model_gets_the_text(server: FakeServer) -> None:
    first = chat.run("Hello?")
    other = rl.State.from_json(first.to_json().replace("/nowhere/fake", "/another"))
    seen = prompts(server)
    chat.run("More?", after=other)
    assert seen == [first.text() + "<|user|>More?<|end|><|assistant|>"]
    with pytest.raises(InvalidRequest, match="token ids of another model"):
        chat.run("x", after=rl.State.from_json(full().to_json().replace("/nowhere", "/else")))


def test_what_cannot_be_saved_or_read() -> None:
    state = chat.run("Hello?")
    for text in ("", "[]", "{}", '{"rootlace": 1}', '{"rootlace": 1, "variables": []}'):
        with pytest.raises(InvalidRequest, match="this is no saved state"):
            rl.State.from_json(text)
    saved = json.loads(state.to_json())
    wrong: list[tuple[int, object]] = [
        (0, {"begin": 5, "text": ""}),
        (4, {"ids": [-1], "text": ""}),
    ]
    for place, piece in [*wrong, (4, {"ids": [1], "text": 5}), (0, {"template": None})]:
        text = json.dumps({**saved, "text": [*saved["text"][:place], piece]})
        with pytest.raises(InvalidRequest, match="this is no saved state"):
            rl.State.from_json(text)
    for text in ('{"rootlace": 1, "text": ' + "[" * 100_000, json.dumps({**saved, "text": "x"})):
        with pytest.raises(InvalidRequest, match="this is no saved state"):
            rl.State.from_json(text)
    typed = state.to_json().replace('"text":" w', '"typed":true,"text":" w')
    with pytest.raises(UnreadableValue, match="cannot be read as"):
        _ = rl.State.from_json(typed)["answer"]
    state["lock"] = object()
    with pytest.raises(InvalidRequest, match="the variable 'lock' cannot be written as JSON"):
        state.to_json()


def test_who_follows_a_turn_is_given_its_answer_and_not_that_of_the_turn_before(
    server: FakeServer,
) -> None:
    server.script = lambda text, op: "two" if "Second" in text else "one"
    restored, go_on = threading.Event(), threading.Event()

    @rl.function
    def turn(s, question):
        restored.set()
        assert go_on.wait(60)
        s += rl.user(question) + rl.assistant(rl.gen("answer"))

    go_on.set()
    first = turn.run("First")
    for read in (lambda state: "".join(state.text_iter("answer")), lambda state: state["answer"]):
        restored.clear()
        go_on.clear()
        second = turn.run("Second", after=first, stream=True)
        assert restored.wait(60)
        threading.Timer(0.05, go_on.set).start()
        assert read(second) == "two"
        second.sync()


def test_a_variable_that_a_turn_does_not_name_is_that_of_the_turn_before(
    server: FakeServer,
) -> None:
    first = chat.run("Hello?")

    @rl.function
    def silent(s):
        s += "Bye."

    second = silent.run(after=first, stream=True)
    assert "".join(second.text_iter("answer")) == first["answer"] == second["answer"]
