"""What is asked, how, and what counts as right: a small YAML file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rootlace.evaluation.formats import FORMATS
from rootlace.evaluation.places import Document, Keys, convert
from rootlace.language import sampling
from rootlace.wire.errors import InvalidRequest

Count = Annotated[int, msgspec.Meta(ge=0)]
Some = Annotated[int, msgspec.Meta(ge=1)]
Files = str | list[str]
LikelihoodMetric = Literal["acc", "acc_norm", "acc_bytes", "acc_tokens", "acc_mutual_info"]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what a task's file may hold."""


class Shots(_Part, frozen=True):
    """The examples before each question: the first `count` of `data`, those that `seed` draws, or
    the `rows` of these numbers (from 0); all questions have the same ones, or, with `same`, those
    that have the same value of this field. Without `data` they are taken from the questions. What
    is an example is not asked. `text`: a file that stands before each question as it is."""

    count: Count = 0
    data: Files = ""
    seed: int | None = None
    rows: list[Count] = []
    same: str = ""
    text: str = ""
    separator: str = "\n\n"


class Extract(_Part, frozen=True):
    """What is taken out of a response: what `pattern` finds (its first group that matched, if it
    has any), the first time or the last."""

    pattern: str
    take: Literal["first", "last"] = "first"


class Match(_Part, frozen=True):
    """Before two texts are compared, what the patterns of `ignore` find is removed from both, and
    white space at the ends."""

    ignore: list[str] = []
    ignore_case: bool = False


class Judge(_Part, frozen=True):
    """The model is asked whether a response is right: a `prompt` with the fields of the question
    and {response}, and the `choices`, of which `right` says yes."""

    prompt: str
    choices: list[str] = msgspec.field(default_factory=lambda: ["yes", "no"])
    right: str = "yes"


class Task(_Part, frozen=True):
    """`prompt`, `description`, `choices` and `answer` are templates (`evaluation.template`).

    `score`: "likelihood" asks how likely each choice is behind the prompt; "generate" lets the
    model write, extracts and matches; "judge" has the response judged. `choices` is the name of the
    field that lists them, or the texts themselves; with `contexts`, the name of a field, the
    choices stand before the prompt, whose likelihood then counts. `answer` is the field with the
    right choice (its number from 0, its letter, or its text), or, where the model writes, the right
    text. `votes`: the answer that most of so many responses give.
    """

    data: Files
    name: str = ""
    format: str = "questions"
    score: Literal["likelihood", "generate", "judge"] = "likelihood"
    description: str = ""
    prompt: str = "{question}"
    choices: str | list[str] = "choices"
    contexts: str = ""
    answer: str = "answer"
    delimiter: str = " "
    id: str = "id"
    group: str = ""
    limit: Some | None = None
    shots: Shots = Shots()
    metrics: Annotated[list[LikelihoodMetric], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["acc"]
    )
    generate: dict[str, Any] = {}
    votes: Some = 1
    extract: dict[str, Extract] = {}
    match: Match = Match()
    judge: Judge | None = None
    chat: bool = False


def read_task(path: str | Path, changes: Mapping[str, Any] | None = None) -> Task:
    """The task of a file, whose paths are relative to it. `changes` to what it says are given by
    keys with dots ("shots.count").

    Raises InvalidRequest that names the file, the line and the key of what is wrong.
    """
    document = Document(Path(path))
    given = {"name": document.path.stem, **document.content}
    return _made(given, changes or {}, document.path.parent, document.wrong)


def ready_task(name: str, changes: Mapping[str, Any]) -> Task:
    """A task of a well-known format, where nothing but `changes` is said. Their paths are relative
    to the current folder."""

    def wrong(keys: Keys, reason: str) -> InvalidRequest:
        return InvalidRequest(f"{name}: {'.'.join(keys)}: {reason}")

    return _made({"name": name, "format": name}, changes, Path(), wrong)


def _made(given: dict[str, Any], changes: Mapping[str, Any], folder: Path, wrong: Any) -> Task:
    name = given.get("format", "questions")
    if not isinstance(name, str) or name not in FORMATS:
        raise wrong(("format",), f"one of {', '.join(FORMATS)}, not {name!r}")
    given = _merged(FORMATS[name].task, given)
    for key, value in changes.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        given = _merged(given, value)
    task, keys, reason = convert(given, Task)
    if task is None:
        raise wrong(keys, reason)
    _check(task, wrong)
    shots = task.shots
    return msgspec.structs.replace(
        task,
        data=_absolute(task.data, folder),
        shots=msgspec.structs.replace(
            shots,
            data=_absolute(shots.data, folder) if shots.data else "",
            text=str(folder / shots.text) if shots.text else "",
        ),
    )


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over`, and what it does not say of `under`; of the parts of a task, too."""
    merged = {**under, **over}
    for key in ("shots", "generate", "match"):
        if isinstance(under.get(key), Mapping) and isinstance(over.get(key), Mapping):
            merged[key] = {**under[key], **over[key]}
    return merged


def _absolute(files: Files, folder: Path) -> list[str]:
    return [str(folder / file) for file in ([files] if isinstance(files, str) else files)]


def _check(task: Task, wrong: Any) -> None:
    """What types cannot say."""
    if task.score == "judge" and task.judge is None:
        raise wrong(("judge",), "score: judge needs it")
    if task.judge is not None and task.judge.right not in task.judge.choices:
        raise wrong(("judge", "right"), f"none of the choices {task.judge.choices}")
    if task.chat and task.score == "likelihood":
        raise wrong(("chat",), "likelihoods are asked for behind plain text")
    if task.contexts and "acc_mutual_info" in task.metrics:
        raise wrong(("metrics",), "acc_mutual_info: with contexts, all choices have one ending")
    if task.shots.rows and (task.shots.count or task.shots.seed is not None):
        raise wrong(("shots", "rows"), "given beside a count or a seed")
    try:
        sampling.normalise(task.generate, "generate")
    except (TypeError, InvalidRequest) as error:
        raise wrong(("generate",), str(error).removeprefix("generate: ")) from None
    if task.generate.get("n", 1) != 1:
        raise wrong(("generate", "n"), "a row has one response; votes asks for several")
    for keys, pattern in _patterns(task):
        try:
            re.compile(pattern)
        except re.error as error:
            raise wrong(keys, f"no pattern: {error}") from None


def _patterns(task: Task) -> list[tuple[Keys, str]]:
    extracts = [(("extract", name, "pattern"), one.pattern) for name, one in task.extract.items()]
    ignored = enumerate(task.match.ignore)
    return [*extracts, *[(("match", "ignore", str(at)), one) for at, one in ignored]]
