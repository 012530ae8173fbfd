"""Questions with their examples, made of a task and its rows."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

import msgspec

from rootlace.evaluation.task import (
    FORMATS,
    Extract,
    Files,
    Match,
    Shots,
    Task,
    fill,
    look_up,
    read_lines,
)
from rootlace.wire.errors import InvalidRequest

# Scoring ------------------------------------------------------------------------------------------
#
# Scores of likelihoods of choices, and of written texts.


class Scored(msgspec.Struct, frozen=True):
    """Scored choice: its text, the sum and number of its tokens' log-probabilities after the
    prompt. `alone` is the sum without a prompt, if requested."""

    text: str
    log_likelihood: float
    tokens: int
    alone: float | None = None


METRICS: dict[str, Callable[[Scored], float]] = {
    "acc": lambda one: one.log_likelihood,
    "acc_norm": lambda one: one.log_likelihood / (len(one.text) or 1),
    "acc_bytes": lambda one: one.log_likelihood / (len(one.text.encode()) or 1),
    "acc_tokens": lambda one: one.log_likelihood / one.tokens,
    "acc_mutual_info": lambda one: one.log_likelihood - (one.alone or 0.0),
}
"""Score by metric: the log-likelihood, also per character, per byte and per token. The last one
subtracts the choice's log-likelihood without the question (pointwise mutual information)."""


def chosen(metric: str, scored: Sequence[Scored]) -> int:
    """Return the index of the best choice; the first of equal ones."""
    values = [METRICS[metric](one) for one in scored]
    return values.index(max(values))


def extracted(response: str, extract: Extract | None) -> str | None:
    """Extract the answer from a response; None if the pattern has no match."""
    if extract is None:
        return response.strip()
    found = list(re.finditer(extract.pattern, response))
    if not found:
        return None
    match = found[0 if extract.take == "first" else -1]
    return next((group for group in match.groups() if group), match[0]).strip()


def matches(text: str | None, expected: str, match: Match) -> bool:
    """Return whether a text equals the expected one."""
    return text is not None and plain(text, match) == plain(expected, match)


def plain(text: str, match: Match) -> str:
    """Return the text as compared."""
    for pattern in match.ignore:
        text = re.sub(pattern, "", text)
    return (text.lower() if match.ignore_case else text).strip()


def by_extract(response: str, extracts: Mapping[str, Extract]) -> dict[str, str | None]:
    """Return the extracted answers by metric; without `extracts`, the whole response."""
    if not extracts:
        return {"exact_match": extracted(response, None)}
    return {name: extracted(response, one) for name, one in extracts.items()}


# Statistics ---------------------------------------------------------------------------------------
#
# Confidence of a mean, and of a difference.


RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """Mean over `rows`, its standard error, and its 95 % interval: the percentile bootstrap of
    resampled rows (Efron 1979)."""

    mean: float
    error: float
    low: float
    high: float
    rows: int


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """Estimate the mean of one or more values; deterministic."""
    count = len(values)
    mean = math.fsum(values) / count
    spread = math.fsum((value - mean) ** 2 for value in values)
    error = math.sqrt(spread / (count - 1) / count) if count > 1 else 0.0
    draw = random.Random(seed).choices
    means = sorted(math.fsum(draw(values, k=count)) / count for _ in range(RESAMPLES))
    return Estimate(mean, error, means[RESAMPLES // 40], means[-(RESAMPLES // 40) - 1], count)


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided p-value of a sign test. For rows that are right or wrong, it is
    McNemar's exact test."""
    count = better + worse
    if not count:
        return 1.0
    ways = sum(math.comb(count, at) for at in range(min(better, worse) + 1))
    return min(1.0, 2 * ways / 2**count)


# Questions ----------------------------------------------------------------------------------------


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Question of one row. `before`: description and examples, a prefix that many questions share.
    `choices` follow the prompt, or precede the `ending` if there is one; `answer` is the right
    one's index. For written responses, `expected` is the right text; a judge's prompt uses
    `fields`."""

    id: str
    group: str = ""
    before: str
    prompt: str
    choices: list[str] = []
    ending: str = ""
    answer: int = -1
    expected: str = ""
    fields: dict[str, Any] = {}


@dataclass(frozen=True)
class _Row:
    place: str
    """Source of the row: FILE:LINE."""
    fields: dict[str, Any] = field(compare=False)


def read_questions(task: Task) -> list[Question]:
    """Return the task's questions, in the order of its rows. Raises InvalidRequest naming the file,
    line and key."""
    asked = _rows(task, task.data)
    shots = task.shots
    source = _rows(task, shots.data) if shots.data else asked
    if not source and (shots.count or shots.rows):
        raise InvalidRequest(f"shots: there are no rows in {', '.join(shots.data or task.data)}")
    pools: dict[Any, list[_Row]] = {}
    for row in source:
        pools.setdefault(_same(row, shots), []).append(row)
    chosen = {value: _chosen(pool, shots) for value, pool in pools.items()}
    examples = {row for rows in chosen.values() for row in rows}
    asked = [row for row in asked if row not in examples]  # they may be from the same file
    if not asked:
        raise InvalidRequest(f"{task.name}: there are no questions in {', '.join(task.data)}")
    fixed = _fixed(shots.text) if shots.text else ""
    before: dict[Any, str] = {}
    questions = []
    for row in asked[: task.limit]:
        value = _same(row, shots)
        if shots.same and value not in chosen:
            raise InvalidRequest(f"{row.place}: {shots.same}: there are no examples of {value!r}")
        if value not in before:
            shown = [_named(one.place, _question, one, task, "") for one in chosen.get(value, ())]
            before[value] = fixed + "".join(_example(one, task) for one in shown)
        questions.append(_named(row.place, _question, row, task, before[value]))
    return questions


def _rows(task: Task, files: Files) -> list[_Row]:
    read = FORMATS[task.format].read
    rows = []
    for pattern in files:
        # Names of files may have brackets, and patterns may be absolute.
        paths = [pattern] if Path(pattern).is_file() else sorted(glob(pattern))  # noqa: PTH207
        if not paths:
            raise InvalidRequest(f"there is no file {pattern}")
        for path in map(Path, paths):
            for number, row in read_lines(path):
                place = f"{path}:{number}"
                rows.append(_Row(place, _named(place, read, row)))
    return rows


def _fixed(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"shots.text: {path}: {error}") from None


def _named(place: str, make: Any, *arguments: Any) -> Any:
    """Call `make`, and name the place in its errors."""
    try:
        return make(*arguments)
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}: {error}") from None


def _same(row: _Row, shots: Shots) -> Any:
    return str(_named(row.place, look_up, row.fields, shots.same)) if shots.same else ""


def _chosen(pool: Sequence[_Row], shots: Shots) -> list[_Row]:
    if shots.rows:
        if max(shots.rows) >= len(pool):
            last = len(pool) - 1
            raise InvalidRequest(f"shots.rows: no row {max(shots.rows)}: the last is {last}")
        return [pool[number] for number in shots.rows]
    if shots.count > len(pool):
        rows = f"{len(pool)} rows, of which {pool[0].place} is the first"
        raise InvalidRequest(f"shots.count: {shots.count} examples cannot be taken from {rows}")
    if shots.seed is None:
        return list(pool[: shots.count])
    return random.Random(shots.seed).sample(pool, shots.count)


def _question(row: _Row, task: Task, before: str) -> Question:
    fields = row.fields
    about: dict[str, Any] = {
        "id": str(fields.get(task.id, Path(row.place).name)),
        "group": str(look_up(fields, task.group)) if task.group in fields else "",
        "before": fill(task.description, fields) + before,
        "prompt": fill(task.prompt, fields),
    }
    if task.score != "likelihood":
        expected = fill(task.answer, fields) if "{" in task.answer else ""
        if not expected and (task.score == "generate" or task.answer in fields):
            expected = str(look_up(fields, task.answer))
        shown = fields if task.score == "judge" else {}
        return Question(**about, expected=expected, fields=shown)
    choices = _choices(task, fields)
    ending = about["prompt"] if task.contexts else ""
    answer = _number(look_up(fields, task.answer), choices, task.answer)
    return Question(**about, choices=choices, ending=ending, answer=answer)


def _choices(task: Task, fields: dict[str, Any]) -> list[str]:
    if not task.contexts and not isinstance(task.choices, str):
        return [fill(choice, fields) for choice in task.choices]
    name = task.contexts or str(task.choices)
    choices = look_up(fields, name)
    if not isinstance(choices, list) or not choices:
        raise InvalidRequest(f"{name}: not a list of choices, but {choices!r:.60}")
    return [str(choice) for choice in choices]


def _number(answer: Any, choices: Sequence[str], key: str) -> int:
    """Return the index of the right choice, given as index, text or letter."""
    number = -1
    if isinstance(answer, bool):
        raise InvalidRequest(f"{key}: {answer} does not say which of the choices is right")
    if isinstance(answer, int):
        number = answer
    elif answer in choices:
        number = choices.index(answer)
    elif isinstance(answer, str) and answer.isdecimal():
        number = int(answer)
    elif isinstance(answer, str) and len(answer) == 1:
        number = ord(answer.upper()) - ord("A")
    if not 0 <= number < len(choices):
        raise InvalidRequest(f"{key}: {answer!r:.60} is none of the {len(choices)} choices")
    return number


def _example(question: Question, task: Task) -> str:
    """Return the text of a question with its answer."""
    if task.score != "likelihood":
        text = f"{question.prompt}{task.delimiter}{question.expected}"
    elif question.ending:
        text = f"{question.choices[question.answer]}{task.delimiter}{question.ending}"
    else:
        text = f"{question.prompt}{task.delimiter}{question.choices[question.answer]}"
    return text + task.shots.separator
