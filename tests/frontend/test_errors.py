"""Errors say where and why, and disturb no other run."""

from __future__ import annotations

import enum
import inspect
from pathlib import Path
from typing import Any

import pytest

import rootlace as rl
from rootlace.client.channel import call_in_loop
from rootlace.client.connection import Connection
from rootlace.language.expressions import RoleBegin
from rootlace.testing import Scripted
from rootlace.wire import protocol
from rootlace.wire.errors import (
    ContextLengthExceeded,
    InvalidConstraint,
    InvalidRequest,
    ServerUnavailable,
    Unauthorized,
)
from tests.frontend.fake_server import FakeServer, default_script
from tests.waiting import eventually


def line_of(function: rl.Function, text: str) -> int:
    """Number of the line of this file that holds `text`, inside `function`."""
    lines, start = inspect.getsourcelines(function.func)
    found = [number for number, line in enumerate(lines) if text in line]
    assert len(found) == 1
    return start + found[0]


def failing(text: str, op: protocol.Generate) -> str:
    if op.name.startswith("bad"):
        raise InvalidConstraint("the pattern cannot be compiled")
    return default_script(text, op)


@pytest.fixture(autouse=True)
def scripted(server: FakeServer, backend: rl.RuntimeEndpoint) -> None:
    server.script = failing


@rl.function
def unread(s):
    s += "a" + rl.gen("fine")
    s += "b" + rl.gen("bad_one", max_tokens=3) + rl.gen("bad_two")
    s += "c" + rl.gen("after")
    return "reached"


def test_run_raises_the_first_failure_with_its_line(server: FakeServer) -> None:
    with pytest.raises(rl.ProgramError) as caught:
        unread.run()
    error = caught.value
    assert error.filename == __file__
    assert error.lineno == line_of(unread, "bad_one")
    assert error.function == "unread"
    assert error.code == "invalid_constraint"
    assert error.reason == "the pattern cannot be compiled"
    assert isinstance(error.__cause__, InvalidConstraint)
    assert str(error).startswith(f"{__file__}:{error.lineno}: gen('bad_one') failed: the pattern")
    eventually(lambda: server.open_branches == 0)


@rl.function
def spread(s):
    s += "a" + rl.gen("fine")
    s += (
        "b"
        + rl.gen("good")
        + rl.gen(
            "bad_one",
        )
    )
    s += "c" + rl.gen("after")
    return s["after"]  # the reading line


def test_a_read_raises_what_failed_before_it() -> None:
    with pytest.raises(rl.ProgramError) as caught:
        spread.run()
    assert caught.value.lineno in (
        line_of(spread, '"bad_one"') - 1,  # the line of the call, as Python counts it
        line_of(spread, '"bad_one"'),
    )
    frames = [entry.lineno + 1 for entry in caught.traceback if entry.name == "spread"]
    assert frames == [line_of(spread, "the reading line")]


def test_a_program_may_handle_a_failure() -> None:
    @rl.function
    def careful(s):
        s += "a"
        with s.copy() as attempt:
            attempt += rl.gen("bad_idea")
            try:
                attempt["bad_idea"]
            except rl.ProgramError as error:
                s += f"({error.code})"
        s += rl.gen("x")

    state = careful.run()
    assert state.text().startswith("a(invalid_constraint) w")


def test_a_failed_fork_that_was_joined_fails_the_reader_and_the_run() -> None:
    @rl.function
    def joined(s, read):
        s += "a"
        forks = s.fork(3)
        forks += lambda i: rl.gen("bad" if i == 1 else "good")
        forks.join()
        s += rl.gen("x")
        if read:
            return s["good"], s["bad"]
        return None

    for read in (False, True):
        with pytest.raises(rl.ProgramError, match=r"gen\('bad'\) failed"):
            joined.run(read)


@pytest.mark.parametrize("join", [True, False])
def test_who_handles_a_failed_fork_has_handled_the_others(join: bool) -> None:
    @rl.function
    def careful(s):
        s += "a"
        forks = s.fork(3)
        forks += lambda i: rl.gen("bad" if i else "good") + rl.gen("end")
        if join:
            forks.join()
        with pytest.raises(rl.ProgramError, match=r"gen\('bad'\) failed"):
            (s if join else forks).get_var("end")
        s += rl.gen("x")
        return s["x"]

    assert careful.run().ret_value


def test_a_failed_fork_breaks_those_who_quote_it_and_its_children() -> None:
    @rl.function
    def quoting(s):
        s += "a"
        with s.fork(2) as forks:
            forks += [rl.gen("bad"), "fine"]
            forks.join("concate_and_append")
        s += rl.gen("x")
        return s["x"]

    @rl.function
    def nested(s):
        s += "a"
        fork = s.fork(1)[0]
        fork += rl.gen("bad")
        child = fork.fork(1)[0]
        child += rl.gen("x")
        return child["x"]

    for program in (quoting, nested):
        with pytest.raises(rl.ProgramError) as caught:
            program.run()
        assert caught.value.what == "gen('bad')"
        assert caught.value.lineno == line_of(program, 'gen("bad")')


@pytest.mark.parametrize("how", ["stream", "batch"])
@pytest.mark.parametrize(
    "read",
    [
        lambda state: state["answer"],
        lambda state: state.text(),
        lambda state: state.messages(),
        lambda state: list(state.text_iter()),
        lambda state: list(state.text_iter("answer")),
    ],
)
def test_what_a_program_raised_is_told_instead_of_what_was_cancelled_for_it(
    server: FakeServer, how: str, read: Any
) -> None:
    @rl.function
    def program(s):
        s += "x" + rl.gen("answer")
        raise LookupError("no such file")

    server.hold()
    state = program.run(stream=True) if how == "stream" else program.run_batch([{}])[0]
    with pytest.raises(LookupError, match="no such file"):
        read(state)
    assert isinstance(state.error(), LookupError) and str(state) == repr(state)
    eventually(lambda: server.open_branches == 0)


def test_error_of_the_state() -> None:
    @rl.function
    def program(s):
        s += rl.gen("bad")
        assert isinstance(s.error(), rl.ProgramError)
        s["seen"] = True

    # Reading the error handles it: the run itself no longer fails.
    state = program.run()
    assert state["seen"] and isinstance(state.error(), rl.ProgramError)
    with pytest.raises(rl.ProgramError):
        state["bad"]
    with pytest.raises(rl.ProgramError):
        state.text()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: rl.gen("x", max_token=3), TypeError, "max_token"),
        (lambda: rl.gen_int("x", max_toknes=3), TypeError, "did you mean 'max_tokens'"),
        (lambda: rl.gen_int("x", regex="a"), TypeError, "regex"),
        (lambda: rl.gen("x", temperature=-1), InvalidRequest, "temperature"),
        (lambda: rl.gen("x", max_tokens="12"), InvalidRequest, "max_tokens"),
        (lambda: rl.gen("x", stop=[""]), InvalidRequest, "stop must not have an empty string"),
        (lambda: rl.gen("x", stop=[3]), InvalidRequest, "stop"),
        (lambda: rl.gen("x", n=0), InvalidRequest, "n must be"),
        (lambda: rl.gen("x", min_tokens=5, max_tokens=4), InvalidRequest, "min_tokens"),
        (lambda: rl.gen("x", regex="a", json_schema="{}"), TypeError, "several constraints"),
        (lambda: rl.gen("x", json_schema="{"), InvalidConstraint, "not JSON"),
        (lambda: rl.gen("x", dtype="integer"), InvalidConstraint, "integer"),
        (lambda: rl.gen(3), TypeError, "name must be a string"),
        (lambda: rl.gen("x", choices=[]), InvalidRequest, "choices must not be empty"),
        (lambda: rl.gen("x", choices=["a"], regex="b"), TypeError, r"several .*\(choices, regex\)"),
        (lambda: rl.gen("x", choices=["a"], temperature="b"), InvalidRequest, "temperature"),
        (lambda: rl.select("x"), TypeError, "choices"),
        (lambda: rl.select("x", "abc"), TypeError, "list of strings"),
        (lambda: rl.select("x", ["a", 1]), TypeError, r"choices\[1\]"),
        (lambda: rl.select("x", ["a", ""]), InvalidRequest, r"choices\[1\]"),
        (lambda: rl.select("x", ["a"], choices_method="best"), TypeError, "choices_method"),
        (lambda: f"{rl.gen('x')}", TypeError, "f-string"),
        (lambda: "a" + rl.gen("x") + 3, TypeError, "unsupported operand"),
        (lambda: rl.user(3), TypeError, "user"),
    ],
)
def test_wrong_calls_fail_at_their_line(call: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_wrong_arguments_of_a_run() -> None:
    with pytest.raises(TypeError, match=r"temprature.*did you mean 'temperature'"):
        unread.run(temprature=0)

    @rl.function
    def greet(s, who, count=1):
        s += who

    for wrong in ({"hwo": "x"}, {"who": "x", "cuont": 2}):
        meant = "who" if "hwo" in wrong else "count"
        with pytest.raises(TypeError, match=f"did you mean '{meant}'"):
            greet.run(**wrong)
        with pytest.raises(TypeError, match=rf"batch\[0\]: .*did you mean '{meant}'"):
            greet.run_batch([wrong])
    with pytest.raises(TypeError, match="too many positional arguments"):
        unread.run("x")
    with pytest.raises(TypeError, match="no parameter 'x'"):
        unread.bind(x=1)
    with pytest.raises(TypeError, match="first parameter"):
        rl.function(lambda: None)
    with pytest.raises(TypeError, match="tell: a class method is no program"):

        class Guide:
            @rl.function
            @classmethod
            def tell(cls, s):
                s += "Rome"

    bad = Unbound().tell
    for call in (lambda: bad.run("x"), lambda: bad.run(what="x"), lambda: bad.run_batch([("x",)])):
        with pytest.raises(TypeError, match="'s' is its object, 'what' its state; a @staticmethod"):
            call()
    assert Unbound.tell.arg_names == ["what"]
    with pytest.raises(TypeError, match="backend"):
        rl.function(lambda s, backend: None)
    with pytest.raises(TypeError, match="echo: a program has no `yield`"):

        @rl.function
        def echo(s):
            yield s["x"]

    with pytest.raises(TypeError, match="a backend is"):
        unread.run(backend=object())


@pytest.mark.parametrize("size", [2.5, "2", None])
def test_a_fork_has_a_whole_number_of_states(size: Any) -> None:
    program = rl.function(lambda s: s.fork(size))
    with pytest.raises(TypeError, match=r"fork\(\) needs a whole number"):
        program.run(backend=Scripted())


@pytest.mark.parametrize("value", [None, 3, {"a": 1}])
def test_only_strings_and_expressions_are_appended(value: Any) -> None:
    @rl.function
    def program(s):
        s += value

    with pytest.raises(TypeError, match="strings and expressions"):
        program.run()


def test_roles_are_checked_at_their_line() -> None:
    @rl.function
    def nested(s):
        with s.user():
            s += rl.system("x")

    @rl.function
    def unknown(s):
        s += RoleBegin("narrator")

    @rl.function
    def unopened(s):
        s += rl.assistant_end()

    for program, text in (
        (nested, "rl.system"),
        (unknown, "narrator"),
        (unopened, "rl.assistant_end"),
    ):
        with pytest.raises(rl.ProgramError) as caught:
            program.run()
        assert caught.value.lineno == line_of(program, text)


def test_appending_what_cannot_be_carried() -> None:
    @rl.function
    def program(s):
        s += "x" * (40 * 2**20)

    with pytest.raises(rl.ProgramError, match="at most"):
        program.run()


@pytest.mark.parametrize(
    "unsendable",
    [
        "half a character: \ud83d",
        rl.gen("x", stop="\ud83d"),
        rl.gen("\ud83d"),
        rl.select("x", ["a", "\ud83d"]),
        rl.gen("x", logit_bias={2**70: 1.0}),
    ],
)
def test_what_cannot_be_sent_concerns_nobody_else(server: FakeServer, unsendable: Any) -> None:
    @rl.function
    def program(s, expression):
        s += "It began well." + rl.gen("before")
        s += expression  # here
        s += rl.gen("after")

    states = program.run_batch([("fine",), (unsendable,), ("fine",)])
    assert [state.error() for state in states[::2]] == [None, None]
    error = states[1].error()
    assert isinstance(error, rl.ProgramError) and isinstance(error.__cause__, InvalidRequest)
    with pytest.raises(rl.ProgramError, match="cannot be sent"):
        states[1].text()
    eventually(lambda: server.open_branches == 0)


def test_an_object_of_no_known_type_fails_its_row(server: FakeServer) -> None:
    """msgspec raises a TypeError for such an object, after which a batch waited for ever."""
    (state,) = rl.function(lambda s: s.append("x")).run_batch([{}], adapter=object())
    with pytest.raises(rl.ProgramError, match="opening a branch failed: it cannot be sent"):
        state.text()


class Word(str):
    __slots__ = ()


class Colour(str, enum.Enum):  # noqa: UP042  # whose str() is not its text
    RED = "red"


def test_text_and_numbers_of_other_types_are_pythons(server: FakeServer) -> None:
    """NumPy's numbers, texts of HTML parsers and members of enums are such types."""
    number, real = type("Number", (int,), {}), type("Real", (float,), {})
    lists = {"stop": [Word("#")], "stop_token_ids": [number(3)]}

    @rl.function
    def program(s):
        s += Word("It is ") + rl.gen(
            Word("a"), stop=Word("."), max_tokens=number(9), seed=number(7)
        )
        s += rl.user(Word("Hello")) + rl.assistant(rl.gen("b", temperature=real(0.5), **lists))
        s += rl.select(Word("c"), [Word("good"), Word("bad")]) + rl.gen("d", regex=Word("ok"))
        s += Colour.RED

    (state,) = program.run_batch([{}], timeout=real(60))
    assert state.error() is None
    assert rl.State.from_json(state.to_json()).text() == state.text()
    assert state.text().endswith("red") and type(state["c"]) is str
    first = next(op for op in server.ops if isinstance(op, protocol.Generate))
    assert (first.params.stop, first.params.max_tokens, first.params.seed) == ((".",), 9, 7)


def test_what_cannot_be_sent_breaks_its_branch() -> None:
    @rl.function
    def stubborn(s):
        try:
            s += "half a character: \ud83d"
        except rl.ProgramError as error:
            s["error"] = error
        s += rl.gen("after")
        with pytest.raises(rl.ProgramError, match="appending text failed: it cannot be sent"):
            s["after"]

    state = stubborn.run()
    assert state["error"].lineno == line_of(stubborn, "half a character")
    assert isinstance(state.error(), rl.ProgramError)


def test_a_constant_prefix_that_cannot_be_sent(server: FakeServer) -> None:
    @rl.function
    def program(s, x):
        s += "half a character: \ud83d"
        s += x + rl.gen("x")

    for state in program.run_batch([("a",), ("b",)]):
        assert isinstance(state.error(), rl.ProgramError)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        program.cache()
    eventually(lambda: server.open_branches == 0)


def test_no_backend() -> None:
    rl.set_default_backend(None)
    with pytest.raises(InvalidRequest, match="no backend"):
        unread.run()
    assert rl.flush_cache() is False
    assert rl.get_server_info() is None


def test_nobody_at_the_address(tmp_path: Path) -> None:
    with pytest.raises(ServerUnavailable, match="nobody answers"):
        rl.RuntimeEndpoint(f"ipc://{tmp_path / 'nothing'}")
    with pytest.raises(ServerUnavailable):
        rl.RuntimeEndpoint("http://127.0.0.1:9")
    with pytest.raises(InvalidRequest, match="neither"):
        rl.RuntimeEndpoint("localhost:30000")


def test_wrong_api_key(tmp_path: Path) -> None:
    server = FakeServer(tmp_path, api_key="secret")
    try:
        with pytest.raises(Unauthorized, match="API key"):
            rl.RuntimeEndpoint(server.address, api_key="guess")
        rl.RuntimeEndpoint(server.address, api_key="secret").close()
    finally:
        server.stop()


class Unbound:
    @rl.function
    def tell(s, what):  # without self
        s += what


def test_a_server_that_goes_away_fails_what_waits(tmp_path: Path) -> None:
    server = FakeServer(tmp_path)
    endpoint = rl.RuntimeEndpoint(server.address)
    server.hold()

    @rl.function
    def program(s):
        s += "a" + rl.gen("x")
        eventually(lambda: bool(server.sent(protocol.Generate)))
        server.stop()
        return s["x"]

    with pytest.raises(rl.ProgramError, match="is gone") as caught:
        program.run(backend=endpoint)
    assert isinstance(caught.value.__cause__, ServerUnavailable)
    with pytest.raises(ServerUnavailable):
        program.run(backend=endpoint)
    again = FakeServer(tmp_path)  # a new server at the same address is found
    server = again
    again.script = lambda text, op: " back"

    @rl.function
    def simple(s):
        s += "a" + rl.gen("x")

    assert simple.run(backend=endpoint)["x"] == " back"
    endpoint.close()
    again.stop()


@pytest.mark.parametrize("read", [True, False])
def test_a_run_ends_at_its_timeout_while_its_server_is_away(tmp_path: Path, read: bool) -> None:
    server = FakeServer(tmp_path)
    server.kept = True
    endpoint = rl.RuntimeEndpoint(server.address, patience=60)
    server.hold()

    @rl.function
    def program(s):
        s += "a" + rl.gen("x") + "b"
        eventually(lambda: bool(server.sent(protocol.Generate)))
        server.stop()
        s.branch.run.budget._deadline = 0.0  # set late: a busy machine may be slow until here
        return s["x"] if read else None

    with pytest.raises(rl.ProgramError, match=r"gen.*within its timeout of 3600 s"):
        program.run(backend=endpoint, timeout=3600)
    assert endpoint.connect().lost is None
    endpoint.close()


@pytest.mark.parametrize("connects", [True, False])
def test_a_run_ends_at_its_timeout_while_its_server_is_silent(
    tmp_path: Path, connects: bool
) -> None:
    server = FakeServer(tmp_path)
    server.kept = True
    endpoint = rl.RuntimeEndpoint(server.address, ping_interval=3600, timeout=3600)
    server.hold()

    @rl.function
    def program(s):
        s += "a" + rl.gen("x")
        eventually(lambda: bool(server.sent(protocol.Generate)))
        server.silent = True
        if not connects:  # and its machine lets no new connection through
            connection = endpoint.connect()
            call_in_loop(connection._loop, lambda: connection._break(ServerUnavailable("cut")))
            eventually(lambda: len(server.sent(protocol.Hello)) == 2)
        s.branch.run.budget._deadline = 0.0
        return s["x"]

    with pytest.raises(rl.ProgramError, match="within its timeout of 3600 s"):
        program.run(backend=endpoint, timeout=3600)
    endpoint.close()
    server.stop()


def test_a_silent_server_is_noticed(tmp_path: Path) -> None:
    server = FakeServer(tmp_path)
    endpoint = rl.RuntimeEndpoint(server.address, ping_interval=0.02, timeout=3600)
    server.hold()

    @rl.function
    def program(s):
        s += "a" + rl.gen("x")
        eventually(lambda: bool(server.sent(protocol.Generate)))
        server.silent = True
        # Set late: until here answers may be slow on a busy machine.
        endpoint.connect()._timeout = 0.1
        return s["x"]

    with pytest.raises(rl.ProgramError, match="has not answered"):
        program.run(backend=endpoint)
    endpoint.close()
    server.stop()


def test_a_pause_of_the_program_as_it_connects_is_not_one_of_the_server(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = Connection._connect

    def paused(connection: Connection, timeout: float) -> None:
        """The first wait ends late; the answer has come but is not read yet."""
        wait, late = connection._started.wait, iter([False])
        connection._started.wait = lambda seconds=None: next(late, True) and wait(seconds)  # type: ignore[method-assign]
        connect(connection, timeout)

    monkeypatch.setattr(Connection, "_connect", paused)
    endpoint = rl.RuntimeEndpoint(server.address)
    assert endpoint.get_model_name() == "fake"
    endpoint.close()


def test_context_length_names_the_append(server: FakeServer) -> None:
    def too_long(text: str, op: protocol.Generate) -> str:
        raise ContextLengthExceeded("5000 tokens; the model takes 4096")

    server.script = too_long
    with pytest.raises(rl.ProgramError) as caught:
        unread.run()
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.lineno == line_of(unread, '"fine"')


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ("hello", "texts is a single text"),
        ([5], r"texts\[0\] is neither a text nor a list of token ids: 5"),
        (["a", ["b"]], r"texts\[1\]"),
        (["a", [1], b"ab"], r"texts\[2\]"),
    ],
)
def test_what_cannot_be_embedded(server: FakeServer, backend, texts, words) -> None:
    with pytest.raises(InvalidRequest, match=words):
        backend.embed(texts)
    assert not server.sent(protocol.Embed)


def test_a_space_before_free_text_is_told_with_its_line() -> None:
    @rl.function
    def ends_with_a_space(s: rl.ProgramState) -> None:
        with s.fork(1) as forks:
            forks[0] += rl.gen("fine", regex="a|b")
        s += "\nName: " + rl.select("choice", ["a", "b"])
        s += "\nName:" + rl.gen("fine")
        s += "\nName: "
        s += rl.gen("here")

    with pytest.warns(UserWarning, match=r"gen\('here'\): the text before it ends with") as seen:
        ends_with_a_space.run()
    assert [(one.filename, one.lineno) for one in seen] == [
        (__file__, line_of(ends_with_a_space, '"here"'))
    ]
