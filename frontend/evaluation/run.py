"""A run: every question asked once, whatever interrupts it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from rootlace.client.default import endpoint_of
from rootlace.evaluation.programs import program_of
from rootlace.evaluation.questions import Question, read_questions
from rootlace.evaluation.record import Record
from rootlace.evaluation.results import ABOUT, ROWS, Results
from rootlace.evaluation.task import Task
from rootlace.language.failures import ProgramError
from rootlace.program.checkpoint import Checkpoint
from rootlace.wire.errors import InvalidRequest

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
    interrupted goes on where it was. A row that fails is among the results' failures, and is asked
    again the next time. `told` is called after each row, in their order.

    Raises InvalidRequest for data that cannot be read, and for a folder with another run in it.
    """
    questions = read_questions(task)
    model = endpoint_of(backend).model_info
    results = Results(task.name, model.name)
    checkpoint = None
    about = {
        "model": {"name": model.name, "path": model.path},
        "task": msgspec.to_builtins(task),
        "questions": _digest(questions),
    }
    if folder is not None:
        folder = Path(folder)
        _open(folder, about)
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
        _write(folder, {**about, "results": results.summary()})
    return results


def _reason(error: BaseException) -> str:
    """Without the line of the program, which is this package's own."""
    if isinstance(error, ProgramError):
        return f"{error.what}: {error.reason}"
    return str(error) or type(error).__name__


def _digest(questions: Sequence[Question]) -> str:
    return hashlib.sha256(msgspec.json.encode(questions)).hexdigest()[:32]


def _open(folder: Path, about: dict[str, Any]) -> None:
    """Make the folder, or go on with the run that it holds. Raises InvalidRequest for another."""
    if not (folder / ABOUT).exists():
        if (folder / ROWS).exists():
            raise InvalidRequest(f"{folder} holds rows without {ABOUT}: give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, about)
        return
    try:
        before = msgspec.json.decode((folder / ABOUT).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{folder / ABOUT}: {error}") from None
    as_json = msgspec.json.decode(msgspec.json.encode(about))
    other = [name for name, value in as_json.items() if before.get(name) != value]
    if other:
        raise InvalidRequest(
            f"{folder} holds a run that differs in its {' and '.join(other)}: "
            "give another folder, or remove this one"
        )


def _write(folder: Path, about: dict[str, Any]) -> None:
    """Whole or not at all."""
    new = folder / f"{ABOUT}.new"
    new.write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=1) + b"\n")
    new.replace(folder / ABOUT)
