"""MMLU: a question, its letters, five examples before it (Hendrycks et al. 2021)."""

from __future__ import annotations

import random
from typing import Any

import rootlace as rl
from benchmarks.programs.client import Client
from benchmarks.programs.texts import SUBJECTS, Quiz, Texts
from benchmarks.programs.workload import Row, Workload

LETTERS = ["A", "B", "C", "D"]


@rl.function
def program(s: Any, examples: str, question: str) -> Any:
    s += examples + question + rl.select("answer", LETTERS)
    return s["answer"]


async def requests(client: Client, examples: str, question: str) -> int:
    return await client.choose([examples + question], LETTERS)


def rows(texts: Texts, source: random.Random, count: int) -> list[Row]:
    """Draw rows, half of one subject and half of another."""
    found: list[Row] = []
    parts = (count // 2, count - count // 2)
    for subject, part in zip(source.sample(SUBJECTS, 2), parts, strict=True):
        shown, asked = texts.quizzes[subject]
        examples = f"Questions about {subject.replace('_', ' ')}.\n\n"
        examples += "".join(f"{_text(one)}{LETTERS[one.answer]})\n\n" for one in shown)
        found += [(examples, _text(one)) for one in source.sample(asked, part)]
    return found


def _text(quiz: Quiz) -> str:
    choices = zip(LETTERS, quiz.choices, strict=True)
    return "\n".join([quiz.question, *(f"({name}) {text}" for name, text in choices), "Answer: ("])


WORKLOAD = Workload(
    "MMLU", "2 subjects, 5 examples, one of four letters", 10, program, requests, rows
)
