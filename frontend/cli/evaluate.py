"""`rootlace eval`: tasks asked of a model, with progress, a table and a page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rootlace.cli.common import INTERRUPTED, KeyOption, ModelOption, UrlOption, connected, fail
from rootlace.wire.errors import RootlaceError

if TYPE_CHECKING:
    from rootlace.evaluation.run import Record, Results, Told
    from rootlace.evaluation.task import Task


def evaluate(
    tasks: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK",
            help="TASK.yaml; a ready task (gsm8k, mmlu, hellaswag, arc, boolq, piqa, winogrande), "
            "with --data; or the folder of a run that has ended, which is only shown.",
        ),
    ],
    model: ModelOption = None,
    url: UrlOption = None,
    api_key: KeyOption = "",
    judge_url: Annotated[
        str | None, typer.Option(help="The server that judges.", show_default="the same model")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="JSON lines to ask, instead of the task's. Repeatable.")
    ] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Examples before each question.")] = None,
    shots_data: Annotated[
        list[str] | None, typer.Option(help="JSON lines that examples are from. Repeatable.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Draws the examples; without one they are the first.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask only so many rows.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="At most so many rows at a time.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option(help="Rows, results and page go to a folder there, by task and model."),
    ] = Path("evaluations"),
    compare: Annotated[
        Path | None, typer.Option(help="The folder of a run to compare with, row by row.")
    ] = None,
) -> None:
    """Measure a model on tasks: accuracies with their intervals, row by row, and what it cost. Run
    again, what was interrupted goes on where it was."""
    changes = {
        "data": data,
        "shots.count": shots,
        "shots.data": shots_data,
        "shots.seed": seed,
        "limit": limit,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    from rootlace.evaluation.run import read_results

    try:
        other = None if compare is None else read_results(compare)
        planned = [(name, _task(name, given)) for name in tasks]
        ended = [(Path(name), read_results(Path(name))) for name, task in planned if task is None]
        asked = [task for _, task in planned if task is not None]
        if asked:
            with ExitStack() as stack:
                backend = stack.enter_context(connected(model, url, api_key))
                judge = backend
                if judge_url is not None:
                    judge = stack.enter_context(connected(None, judge_url, api_key))
                ended += [_run(task, backend, judge, output, concurrency) for task in asked]
        _report(ended, other, compare)
    except RootlaceError as error:
        fail(str(error))
    except KeyboardInterrupt:
        typer.echo("\ninterrupted; the same command goes on where it was", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if any(run.failures for _, run in ended):
        raise typer.Exit(1)


def _task(name: str, changes: dict[str, Any]) -> Task | None:
    """The task that `name` means; None for the folder of a run."""
    from rootlace.evaluation.run import ABOUT
    from rootlace.evaluation.task import FORMATS, read_task, ready_task

    ready = [one for one in FORMATS if one != "questions"]

    if (Path(name) / ABOUT).is_file():
        return None
    if name in FORMATS and not Path(name).is_file():
        if "data" not in changes:
            fail(f"{name} is a ready task: give its rows with --data")
        return ready_task(name, changes)
    if not Path(name).exists() and not name.endswith((".yaml", ".yml")):
        near = get_close_matches(name.lower(), ready, n=1)
        meant = f"; did you mean {near[0]}?" if near else f" ({', '.join(ready)})"
        fail(f"{name} is neither a file nor a ready task{meant}")
    return read_task(name, changes)


def _run(
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
    """A bar with the accuracy and the hit rate so far."""
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
