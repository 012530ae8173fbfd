"""A run: every question asked once, whatever interrupts it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from rootlace.client.default import endpoint_of
from rootlace.evaluation.folder import digest, open_run, write_about
from rootlace.evaluation.programs import program_of
from rootlace.evaluation.questions import read_questions
from rootlace.evaluation.record import Record
from rootlace.evaluation.results import ROWS, Results
from rootlace.evaluation.task import Task
from rootlace.language.failures import ProgramError
from rootlace.program.checkpoint import Checkpoint

Told = Callable[[Record | None, int], object]
"""Is told what came of a row (None: it failed), and how many rows there are."""


def evaluate(
    task: Task,
    backend: Any = None,
    folder: str | Path | None = None,
    *,
    judge: Any = None,
    concurrency: int | str = "auto",
    told: Told = lambda record, total: None,
) -> Results:
    """Ask all questions of `task` with the model of `backend` (that of `rl.set_default_backend`),
    and have responses judged by that of `judge` (the same).

    With a `folder`, each row is written there as soon as it is done; called again, a run that was
    interrupted goes on where it was, also with another `limit`, `concurrency` or place of its data.
    A row that fails is among the results' failures, and is asked again the next time. `told` is
    called after each row, in their order.

    Raises InvalidRequest for data that cannot be read, and for a folder with another run in it: the
    error says what differs.
    """
    questions = read_questions(task)
    model = endpoint_of(backend).model_info
    results = Results(task.name, model.name)
    checkpoint = None
    about = {
        "model": {"name": model.name, "path": model.path},
        "task": msgspec.to_builtins(task),
        "questions": digest(questions),
    }
    if task.score == "judge":
        judging = endpoint_of(judge or backend).model_info
        about["judge"] = {"name": judging.name, "path": judging.path}
    if folder is not None:
        folder = Path(folder)
        open_run(folder, about, task)
        checkpoint = Checkpoint(folder / ROWS, keep="value")
    start = time.perf_counter()
    states = program_of(task, backend, judge or backend).run_batch(
        [{"before": question.before, "question": question} for question in questions],
        num_threads=concurrency,
        generator_style=True,
        checkpoint=checkpoint,
        backend=backend,
    )
    with closing(states):
        for question, state in zip(questions, states, strict=True):
            record = None
            error = state.error()
            if error is not None:
                results.failures.append((question.id, _reason(error)))
            else:
                record = msgspec.convert(state.ret_value, Record)
                results.records.append(record)
            # Those that were there from before have no text.
            results.asked += error is not None or bool(state.text())
            results.seconds = time.perf_counter() - start
            told(record, len(questions))
    if folder is not None:
        write_about(folder, {**about, "results": results.summary()})
    return results


def _reason(error: BaseException) -> str:
    """Without the line of the program, which is this package's own."""
    if isinstance(error, ProgramError):
        return f"{error.what}: {error.reason}"
    return str(error) or type(error).__name__
