"""Texts of the programs: public data sets in a folder, or made-up texts of their lengths."""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

SUBJECTS = (
    *("anatomy", "elementary_mathematics", "global_facts", "international_law"),
    *("philosophy", "us_foreign_policy"),
)
"""Those of MMLU whose questions are short."""
_STEP = re.compile(r"^Thought \d+: ?(.*\nAction \d+: .*)\nObservation \d+: (.*)$", re.MULTILINE)


class Quiz(msgspec.Struct, frozen=True):
    """A question, the possible answers, and the right one."""

    question: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Texts:
    """`quizzes`: examples and questions by subject (MMLU). `endings`: beginnings and possible
    endings (HellaSwag). `agent_examples`, `agent_steps`: ReAct's prompt, and (agent's text,
    observation) of its traces. `facts`: HotpotQA's questions. `judge`, `answers`: a judge's
    instructions, and (question, answer) to judge. `talks`: a user's messages, in order. `passages`:
    (passage, question) of BoolQ."""

    quizzes: dict[str, tuple[list[Quiz], list[Quiz]]]
    endings: list[Quiz]
    agent_examples: str
    agent_steps: list[tuple[str, str]]
    facts: list[str]
    sentences: list[str]
    puzzles: list[str]
    topics: list[str]
    judge: str
    answers: list[tuple[str, str]]
    talks: list[list[str]]
    passages: list[tuple[str, str]]


def read_texts(folder: Path) -> Texts:
    """Read `folder`, which has `prompts/` and `eval/`. Raises OSError if a file is missing."""
    prompts, sets = folder / "prompts", folder / "eval"
    react: dict[str, str] = msgspec.json.decode((prompts / "react_prompts_naive.json").read_bytes())
    with (prompts / "tree_of_thought_24.csv").open() as file:
        puzzles = [row["Puzzles"] for row in csv.DictReader(file)]
    talks = {row["question_id"]: row["turns"] for row in _rows(prompts / "mt_bench_question.jsonl")}
    best = {
        row["question_id"]: row["choices"][0]["turns"][0]
        for row in _rows(prompts / "mt_bench_reference_gpt-4.jsonl")
    }
    judges = _rows(prompts / "mt_bench_judge_prompts.jsonl")
    asked = [row["query"].rpartition("\nQuestion:") for row in _rows(sets / "boolq/rc_5shot.jsonl")]
    return Texts(
        quizzes={
            subject: (
                _quizzes(sets / f"mmlu/{subject}_dev.jsonl", "question", "answer"),
                _quizzes(sets / f"mmlu/{subject}_test.jsonl", "question", "answer"),
            )
            for subject in SUBJECTS
        },
        endings=_quizzes(sets / "hellaswag/rc_5shot.jsonl", "query", "gold"),
        agent_examples=react["webthink_simple_3"],
        agent_steps=_STEP.findall(react["webthink_simple"]),
        facts=[
            row["question"]
            for row in msgspec.json.decode((prompts / "hotpot_dev_first300.json").read_bytes())
        ],
        sentences=(prompts / "tree_of_thought_random_text.txt").read_text().splitlines(),
        puzzles=puzzles,
        topics=[row["topic"] for row in _rows(prompts / "sglang_tip_suggestion_topic.jsonl")],
        judge=next(row["prompt_template"] for row in judges if row["name"] == "single-v1"),
        answers=[(talks[key][0], answer) for key, answer in best.items() if len(answer) > 100],
        talks=list(talks.values()),
        passages=[
            (passage, question.removesuffix("\nAnswer:").strip()) for passage, _, question in asked
        ],
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def _quizzes(path: Path, question: str, answer: str) -> list[Quiz]:
    return [Quiz(row[question], tuple(row["choices"]), row[answer]) for row in _rows(path)]


def made_up_texts() -> Texts:
    """Make random sentences, the same every time, about as long as the data's."""
    source = random.Random("programs")
    words = ["".join(source.choices("etaoinsrhldcum", k=source.randint(2, 7))) for _ in range(500)]

    def text(count: int) -> str:
        chosen = source.choices(words, k=count)
        return " ".join(chosen).capitalize() + "."

    def several(count: int, make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(count)]

    def quiz(words_of_choice: int) -> Quiz:
        return Quiz(text(18), tuple(several(4, lambda: text(words_of_choice))), source.randrange(4))

    def step() -> tuple[str, str]:
        return (f"{text(12)}\nAction: Search[{text(2)}]", text(60))

    return Texts(
        quizzes={
            name: (several(5, lambda: quiz(6)), several(60, lambda: quiz(6))) for name in SUBJECTS
        },
        endings=several(80, lambda: quiz(25)),
        agent_examples=text(900),
        agent_steps=several(24, step),
        facts=several(60, lambda: text(18)),
        sentences=several(100, lambda: text(45)),
        puzzles=several(60, lambda: " ".join(map(str, source.choices(range(1, 14), k=4)))),
        topics=several(50, lambda: text(5)),
        judge=text(100) + "\n{question}\n{answer}\n",
        answers=several(40, lambda: (text(40), text(120))),
        talks=several(80, lambda: several(2, lambda: text(30))),
        passages=several(200, lambda: (text(90), text(9))),
    )
