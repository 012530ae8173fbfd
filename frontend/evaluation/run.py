"""Run of an evaluation: programs that ask the questions, their results, and the run's folder. The
folder holds `run.json` and a line of `rows.jsonl` for each row."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rootlace.client.endpoint import endpoint_of
from rootlace.evaluation.questions import (
    Estimate,
    Question,
    Scored,
    by_extract,
    chosen,
    estimate,
    matches,
    plain,
    read_questions,
)
from rootlace.evaluation.task import Judge, Task, fill
from rootlace.language.control import majority
from rootlace.language.expressions import assistant, gen, select, user
from rootlace.language.failures import ProgramError
from rootlace.language.state import ProgramState
from rootlace.program.batch import Checkpoint
from rootlace.program.function import Function, function
from rootlace.wire.errors import InvalidRequest


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Result of a question: a line of the run's file. `scores` has a value from 0 to 1 by metric.
    The tokens are those of all the row's requests, except votes cancelled after a majority."""

    id: str
    group: str = ""
    prompt: str
    scores: dict[str, float]
    choices: list[str] = []
    answer: int = -1
    log_likelihoods: list[float] = []
    tokens: list[int] = []
    alone: list[float] = []
    expected: str = ""
    response: str = ""
    extracted: dict[str, str | None] = {}
    verdict: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def scored(self) -> list[Scored]:
        """Return the scored choices."""
        alone: Sequence[float | None] = self.alone or [None] * len(self.choices)
        rows = zip(self.choices, self.log_likelihoods, self.tokens, alone, strict=True)
        return [Scored(*row) for row in rows]

    def count(self, metas: Sequence[Mapping[str, Any]]) -> None:
        """Add the tokens of the requests."""
        for meta in metas:
            self.prompt_tokens += meta["prompt_tokens"]
            self.cached_tokens += meta["cached_tokens"]
            self.completion_tokens += meta["completion_tokens"]


ABOUT, ROWS = "run.json", "rows.jsonl"


@dataclass
class Results:
    """Rows of a run in their order, and (id, reason) of the failed ones. `seconds` is the duration
    of the last `asked` rows; the others come from an earlier run."""

    task: str
    model: str
    records: list[Record] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    asked: int = 0

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(name for record in self.records for name in record.scores))

    def estimates(self) -> dict[str, Estimate]:
        """Return the estimates by metric."""
        return {name: _estimate(self.records, name) for name in self.metrics}

    def by_group(self) -> dict[str, dict[str, Estimate]]:
        """Return the estimates by group and metric; empty without groups."""
        groups: dict[str, list[Record]] = {}
        for record in self.records:
            groups.setdefault(record.group, []).append(record)
        if len(groups) < 2:
            return {}
        return {
            group: {name: _estimate(records, name) for name in self.metrics}
            for group, records in sorted(groups.items())
        }

    @property
    def prompt_tokens(self) -> int:
        return sum(record.prompt_tokens for record in self.records)

    @property
    def cached_tokens(self) -> int:
        return sum(record.cached_tokens for record in self.records)

    @property
    def hit_rate(self) -> float:
        """Return the fraction of prompt tokens that were cached."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def summary(self) -> dict[str, Any]:
        """Return all results except the rows, as JSON values."""
        return {
            "task": self.task,
            "model": self.model,
            "rows": len(self.records),
            "metrics": msgspec.to_builtins(self.estimates()),
            "groups": msgspec.to_builtins(self.by_group()),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": sum(record.completion_tokens for record in self.records),
            "seconds": self.seconds,
            "asked": self.asked,
            "failures": self.failures,
        }


def _estimate(records: Sequence[Record], metric: str) -> Estimate:
    return estimate([record.scores[metric] for record in records if metric in record.scores])


class _StoredRow(msgspec.Struct):
    row: int
    value: Record


def _stored_rows(lines: bytes) -> Iterator[tuple[int, Record]]:
    """Yield (row, record) of each line; skips a cut-off line, whose row has a later one."""
    for line in lines.splitlines():
        try:
            stored = msgspec.json.decode(line, type=_StoredRow)
        except msgspec.DecodeError:
            continue
        yield stored.row, stored.value


def read_results(folder: Path) -> Results:
    """Read the results in a run's folder. Raises InvalidRequest for any other folder."""
    try:
        about = msgspec.json.decode((folder / ABOUT).read_bytes())
        summary = about["results"]
        count = summary["rows"] + len(summary["failures"])
        rows = _stored_rows((folder / ROWS).read_bytes())
        stored = {row: record for row, record in rows if row < count}  # a limit was higher before
        if len(stored) < summary["rows"]:
            raise InvalidRequest(f"{folder} holds {len(stored)} of {summary['rows']} rows")
        return Results(
            summary["task"],
            summary["model"],
            [stored[row] for row in sorted(stored)],
            [(id, reason) for id, reason in summary["failures"]],
            summary["seconds"],
            summary["asked"],
        )
    except KeyError as error:
        raise InvalidRequest(f"the run in {folder} has not ended: it has no {error}") from None
    except (OSError, msgspec.MsgspecError, TypeError) as error:
        raise InvalidRequest(f"{folder} holds no run: {error}") from None


# Folder -------------------------------------------------------------------------------------------
#
# A run's folder: new, or with the same run, which then continues.


ASKED = (
    "format", "data", "shots", "description", "prompt", "choices", "contexts", "answer", "id",
    "group",
)  # fmt: skip
"""Keys of a task that determine its questions, and nothing else. A run with the same questions is
the same run, whatever their source."""

NO_MATTER = ("name", "limit")
"""Keys of a task that do not change how a question is asked."""


def digest(questions: Sequence[Question]) -> str:
    return hashlib.sha256(msgspec.json.encode(questions)).hexdigest()[:32]


def open_run(folder: Path, about: Mapping[str, Any], task: Task) -> None:
    """Make the folder, or continue its run. Raises InvalidRequest for another run, and names the
    different options."""
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
    """Write `run.json` atomically."""
    new = folder / f"{ABOUT}.new"
    new.write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=1) + b"\n")
    new.replace(folder / ABOUT)


def _differences(before: Mapping[str, Any], about: Mapping[str, Any], task: Task) -> list[str]:
    """Return the differences between the runs, with the stored and the requested values."""
    now = msgspec.json.decode(msgspec.json.encode(about))
    changed = [
        change
        for part in ("model", "judge")
        for change in _changes(part, before.get(part), now.get(part))
    ]
    old, new = before.get("task", {}), now["task"]
    changes = {name: list(_changes(name, old.get(name), new[name])) for name in new}
    changed += [
        change
        for name, each in changes.items()
        if name not in (*ASKED, *NO_MATTER)
        for change in each
    ]
    # With the stored limit: a limit only bounds the number of questions.
    questions = read_questions(msgspec.structs.replace(task, limit=old.get("limit")))
    if before.get("questions") != digest(questions):
        changed += [change for name in ASKED for change in changes[name]]
        return changed or ["the rows of its data, which have changed"]
    return changed


def _changes(name: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            yield from _changes(f"{name}.{key}" if name else key, old.get(key), new.get(key))
    elif old != new:
        yield f"{name} ({_short(old)} there, {_short(new)} now)"


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:40]}...{text[-17:]}"


# Programs -----------------------------------------------------------------------------------------
#
# The programs that ask the questions. Each returns a row's `Record`.


def program_of(task: Task, backend: Any, judge_backend: Any) -> Function:
    """Return the program of (before, question) that asks a question of the task."""
    return _choosing(task, backend) if task.score == "likelihood" else _writing(task, judge_backend)


# ---------------------------------------------------------------- likelihood


def _choosing(task: Task, backend: Any) -> Function:
    alone = _Alone(backend)

    @function
    def choose(s: ProgramState, before: str, question: Question) -> Any:
        s += before
        if question.ending:
            with s.fork(len(question.choices)) as forks:
                forks += question.choices
                forks += select("likeliest", [task.delimiter + question.ending])
        else:
            choices = [task.delimiter + choice for choice in question.choices]
            s += question.prompt + select("likeliest", choices)
        likeliest = s.get_meta_info("likeliest")
        metas = likeliest if isinstance(likeliest, list) else [likeliest]
        sums = [pair for meta in metas for pair in _sums(meta)]
        record = Record(
            id=question.id,
            group=question.group,
            prompt=question.prompt,
            choices=question.choices,
            answer=question.answer,
            log_likelihoods=[total for total, _ in sums],
            tokens=[count for _, count in sums],
            scores={},
        )
        record.count(metas)
        if "acc_mutual_info" in task.metrics:
            record.alone = alone.sums([task.delimiter + one for one in question.choices], record)
        record.scores = {
            metric: float(chosen(metric, record.scored()) == record.answer)
            for metric in task.metrics
        }
        return msgspec.to_builtins(record)

    return choose


class _Alone:
    """Cache of the choices' log-likelihoods without a question."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._known: dict[tuple[str, ...], list[float]] = {}

    def sums(self, choices: Sequence[str], record: Record) -> list[float]:
        """Return the choices' log-likelihoods; new requests' tokens count for the record."""
        known = self._known.get(tuple(choices))
        if known is None:
            meta = by_themselves.run(choices, backend=self._backend).get_meta_info("likeliest")
            record.count([meta])
            known = self._known[tuple(choices)] = [total for total, _ in _sums(meta)]
        return known


@function
def by_themselves(s: ProgramState, choices: Sequence[str]) -> None:
    """Score the choices without a prompt, or only after the tokenizer's BOS."""
    s += select("likeliest", choices)


def _sums(meta: Mapping[str, Any]) -> list[tuple[float, int]]:
    """Return (log-likelihood, tokens) of each choice; a token without a predecessor counts as 0."""
    rows = [[value or 0.0 for value, *_ in choice] for choice in meta["input_token_logprobs"]]
    return [(math.fsum(row), len(row)) for row in rows]


# ---------------------------------------------------------------- written responses


def _writing(task: Task, backend: Any) -> Function:
    asked = gen("response", **{"temperature": 0.0 if task.votes == 1 else None, **task.generate})

    def answer(s: ProgramState) -> None:
        if task.votes > 1:
            majority(s, task.votes, asked, "response", key=vote)
        else:
            s += asked

    def vote(response: str) -> str | None:
        text = next(iter(by_extract(response, task.extract).values()))
        return None if text is None else plain(text, task.match)

    @function
    def write(s: ProgramState, before: str, question: Question) -> Any:
        if task.chat:
            with s.user():
                s += before
                s += question.prompt
            with s.assistant():
                answer(s)
        else:
            s += before
            s += question.prompt
            answer(s)
        record = Record(
            id=question.id,
            group=question.group,
            prompt=question.prompt,
            expected=question.expected,
            response=s["response"],
            scores={},
        )
        # Count all votes, losing ones too.
        record.count([msgspec.structs.asdict(span) for span in s.trace().spans])
        if task.judge is not None and task.score == "judge":
            _judge(task.judge, task.chat, question, record, backend)
        else:
            record.extracted = by_extract(record.response, task.extract)
            record.scores = {
                metric: float(matches(text, record.expected, task.match))
                for metric, text in record.extracted.items()
            }
        return msgspec.to_builtins(record)

    return write


def _judge(judge: Judge, chat: bool, question: Question, record: Record, backend: Any) -> None:
    fields = {**question.fields, "response": record.response}
    state = judged.run(fill(judge.prompt, fields), judge.choices, chat, backend=backend)
    record.verdict = state["verdict"]
    record.count([state.get_meta_info("verdict")])
    record.scores = {"judged": float(record.verdict == judge.right)}


@function
def judged(s: ProgramState, prompt: str, choices: Sequence[str], chat: bool) -> None:
    """Choose the verdict on a response."""
    verdict = select("verdict", choices)
    s += user(prompt) + assistant(verdict) if chat else prompt + verdict


# Run ----------------------------------------------------------------------------------------------


Told = Callable[[Record | None, int], object]
"""Callback with a row's result (None if it failed), and the number of rows."""


def evaluate(
    task: Task,
    backend: Any = None,
    folder: str | Path | None = None,
    *,
    judge: Any = None,
    concurrency: int | str = "auto",
    told: Told = lambda record, total: None,
) -> Results:
    """Ask all questions of `task` with the model of `backend`; `judge`'s model judges responses.
    Both default to `rl.set_default_backend`'s.

    With a `folder`, each finished row is written there at once. Called again, an interrupted run
    continues, also with another `limit`, `concurrency` or place of its data. A failed row is among
    the results' failures, and is asked again the next time. `told` is called after each row, in
    their order.

    Raises InvalidRequest for unreadable data, and for a folder with another run; the error names
    the differences.
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
            # Rows read from the checkpoint have no text.
            results.asked += error is not None or bool(state.text())
            results.seconds = time.perf_counter() - start
            told(record, len(questions))
    if folder is not None:
        write_about(folder, {**about, "results": results.summary()})
    return results


def _reason(error: BaseException) -> str:
    """Return the error without the program's line, which is this package's own."""
    if isinstance(error, ProgramError):
        return f"{error.what}: {error.reason}"
    return str(error) or type(error).__name__
