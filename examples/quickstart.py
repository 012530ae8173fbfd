"""Sort messages, extract people from sentences, ask a text three questions, see cached tokens.

    python examples/quickstart.py [--model NAME | --url URL]

The program shows all of Rootlace in one file: few-shot examples and a constrained choice, JSON that
becomes a dataclass, a fork whose branches share their prefix, and a table of cached tokens.

A model of 135M parameters does short tasks well if an example precedes them, or the text has the
answer. The model does not calculate or reason in steps, and knows few facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import rootlace as rl
from backend import arguments, backend

SHOTS = [
    ("I want my money back", "money"),
    ("my package is late", "delivery"),
    ("I was charged twice", "money"),
    ("the courier lost the box", "delivery"),
]
MESSAGES = ["where is my parcel", "please return my money", "my credit card was charged by mistake"]
PASSAGES = [
    "Ida Lund is 47 years old. She lives in Bergfeld.",
    "Karl Brandt lives in Norwick. Karl Brandt is 31 years old.",
    "Tom Lee is 25. He lives in Ulm.",
]
TEXT = "Maria Costa is 62 years old. Maria Costa lives in Lisbon. She is a judge."
QUESTIONS = ["How old is Maria Costa?", "Where does Maria Costa live?", "Who is Maria Costa?"]


@dataclass
class Person:
    name: str
    age: int
    city: str


@rl.function
def triage(s: rl.ProgramState, message: str) -> None:
    s += "".join(f"Message: {text}\nLabel: {label}\n\n" for text, label in SHOTS)
    s += f"Message: {message}\nLabel: " + rl.select("label", ["money", "delivery"])


@rl.function
def extract(s: rl.ProgramState, passage: str) -> None:
    s += rl.user(f"Extract name, age and city as JSON.\n\n{passage}")
    s += rl.assistant(rl.gen("person", type=Person, max_tokens=64, temperature=0))


@rl.function
def ask(s: rl.ProgramState, text: str, questions: Sequence[str]) -> rl.Forks:
    s += rl.user_begin() + text
    forks = s.fork(len(questions))
    forks += [f"\n\n{question}" + rl.user_end() for question in questions]
    forks += rl.assistant(rl.gen("answer", max_tokens=24, temperature=0, stop="."))
    forks.join()
    return forks


def cache_table(operations: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """Tabulate cached, computed and written tokens of each operation."""
    table = Table(title="What the cache did", box=SIMPLE_HEAD, title_justify="left")
    table.add_column("operation")
    for name in ("prompt tokens", "cached", "computed", "written"):
        table.add_column(name, justify="right")
    for name, meta in operations:
        prompt, cached = meta["prompt_tokens"], meta["cached_tokens"]
        numbers = [prompt, cached, prompt - cached, meta["completion_tokens"]]
        table.add_row(name, *map(str, numbers))
    return table


def main() -> None:
    given = arguments(__doc__).parse_args()
    out = Console(highlight=False, markup=False)
    operations = []
    with backend(given) as model:
        out.print("Model:", model.get_model_name())
        out.print("Sort messages, after four examples")
        for at, message in enumerate(MESSAGES, 1):
            state = triage.run(message)
            out.print(f"  {message}: {state['label']}")
            operations.append((f"triage {at}", state.get_meta_info("label")))
        out.print("Read people out of sentences, as a dataclass")
        for at, state in enumerate(extract.run_batch([{"passage": each} for each in PASSAGES]), 1):
            out.print(f"  {state['person']}")
            operations.append((f"extract {at}", state.get_meta_info("person")))
        out.print("Ask a text three questions at once", TEXT, sep="\n  ")
        forks = ask.run(TEXT, QUESTIONS).ret_value
        for at, (question, fork) in enumerate(zip(QUESTIONS, forks, strict=True), 1):
            out.print(f"  {question} {fork['answer']}.")
            operations.append((f"ask, fork {at}", fork.get_meta_info("answer")))
        out.print(cache_table(operations))


if __name__ == "__main__":
    main()
