"""Commands `rootlace run`, `rootlace chat` and `rootlace eval`.

Run a program from a file, with its streamed text and its variables at the end. Chat in the
terminal, over one growing branch. Evaluate tasks, with progress, a table and a page.

Sections: run, chat, eval.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rootlace.cli.common import INTERRUPTED, connected, fail
from rootlace.cli.options import PATH, POSITIVE, FloatRange, IntRange, backend_options
from rootlace.wire.errors import RootlaceError

if TYPE_CHECKING:
    from rootlace.evaluation.run import Record, Results, Told
    from rootlace.evaluation.task import Task
    from rootlace.language.state import ProgramState
    from rootlace.program.branch import Branch
    from rootlace.program.function import Function
    from rootlace.timeline import Timeline


# Run ----------------------------------------------------------------------------------------------


_STRINGS = (str, "str", str | None, "str | None")


@click.command()
@click.argument("target", metavar="FILE.py:FUNCTION", help="The program.")
@click.option(
    "--arg",
    metavar="NAME=VALUE",
    multiple=True,
    help="An argument of the program, or a sampling default such as temperature=0. The value is "
    "JSON, or else a string. For a parameter annotated as str it is a string. May be repeated.",
)
@backend_options
@click.option("--stream/--no-stream", default=True, help="Show the text while it is generated.")
@click.option(
    "--trace",
    type=PATH,
    metavar="OUT.html",
    help="Write a page that shows the run's branches over time; OUT.json: its data.",
)
def run(
    target: str, arg: tuple[str, ...], stream: bool, trace: Path | None, **backend_at: Any
) -> None:
    """Run an @rl.function from a Python file."""
    program = load_program(target)
    arguments = parse_arguments(arg, getattr(program.func, "__annotations__", {}))
    # Check before a runtime is started. Other names may be sampling defaults.
    options: Mapping[str, Any] = arguments
    for keyword in ("adapter", "token_budget"):
        _, options = program.take(keyword, options)
    try:
        values, _ = program.split(options)
        program.body((), values)
    except (TypeError, RootlaceError) as error:
        fail(str(error))
    if trace is not None and not trace.resolve().parent.is_dir():
        fail(f"--trace {trace}: there is no such folder")
    with connected(**backend_at) as backend:
        try:
            _show_variables(_run(program, arguments, backend, stream, trace))
        except KeyboardInterrupt:
            click.echo("\ninterrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        except click.exceptions.Exit:
            raise
        except Exception as error:
            fail(describe(error, Path(inspect.getfile(sys.modules[program.__module__]))))


def parse_arguments(items: Iterable[str], annotations: Mapping[str, Any]) -> dict[str, Any]:
    """Parse `name=value` pairs; a value is JSON if it parses, otherwise a string. For a parameter
    that `annotations` call a string, `12345` is a string, too."""
    arguments: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            fail(f"--arg {item}: write it as name=value")
        if name in arguments:
            fail(f"--arg {name} is given twice")
        try:
            found = json.loads(value)
        except ValueError:
            found = value
        if found is not None and not isinstance(found, str) and annotations.get(name) in _STRINGS:
            found = value
        arguments[name] = found
    return arguments


def load_program(target: str) -> Function:
    """Return the program named "FILE.py:function"; end the command if there is none."""
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
    """Format an exception as "file:line: reason", with the innermost line of `file`. An operation
    that failed on the server already names its own line."""
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
    """Run to the end, write the text, and always the trace. Ctrl-C cancels the program."""
    if not stream and trace is None:
        ended = program.run(**arguments, backend=backend)
        click.echo(ended.text())
        return ended
    state: ProgramState | None = None
    try:
        # A state that is there from the beginning is there for the trace of what fails, too.
        state = program.run(**arguments, backend=backend, stream=True)
        with contextlib.closing(state.text_iter()) as texts:
            for text in texts if stream else ["".join(texts)]:
                sys.stdout.write(text)
                sys.stdout.flush()
        return state
    finally:
        if state is not None:
            click.echo()
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
    """Return prompt, cached and generated tokens, summed for a list."""
    metas = [m for m in (meta if isinstance(meta, list) else [meta]) if isinstance(m, dict)]
    if not metas:
        return "", "", ""
    totals = (
        sum(int(m.get(key) or 0) for m in metas)
        for key in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    prompt, cached, generated = (str(total) for total in totals)
    return prompt, cached, generated


# Chat ---------------------------------------------------------------------------------------------


CHAT_HELP = "/stats tokens per turn · /reset start anew · /quit (or Ctrl-D) · Ctrl-C stops a reply"


@click.command()
@backend_options
@click.option("--system", help="A system message to begin with.")
@click.option(
    "--temperature", type=FloatRange(0), show_default="the model's, else 0.7", help="0 is greedy."
)
@click.option("--max-tokens", type=POSITIVE, default=512, help="Longest reply.")
def chat(system: str | None, temperature: float | None, max_tokens: int, **backend_at: Any) -> None:
    """Chat with a model. Every turn reuses the cache of earlier turns, to the last token."""
    with connected(**backend_at) as backend:
        conversation = Conversation(backend, system, temperature, max_tokens)
        try:
            _talk(conversation)
        finally:
            conversation.close()


@dataclass(frozen=True)
class Turn:
    """Token counts of one turn."""

    prompt: int
    cached: int
    reply: int

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt} tokens: {self.cached} cached, "
            f"{self.prompt - self.cached} computed; reply {self.reply}"
        )


class Conversation:
    """Conversation as a branch of one program.

    A turn runs on a fork that replaces the branch once complete. Its tokens, generated ones
    included, stay unchanged; a failed or interrupted turn leaves no trace.
    """

    def __init__(
        self, backend: Any, system: str | None, temperature: float | None, max_tokens: int
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
        """Yield the reply while it is generated. Raises the typed error of a failure."""
        from rootlace import ProgramState, assistant, gen, user

        (turn,) = self._branch.fork(1)
        state = ProgramState(turn)
        done = False
        try:
            state += user(message)
            state += assistant(gen("reply"))
            for text, _ in turn.steps("reply", with_meta=False):
                if text:
                    yield text
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
        click.secho(CHAT_HELP, dim=True)
    while (message := _read_message(interactive)) is not None:
        command = message.strip()
        if command in ("/quit", "/exit"):
            return
        if command == "/reset":
            conversation.reset()
            click.secho("the conversation starts anew", dim=True)
        elif command == "/stats":
            _show_stats(conversation)
        elif command in ("/help", "/?"):
            click.secho(CHAT_HELP, dim=True)
        elif command:
            _reply(conversation, message)


def _read_message(interactive: bool) -> str | None:
    """Return the next line; None at the end of the input."""
    while True:
        try:
            return input("you> " if interactive else "")
        except EOFError:
            if interactive:
                click.echo()
            return None
        except KeyboardInterrupt:
            click.secho("\n(/quit or Ctrl-D ends the chat)", dim=True)


def _reply(conversation: Conversation, message: str) -> None:
    try:
        with contextlib.closing(conversation.ask(message)) as reply:
            for text in reply:
                sys.stdout.write(text)
                sys.stdout.flush()
        click.echo()
        click.secho(f"[{conversation.turns[-1]}]", dim=True)
    except KeyboardInterrupt:
        click.secho("\n[interrupted; this turn is forgotten]", dim=True)
    except RootlaceError as error:
        click.echo()
        click.secho(f"[{error}]", fg="red")


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


# Eval ---------------------------------------------------------------------------------------------


@click.command("eval")
@click.argument(
    "tasks",
    metavar="TASK...",
    nargs=-1,
    required=True,
    help="TASK.yaml; a ready task (gsm8k, mmlu, hellaswag, arc, boolq, piqa, winogrande, "
    "prepared), with --data; or the folder of a run that has ended, which is only shown.",
)
@backend_options
@click.option("--judge-url", show_default="the same model", help="The server that judges.")
@click.option("--data", multiple=True, help="JSON lines to ask, instead of the task's. Repeatable.")
@click.option("--shots", type=IntRange(0), help="Examples before each question.")
@click.option("--shots-data", multiple=True, help="JSON lines that examples are from. Repeatable.")
@click.option("--seed", type=int, help="Draws the examples; without one they are the first.")
@click.option("--limit", type=POSITIVE, help="Ask only so many rows.")
@click.option("--concurrency", type=POSITIVE, help="At most so many rows at a time.")
@click.option(
    "--output",
    type=PATH,
    default="evaluations",
    help="Rows, results and page go to a folder there, by task and model.",
)
@click.option("--compare", type=PATH, help="The folder of a run to compare with, row by row.")
def evaluate(
    tasks: tuple[str, ...],
    judge_url: str | None,
    data: tuple[str, ...],
    shots: int | None,
    shots_data: tuple[str, ...],
    seed: int | None,
    limit: int | None,
    concurrency: int | None,
    output: Path,
    compare: Path | None,
    **backend_at: Any,
) -> None:
    """Measure a model on tasks: accuracies with intervals, single rows, and costs. An interrupted
    run continues when run again."""
    changes = {
        "data": list(data) or None,
        "shots.count": shots,
        "shots.data": list(shots_data) or None,
        "shots.seed": seed,
        "limit": limit,
    }
    changed = {name: value for name, value in changes.items() if value is not None}
    from rootlace.evaluation.run import read_results

    try:
        other = None if compare is None else read_results(compare)
        planned = [(name, _task(name, changed)) for name in tasks]
        ended = [(Path(name), read_results(Path(name))) for name, task in planned if task is None]
        valid = [task for _, task in planned if task is not None]
        if valid:
            with ExitStack() as stack:
                backend = stack.enter_context(connected(**backend_at))
                judge = backend
                if judge_url is not None:
                    key = backend_at["api_key"]
                    judge = stack.enter_context(connected(None, judge_url, key))
                ended += [_run_task(task, backend, judge, output, concurrency) for task in valid]
        _report(ended, other, compare)
    except KeyboardInterrupt:
        click.echo("\ninterrupted; the same command goes on where it was", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    if any(run.failures for _, run in ended):
        raise click.exceptions.Exit(1)


def _task(name: str, changes: dict[str, Any]) -> Task | None:
    """Return the task `name`; None for the folder of a run."""
    from rootlace.evaluation.run import ABOUT
    from rootlace.evaluation.task import FORMATS, read_task, ready_task

    if (Path(name) / ABOUT).is_file():
        return None
    if name in FORMATS and not Path(name).is_file():
        if "data" not in changes:
            fail(f"{name} is a ready task: give its rows with --data")
        return ready_task(name, changes)
    if not Path(name).exists():
        ready = [one for one in FORMATS if one != "questions"]
        near = get_close_matches(Path(name).stem.lower(), ready, n=1)
        meant = f"; did you mean {near[0]}?" if near else f" ({', '.join(ready)})"
        fail(f"{name} is neither a file nor a ready task{meant}")
    return read_task(name, changes)


def _run_task(
    task: Task, backend: Any, judge: Any, output: Path, concurrency: int | None
) -> tuple[Path, Results]:
    from rootlace.client.endpoint import endpoint_of
    from rootlace.evaluation.run import evaluate as run_task

    model = re.sub(r"[^\w.-]+", "-", endpoint_of(backend).get_model_name())
    folder = output / re.sub(r"[^\w.-]+", "-", task.name) / model
    with _progress(task.name) as told:
        width = concurrency or "auto"
        return folder, run_task(task, backend, folder, judge=judge, concurrency=width, told=told)


@contextmanager
def _progress(name: str) -> Iterator[Told]:
    """Show a progress bar with the accuracy and the hit rate so far."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    named, now_so = (
        TextColumn(f"{{task.{text}}}", markup=False) for text in ("description", "fields[now]")
    )
    columns = (named, BarColumn(), MofNCompleteColumn(), now_so, TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task(name, total=None, now="")
        sums: Counter[str] = Counter()
        rows: Counter[str] = Counter()
        prompt = cached = 0

        def told(record: Record | None, total: int) -> None:
            nonlocal prompt, cached
            if record is not None:
                sums.update(record.scores)
                rows.update(record.scores.keys())
                prompt += record.prompt_tokens
                cached += record.cached_tokens
            now = [f"{metric} {sums[metric] / count:.3f}" for metric, count in rows.items()]
            now.append(f"{cached / max(prompt, 1):.0%} cached")
            progress.update(bar, total=total, advance=1, now=", ".join(now))

        yield told


def _report(
    ended: list[tuple[Path, Results]], other: Results | None, other_folder: Path | None
) -> None:
    from rich.console import Console

    from rootlace.evaluation.report import compare, comparison_table, page, table

    console = Console(highlight=False)
    console.print(table([run for _, run in ended]))
    for folder, run in ended:
        found = [] if other is None else compare(run, other)
        if other is not None:
            names = (f"{run.model}, {folder}", f"{other.model}, {other_folder}")
            console.print(comparison_table(*names, found))
        path = folder / "report.html"
        path.write_text(page(run, other, found), "utf-8")
        console.print(f"rows and page: {path}")
