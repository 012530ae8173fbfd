"""`rootlace run`: a program from a file, with its text as it comes and its variables at the end."""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rootlace.cli.common import INTERRUPTED, KeyOption, ModelOption, UrlOption, connected, fail

if TYPE_CHECKING:
    from rootlace.language.state import ProgramState
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
    _check_arguments(program, arguments)
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


def _check_arguments(program: Function, arguments: dict[str, Any]) -> None:
    """Check before a runtime is started. Other names may be sampling defaults."""
    try:
        program.body((), {k: v for k, v in arguments.items() if k in program.arg_names})
    except TypeError as error:
        fail(str(error))


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
