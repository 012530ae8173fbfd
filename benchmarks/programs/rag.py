"""Retrieval as in DSPy's programs: ask for a query, fetch passages, reason over them.

Each call is a separate prompt: instructions, examples, fields (Khattab et al. 2023). SQLite
searches (BM25) for the question, since a random model's text is no query.
"""

from __future__ import annotations

import random
import re
import sqlite3
from typing import Any

import rootlace as rl
from benchmarks.programs.client import Client, Tokens
from benchmarks.programs.texts import Texts
from benchmarks.programs.workload import Row, Workload

PASSAGES, QUERY, REASONING, ANSWER = 2, 12, 40, 4
MOST = 300
"""Characters of a passage."""
ASK = "Write a search query that finds what answers the question.\n---\n"
REASON = "Answer the question from the passages. Think step by step, then answer.\n---\n"

Index = Any
"""A database with the passages."""


def search(index: Index, question: str) -> list[str]:
    """Return the best passages, best first."""
    words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", question))
    query = "SELECT text FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?"
    return [text for (text,) in index.execute(query, (words, PASSAGES))]


def _ask(examples: list[tuple[str, str]], question: str) -> str:
    shown = "".join(f"Question: {asked}\nQuery: {asked}\n---\n" for _, asked in examples)
    return f"{ASK}{shown}Question: {question}\nQuery:"


def _reason(examples: list[tuple[str, str]], question: str, found: list[str]) -> str:
    shown = "".join(
        f"Passage: {passage}\nQuestion: {asked}\nReasoning: It says so.\nAnswer: yes\n---\n"
        for passage, asked in examples
    )
    passages = "".join(f"Passage: {passage}\n" for passage in found)
    return f"{REASON}{shown}{passages}Question: {question}\nReasoning:"


@rl.function
def program(s: Any, index: Index, examples: list[tuple[str, str]], question: str) -> Any:
    asked, answered = s.fork(2)
    asked += _ask(examples, question) + rl.gen("query", max_tokens=QUERY)
    asked.sync()  # the search waits for it
    answered += _reason(examples, question, search(index, question))
    answered += rl.gen("reasoning", max_tokens=REASONING)
    answered += "\nAnswer:" + rl.gen("answer", max_tokens=ANSWER)
    return answered["answer"]


async def requests(
    client: Client, index: Index, examples: list[tuple[str, str]], question: str
) -> Tokens:
    await client.complete([_ask(examples, question)], QUERY)
    prompt = [_reason(examples, question, search(index, question))]
    reasoning = await client.complete(prompt, REASONING)
    return await client.complete([*prompt, reasoning, "\nAnswer:"], ANSWER)


def rows(texts: Texts, source: random.Random, count: int) -> list[Row]:
    """Draw questions behind the same three examples."""
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.execute("CREATE VIRTUAL TABLE passages USING fts5(text)")
    index.executemany(
        "INSERT INTO passages VALUES (?)", [(passage[:MOST],) for passage, _ in texts.passages]
    )
    drawn = source.sample(texts.passages, 3 + count)
    examples = [(passage[:MOST], question) for passage, question in drawn[:3]]
    return [(index, examples, question) for _, question in drawn[3:]]


WORKLOAD = Workload(
    "RAG", f"a query, {PASSAGES} passages, reasoning and an answer", 6, program, requests, rows
)
