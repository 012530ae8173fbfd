"""The programs that ask the questions. Each returns what is kept of a row: a `Record`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rootlace.evaluation.questions import Question
from rootlace.evaluation.record import Record
from rootlace.evaluation.scoring import by_extract, chosen, matches, plain
from rootlace.evaluation.task import Judge, Task
from rootlace.evaluation.template import fill
from rootlace.language.control import majority
from rootlace.language.expressions import assistant, gen, select, user
from rootlace.language.state import ProgramState
from rootlace.program.function import Function, function


def program_of(task: Task, backend: Any, judge_backend: Any) -> Function:
    """The program of (before, question) that asks what the task asks."""
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
        found = s.get_meta_info("likeliest")
        metas = found if isinstance(found, list) else [found]
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
    """What choices are worth by themselves, asked once for the same ones."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._known: dict[tuple[str, ...], list[float]] = {}

    def sums(self, choices: Sequence[str], record: Record) -> list[float]:
        """Their log-likelihoods; the tokens of asking are the record's."""
        known = self._known.get(tuple(choices))
        if known is None:
            meta = by_themselves.run(choices, backend=self._backend).get_meta_info("likeliest")
            record.count([meta])
            known = self._known[tuple(choices)] = [total for total, _ in _sums(meta)]
        return known


@function
def by_themselves(s: ProgramState, choices: Sequence[str]) -> None:
    """Choices behind nothing, or what the tokenizer puts before a text."""
    s += select("likeliest", choices)


def _sums(meta: Mapping[str, Any]) -> list[tuple[float, int]]:
    """(log-likelihood, tokens) of each choice; a token that nothing precedes counts as 0."""
    rows = [[value or 0.0 for value, *_ in choice] for choice in meta["input_token_logprobs"]]
    return [(math.fsum(row), len(row)) for row in rows]


# ---------------------------------------------------------------- what the model writes


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
        # Of all votes, also those that did not win.
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
    """Which of the choices a response deserves."""
    verdict = select("verdict", choices)
    s += user(prompt) + assistant(verdict) if chat else prompt + verdict
