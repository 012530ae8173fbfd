"""Prompts for the embedded model, and constraints over its vocabulary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.structured import GrammarCompiler

PASSAGE = "Mara Olsen is 34 years old and lives in Turin. She works as a baker and has two cats."
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 30},
        "job": {"enum": ["baker", "teacher", "driver"]},
    },
    "required": ["name", "age", "city", "job"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": PERSON},
    "flexible": {"json_schema": PERSON, "whitespace": "flexible"},
    "regex": {"regex": r"Name: [A-Z][a-z]+( [A-Z][a-z]+)?\nAge: [0-9]{1,3}\n(It|She)'s all\."},
    "choices": {"choices": ["Turin is where she lives.", "Turin isn't known.", "Rome, I think."]},
    "ebnf": {"ebnf": 'start: "(" start ")" | "Mara lives in " NAME "."\nNAME: /[A-Z][a-z]+/'},
}
# The model has learnt to answer the last; behind the others it spells in odd ways.
QUESTIONS = [
    "Where does Mara live?",
    "What is her job? As JSON.",
    "Hello!",
    "Extract name, age, city and job as JSON.",
]


def prompts_about(questions: Sequence[str], folder: Path) -> list[list[int]]:
    """Return one chat prompt for each question, with `PASSAGE` first in all of them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{PASSAGE}\n{question}"}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for question in questions
    ]


def compiler_for(runner: ModelRunner, folder: Path) -> GrammarCompiler:
    return GrammarCompiler(AutoTokenizer.from_pretrained(folder), vocab_size=runner.vocab_size)
