"""Prompts for the embedded model, and constraints over its vocabulary."""

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.structured import GrammarCompiler


def prompts_about(passage: str, questions: Sequence[str], folder: Path) -> list[list[int]]:
    """One chat prompt for each question, the passage first in all of them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{passage}\n{question}"}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for question in questions
    ]


def compiler_for(runner: ModelRunner, folder: Path) -> GrammarCompiler:
    return GrammarCompiler(AutoTokenizer.from_pretrained(folder), vocab_size=runner.vocab_size)
