"""`rootlace run`, against a served tiny model."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

import rootlace as rl
from rootlace.cli import run as command
from rootlace.cli.app import app
from rootlace.cli.run import parse_arguments
from rootlace.wire import protocol
from tests.cli.conftest import Serve
from tests.frontend.fake_server import FakeServer
from tests.waiting import eventually

PROGRAMS = """
import rootlace as rl
import helper

@rl.function
def greet(s, who, times=1, shout=False):
    s += f"{helper.WORD} {who!r} {times!r} {shout!r}: "
    s += rl.gen("reply", max_tokens=5, temperature=0, regex="[a-z]{3}")
    s["fixed"] = "[bold]x[/bold]"
    return times

@rl.function
def broken(s):
    s += "x"
    s += rl.gen("a", max_tokens=4, regex="(")

@rl.function
def raises(s):
    s += "before"
    raise ValueError("no such luck")

@rl.function
async def slow(s):
    s += "async "
    s += rl.gen("x", max_tokens=3, temperature=0, regex="ok")
    await s["x"]

not_a_program = 3
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("WORD = 'hello'\n")
    path = tmp_path / "programs.py"
    path.write_text(PROGRAMS)
    return path


def _run(served: Serve, target: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", target, "--url", served.url, *arguments])


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_a_program(served: Serve, programs: Path, stream: str) -> None:
    arguments = ["--arg", "who=Ann=B", "--arg", "times=2", "--arg", "shout=true", stream]
    result = _run(served, f"{programs}:greet", *arguments)
    assert result.exit_code == 0, result.output
    text, table = result.output.split("\n", 1)
    found = re.fullmatch(r"hello 'Ann=B' 2 True: ([a-z]{3})", text)
    assert found
    assert re.search(rf"reply +{found[1]} +\d+ +\d+ +\d+", table)
    assert "[bold]x[/bold]" in table  # shown, not interpreted
    assert re.search(r"return +2", table)


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_traces_of_what_ends_well_and_badly(served: Serve, programs: Path, stream: str) -> None:
    out = programs.with_name("out.json")
    result = _run(served, f"{programs}:slow", "--trace", str(out), stream)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("async ok\n")
    (span,) = msgspec.json.decode(out.read_bytes(), type=rl.Timeline).spans
    assert (span.name, span.state, span.clock, span.text) == ("x", "done", "server", "ok")
    assert 0 < span.forced_tokens <= span.completion_tokens == 2
    assert (
        sum(stretch.tokens for stretch in span.stretches if stretch.kind == "forced")
        == span.forced_tokens
    )
    assert span.first is not None and span.start <= span.first <= span.end
    page = programs.with_name("out.html")
    assert _run(served, f"{programs}:broken", "--trace", str(page), stream).exit_code == 1
    assert '"state":"failed"' in page.read_text()
    missing = _run(served, f"{programs}:slow", "--trace", "/no/such/out.html")
    assert missing.exit_code == 1 and "no such folder" in missing.stderr


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_errors_name_the_line(served: Serve, programs: Path, stream: str) -> None:
    result = _run(served, f"{programs}:broken", stream)
    line = PROGRAMS.splitlines().index('    s += rl.gen("a", max_tokens=4, regex="(")') + 1
    assert result.exit_code == 1
    assert f"error: {programs}:{line}: " in result.stderr and "regex" in result.stderr
    result = _run(served, f"{programs}:raises", stream)
    line = PROGRAMS.splitlines().index('    raise ValueError("no such luck")') + 1
    assert result.exit_code == 1
    assert f"{programs}:{line}: ValueError: no such luck" in result.stderr


@pytest.mark.parametrize(
    "target, message",
    [
        ("{}", "write it as FILE.py:function"),
        ("{}:nothing", "has no 'nothing'; its programs are: greet, broken, raises, slow"),
        ("{}:not_a_program", "is not a program"),
        ("/no/such/file.py:f", "there is no file"),
        ("{}:greet", "missing a required argument: 'who'"),
    ],
)
def test_wrong_targets(served: Serve, programs: Path, target: str, message: str) -> None:
    result = _run(served, target.format(programs))
    assert result.exit_code == 1 and message in result.stderr, result.output


@pytest.mark.parametrize(
    "arg, message",
    [("hwo=x", "'hwo'; did you mean 'who'?"), ("temprature=0", "did you mean 'temperature'?")],
)
def test_wrong_names_are_told_before_a_runtime_starts(
    programs: Path, arg: str, message: str
) -> None:
    at = ["--url", "http://127.0.0.1:9", "--arg", arg]
    result = CliRunner().invoke(app, ["run", f"{programs}:greet", *at])
    assert result.exit_code == 1 and message in result.stderr, result.output


def test_a_file_that_cannot_be_imported(served: Serve, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("import rootlace\n\n1 / 0\n")
    assert f"{path}:3: ZeroDivisionError" in _run(served, f"{path}:f").stderr
    path.write_text("def f(:\n")
    assert f"{path}:1: " in _run(served, f"{path}:f").stderr


def test_nobody_answers(programs: Path) -> None:
    result = CliRunner().invoke(app, ["run", f"{programs}:slow", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1 and "there is no server at" in result.stderr


@pytest.mark.slow
def test_a_runtime_of_its_own(programs: Path, tiny_model: Path) -> None:
    result = CliRunner().invoke(app, ["run", f"{programs}:slow", "--model", str(tiny_model)])
    assert result.exit_code == 0, result.output
    text, table = result.output.split("\n", 1)
    assert text == "async ok"
    assert re.search(r"x +ok +\d+ +\d+ +\d+", table)  # though nothing is returned


class _Interrupted(io.StringIO):
    """An output at whose first writing somebody presses Ctrl-C."""

    pressed = False

    def write(self, text: str) -> int:
        if not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_while_it_writes_cancels_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @rl.function
    def program(s):
        s += "before"
        s += rl.gen("x")

    server = FakeServer(tmp_path)
    try:
        server.hold()
        backend = rl.RuntimeEndpoint(server.address)
        monkeypatch.setattr("sys.stdout", _Interrupted())
        with pytest.raises(KeyboardInterrupt):
            command._run(program, {}, backend, stream=True)
        eventually(lambda: server.sent(protocol.Cancel))
        backend.close()
    finally:
        server.stop()


def test_ctrl_c_stays_ctrl_c_wherever_it_comes() -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    starting: Any = SimpleNamespace(run=interrupted)
    foreign = SimpleNamespace(text_iter=interrupted, branch=object())
    waiting: Any = SimpleNamespace(run=lambda **_: foreign)
    for program in (starting, waiting):
        with pytest.raises(KeyboardInterrupt):
            command._run(program, {}, None, stream=True)


def test_a_model_of_a_server(served: Serve, programs: Path) -> None:
    program = f"{programs}:greet"
    with rl.RuntimeEndpoint(served.url) as endpoint:
        name = endpoint.get_model_name()
    assert _run(served, program, "--arg", "who=Ann", "--model", name).exit_code == 0
    result = _run(served, program, "--arg", "who=Ann", "--model", "nobody")
    assert (
        result.exit_code == 1
        and f"'nobody' does not exist; this server has '{name}'" in result.stderr
    )


def test_arguments() -> None:
    given = ["a=1", "b=x", 'c="1"', "d=[1,2]", "e=", "f=null", "g=k=v", "h=012", "i=12", "j=null"]
    annotations = {"a": int, "c": str, "h": str, "i": "str | None", "j": str | None}
    assert parse_arguments(given, annotations) == {
        "a": 1,
        "b": "x",
        "c": "1",
        "d": [1, 2],
        "e": "",
        "f": None,
        "g": "k=v",
        "h": "012",
        "i": "12",
        "j": None,
    }


@pytest.mark.parametrize("given", [["a"], ["=1"], ["a b=1"], ["a=1", "a=2"]])
def test_wrong_arguments(served: Serve, programs: Path, given: list[str]) -> None:
    options = [word for item in given for word in ("--arg", item)]
    result = _run(served, f"{programs}:greet", *options)
    assert result.exit_code == 1 and "--arg" in result.stderr
