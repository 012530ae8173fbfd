"""`rootlace run` and `rootlace chat`.

A program from a file, with its text as it comes and its variables at the end; a conversation in the
terminal, over one growing branch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rootlace.cli.common import INTERRUPTED, KeyOption, ModelOption, UrlOption, connected, fail
from rootlace.wire.errors import RootlaceError

if TYPE_CHECKING:
    from rootlace.language.state import ProgramState
    from rootlace.program.branch import Branch
    from rootlace.program.function import Function
    from rootlace.timeline import Timeline


def run(
    target: Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="The program.")],
    arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="An argument of the program, or a sampling default such as temperature=0. "
            "The value is JSON, or else a string. May be repeated.",
        ),
    ] = None,
    model: ModelOption = None,
    url: UrlOption = None,
    api_key: KeyOption = "",
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Show the text while it is generated.")
    ] = True,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.html",
            help="Write a page that shows the run's branches over time; OUT.json: its data.",
        ),
    ] = None,
) -> None:
    """Run an @rl.function from a Python file."""
    arguments = parse_arguments(arg or [])
    program = load_program(target)
    # Check before a runtime is started. Other names may be sampling defaults.
    try:
        program.body((), {k: v for k, v in arguments.items() if k in program.arg_names})
    except TypeError as error:
        fail(str(error))
    if trace is not None and not trace.resolve().parent.is_dir():
        fail(f"--trace {trace}: there is no such folder")
    with connected(model, url, api_key) as backend:
        try:
            _show_variables(_run(program, arguments, backend, stream, trace))
        except KeyboardInterrupt:
            typer.echo("\ninterrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except typer.Exit:
            raise
        except Exception as error:
            fail(describe(error, Path(program.func.__code__.co_filename)))


def parse_arguments(given: list[str]) -> dict[str, Any]:
    """`name=value` pairs; a value is JSON where it parses as JSON, and else a string."""
    arguments: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            fail(f"--arg {item}: write it as name=value")
        if name in arguments:
            fail(f"--arg {name} is given twice")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def load_program(target: str) -> Function:
    """The program that "FILE.py:function" names; ends the command where there is none."""
    from rootlace.program.function import Function

    file, colon, name = target.rpartition(":")
    if not colon or not file or not name:
        fail(f"{target!r}: write it as FILE.py:function")
    path = Path(file)
    if not path.is_file():
        fail(f"there is no file {file}")
    module = _import_file(path)
    found = getattr(module, name, None)
    programs = [key for key, value in vars(module).items() if isinstance(value, Function)]
    known = f"; its programs are: {', '.join(programs)}" if programs else "; it has no programs"
    if found is None:
        fail(f"{file} has no {name!r}{known}")
    if not isinstance(found, Function):
        fail(f"{name!r} in {file} is not a program (@rootlace.function){known}")
    return found


def _import_file(path: Path) -> Any:
    """Execute a file as a module, with its own folder importable as for `python FILE.py`."""
    resolved = path.resolve()
    name = resolved.stem if resolved.stem.isidentifier() else "program"
    if name in sys.modules:
        name = f"rootlace_program_{name}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        fail(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(resolved.parent))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        fail(f"{error.filename}:{error.lineno}: {error.msg}")
    except Exception as error:
        fail(describe(error, resolved))
    return module


def describe(error: BaseException, file: Path) -> str:
    """An exception as "file:line: reason", the line being the innermost one of `file`.

    An operation that failed on the server carries the line of its own `gen` already.
    """
    from rootlace.language.failures import ProgramError

    if isinstance(error, ProgramError):
        return str(error)
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename) == file or Path(frame.filename) == file.resolve():
            return f"{frame.filename}:{frame.lineno}: {reason}"
    return reason


def _run(
    program: Function,
    arguments: dict[str, Any],
    backend: Any,
    stream: bool,
    trace: Path | None = None,
) -> ProgramState:
    """Run to the end, writing the text, and the trace however it ends. Ctrl-C cancels the
    program."""
    from rootlace.program.branch import Branch

    if not stream and trace is None:
        ended = program.run(**arguments, backend=backend)
        typer.echo(ended.text())
        return ended
    state: ProgramState | None = None
    try:
        # A state that is there from the beginning is there for the trace of what fails, too.
        state = program.run(**arguments, backend=backend, stream=True)
        texts = state.text_iter()
        for text in texts if stream else ["".join(texts)]:
            sys.stdout.write(text)
            sys.stdout.flush()
        return state
    except KeyboardInterrupt:  # while it waits for text, or writes it
        if state is not None and isinstance(state.branch, Branch):
            state.branch.run.cancel()
        raise
    finally:
        if state is not None:
            typer.echo()
            if trace is not None:
                _write(state.trace(), trace)


def _write(timeline: Timeline, path: Path) -> None:
    try:
        if path.suffix == ".json":
            path.write_text(timeline.to_json(), encoding="utf-8")
        else:
            timeline.save(path)
    except OSError as error:
        fail(f"--trace {path}: {error.strerror}")


def _show_variables(state: ProgramState) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    names = list(state.branch.variables)
    if not names and state.ret_value is None:
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("variable", "value", "prompt", "cached", "generated"):
        table.add_column(title, justify="left" if title in ("variable", "value") else "right")
    for name in names:
        counts = _counts(state.get_meta_info(name))
        # Text, not markup: a model may well say [bold].
        table.add_row(Text(name), Text(_shown(state.text(name))), *counts)
    if state.ret_value is not None:
        table.add_row(Text("return", style="italic"), Text(_shown(state.ret_value)), "", "", "")
    Console().print(table)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _counts(meta: Any) -> tuple[str, str, str]:
    """Prompt, cached and generated tokens, summed where a variable has several."""
    metas = [m for m in (meta if isinstance(meta, list) else [meta]) if isinstance(m, dict)]
    if not metas:
        return "", "", ""
    totals = (
        sum(int(m.get(key) or 0) for m in metas)
        for key in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    prompt, cached, generated = (str(total) for total in totals)
    return prompt, cached, generated


CHAT_HELP = "/stats tokens per turn · /reset start anew · /quit (or Ctrl-D) · Ctrl-C stops a reply"


def chat(
    model: ModelOption = None,
    url: UrlOption = None,
    api_key: KeyOption = "",
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 is greedy.", show_default="the model's, else 0.7"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply.")] = 512,
) -> None:
    """Chat with a model. Every turn reuses the cache of those before, to the last token."""
    with connected(model, url, api_key) as backend:
        conversation = Conversation(backend, system, temperature, max_tokens)
        try:
            _talk(conversation)
        except RootlaceError as error:
            fail(str(error))
        finally:
            conversation.close()


@dataclass(frozen=True)
class Turn:
    """Tokens of one turn."""

    prompt: int
    cached: int
    reply: int

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt} tokens: {self.cached} cached, "
            f"{self.prompt - self.cached} computed; reply {self.reply}"
        )


class Conversation:
    """A conversation as a branch of one program.

    A turn runs on a fork that replaces the branch once it is complete. Its tokens, generated ones
    included, stay what they are; a turn that fails or is interrupted leaves no trace.
    """

    def __init__(
        self, backend: Any, system: str, temperature: float | None, max_tokens: int
    ) -> None:
        from rootlace.client.endpoint import endpoint_of
        from rootlace.program.run import ProgramRun

        self.turns: list[Turn] = []
        self._system = system
        endpoint = endpoint_of(backend)
        defaults: dict[str, Any] = {"max_tokens": max_tokens}
        if temperature is not None or "temperature" not in endpoint.model_info.sampling:
            defaults["temperature"] = 0.7 if temperature is None else temperature
        self._run = ProgramRun(endpoint, defaults, stream=True)
        self._branch = self._begin()

    def reset(self) -> None:
        self.turns.clear()
        self._branch.remote.close("the conversation was reset")
        self._branch = self._begin()

    def ask(self, message: str) -> Any:
        """Yield the reply as it comes. Raises the typed error of what fails."""
        from rootlace import ProgramState, assistant, gen, user

        (turn,) = self._branch.fork(1)
        state = ProgramState(turn)
        done = False
        try:
            state += user(message)
            state += assistant(gen("reply"))
            yield from state.text_iter("reply")
            meta = state.get_meta_info("reply")
            done = True
        finally:
            if not done:
                turn.remote.cancel()
                turn.remote.close("this turn was interrupted")
        self._branch.remote.close("the conversation went on")
        self._branch = turn
        self.turns.append(
            Turn(meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"])
        )

    def close(self) -> None:
        with contextlib.suppress(RootlaceError):
            self._run.cancel()
            self._run.finish()
        self._run.conclude(None)

    def _begin(self) -> Branch:
        from rootlace import system
        from rootlace.program.branch import Branch

        branch = Branch(self._run)
        if self._system:
            branch.append(system(self._system))
        return branch


def _talk(conversation: Conversation) -> None:
    # Importing it gives `input` line editing and a history.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    interactive = sys.stdin.isatty()
    if interactive:
        typer.secho(CHAT_HELP, dim=True)
    while (message := _read_message(interactive)) is not None:
        command = message.strip()
        if command in ("/quit", "/exit"):
            return
        if command == "/reset":
            conversation.reset()
            typer.secho("the conversation starts anew", dim=True)
        elif command == "/stats":
            _show_stats(conversation)
        elif command in ("/help", "/?"):
            typer.secho(CHAT_HELP, dim=True)
        elif command:
            _reply(conversation, message)


def _read_message(interactive: bool) -> str | None:
    """The next line; None at the end of the input."""
    while True:
        try:
            return input("you> " if interactive else "")
        except EOFError:
            if interactive:
                typer.echo()
            return None
        except KeyboardInterrupt:
            typer.secho("\n(/quit or Ctrl-D ends the chat)", dim=True)


def _reply(conversation: Conversation, message: str) -> None:
    try:
        with contextlib.closing(conversation.ask(message)) as reply:
            for text in reply:
                sys.stdout.write(text)
                sys.stdout.flush()
        typer.echo()
        typer.secho(f"[{conversation.turns[-1]}]", dim=True)
    except KeyboardInterrupt:
        typer.secho("\n[interrupted; this turn is forgotten]", dim=True)
    except RootlaceError as error:
        typer.echo()
        typer.secho(f"[{error}]", fg=typer.colors.RED)


def _show_stats(conversation: Conversation) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("turn", "prompt", "cached", "computed", "reply"):
        table.add_column(title, justify="right")
    for number, turn in enumerate(conversation.turns, 1):
        counts = (number, turn.prompt, turn.cached, turn.prompt - turn.cached, turn.reply)
        table.add_row(*map(str, counts))
    Console().print(table)
