"""A run's folder: made, or found with the same run in it, which then goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rootlace.evaluation.questions import Question, read_questions
from rootlace.evaluation.results import ABOUT, ROWS
from rootlace.evaluation.task import Task
from rootlace.wire.errors import InvalidRequest

ASKED = (
    "format", "data", "shots", "description", "prompt", "choices", "contexts", "answer", "id",
    "group",
)  # fmt: skip
"""What of a task makes its questions, and nothing else. A run with the same questions is the same
run, wherever they are from."""

NO_MATTER = ("name", "limit")
"""What of a task does not change how a question is asked."""


def digest(questions: Sequence[Question]) -> str:
    return hashlib.sha256(msgspec.json.encode(questions)).hexdigest()[:32]


def open_run(folder: Path, about: Mapping[str, Any], task: Task) -> None:
    """Make the folder, or go on with the run that it holds. Raises InvalidRequest for another one,
    and says by which options it differs."""
    if not (folder / ABOUT).exists():
        if (folder / ROWS).exists():
            raise InvalidRequest(f"{folder} holds rows without {ABOUT}: give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_about(folder, about)
        return
    try:
        before = msgspec.json.decode((folder / ABOUT).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{folder / ABOUT}: {error}") from None
    if other := list(_differences(before, about, task)):
        raise InvalidRequest(
            f"{folder} holds another run, which differs in {', '.join(other)}: "
            "give another folder, or remove this one"
        )


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    new = folder / f"{ABOUT}.new"
    new.write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=1) + b"\n")
    new.replace(folder / ABOUT)


def _differences(before: Mapping[str, Any], about: Mapping[str, Any], task: Task) -> list[str]:
    """Where the runs differ, with what stands there and what is asked for now."""
    now = msgspec.json.decode(msgspec.json.encode(about))
    found = [
        change
        for part in ("model", "judge")
        for change in _changes(part, before.get(part), now.get(part))
    ]
    old, new = before.get("task", {}), now["task"]
    changes = {name: list(_changes(name, old.get(name), new[name])) for name in new}
    found += [
        change
        for name, each in changes.items()
        if name not in (*ASKED, *NO_MATTER)
        for change in each
    ]
    # As many as were asked then: a limit only says how far a run goes.
    asked = read_questions(msgspec.structs.replace(task, limit=old.get("limit")))
    if before.get("questions") != digest(asked):
        found += [change for name in ASKED for change in changes[name]]
        return found or ["the rows of its data, which have changed"]
    return found


def _changes(name: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            yield from _changes(f"{name}.{key}" if name else key, old.get(key), new.get(key))
    elif old != new:
        yield f"{name} ({_short(old)} there, {_short(new)} now)"


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:40]}...{text[-17:]}"
