"""What white space does to constrained answers: `python -m benchmarks.whitespace [--json FILE]`.

Three tasks that programs give to a model: a person's name, age and city from a sentence, with the
field names alone to go by; lists of people or goods, after two examples as `json.dumps` writes
them; order records with numbers, a boolean and one of three words, after two indented examples.
Every row is asked without a constraint and with the schema in each `whitespace`, greedily, and
compared with the truth. An unconstrained answer counts if the first JSON value in it is right, be
there a fence or words around it. Printed per task: rows that are right, rows cut at `--max-tokens`,
tokens, how many of them were forced, and seconds.

The second task's schema is open (more properties are allowed), the others are closed: different
machines hold them. The rows of a mode are asked at once, and the cache is emptied before.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

import rootlace as rl
from benchmarks.common import Report, aim, console_of, new_parser, new_table, progress_bar

MODES = ("none", "compact", "flexible")
EXAMPLES = 2
BATCH = 20
"""Rows asked at once."""
EXACT, TOKENS = 0.98, 1.05
"""Of unconstrained: right rows at least, tokens at most."""

NAMES = [
    "Ida Lund",
    "Omar Haddad",
    "Priya Nair",
    "Jonas Weber",
    "Lucia Moreno",
    "Kenji Mori",
    "Amara Okafor",
    "Peter Novak",
    "Sofia Rossi",
    "Tomas Silva",
    "Hanna Virtanen",
    "Marek Kowalski",
    "Chloe Martin",
    "Daniel Cohen",
    "Greta Olsen",
    "Samuel Reed",
    "Nina Petrova",
    "Leila Karimi",
    "Ben Carter",
    "Rosa Keller",
]
CITIES = [
    "Oslo",
    "Cairo",
    "Mumbai",
    "Berlin",
    "Madrid",
    "Kyoto",
    "Lagos",
    "Prague",
    "Rome",
    "Lisbon",
    "Helsinki",
    "Warsaw",
    "Paris",
    "Haifa",
    "Bergen",
    "Boston",
    "Lima",
    "Shiraz",
    "Leeds",
    "Vienna",
]
SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "My neighbour {name}, {age}, moved to {city} last spring.",
    "At {age}, {name} runs a small bakery in {city}.",
    "{name} ({age}) works as a nurse in {city}.",
    "In {city} we met {name}, who had just turned {age}.",
)
GOODS = [
    "apples",
    "pens",
    "cups",
    "chairs",
    "lamps",
    "books",
    "plates",
    "candles",
    "towels",
    "spoons",
    "boxes",
    "hats",
]
INTEGER, STRING = {"type": "integer"}, {"type": "string"}


@dataclass(frozen=True)
class Row:
    question: str
    truth: Any
    schema: dict[str, Any]


@dataclass(frozen=True)
class Task:
    """`indent`: of the examples, which are its first rows; None: no indent."""

    name: str
    row: Callable[[random.Random], Row]
    examples: bool
    indent: int | None = None


@dataclass(frozen=True)
class Answer:
    question: str
    text: str
    exact: bool
    cut: bool
    tokens: int
    forced: int


@dataclass(frozen=True)
class Found:
    """Results of one task in one mode."""

    rows: int
    exact: int
    cut: int
    tokens: int
    forced: int
    seconds: float


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], **more}


def person(source: random.Random) -> Row:
    truth = {
        "name": source.choice(NAMES),
        "age": source.randint(19, 88),
        "city": source.choice(CITIES),
    }
    sentence = source.choice(SENTENCES).format(**truth)
    fields = {"name": STRING, "age": INTEGER, "city": STRING}
    schema = _object(fields, additionalProperties=False)
    return Row(f"{sentence}\nExtract name, age and city as JSON.", truth, schema)


def listing(source: random.Random) -> Row:
    count = source.randint(2, 3)
    people = source.random() < 0.5
    names = source.sample([name.split()[0] for name in NAMES] if people else GOODS, count)
    numbers = [source.randint(2, 80) for _ in names]
    parts = [
        f"{name} is {number}" if people else f"{number} {name}"
        for name, number in zip(names, numbers, strict=True)
    ]
    told = f"{', '.join(parts[:-1])} and {parts[-1]}"
    sentence = f"{told} years old." if people else f"The shop has {told}."
    keys = ("name", "age") if people else ("item", "count")
    what = "people" if people else "goods"
    question = (
        f'{sentence}\nList the {what} as a JSON array of objects with "{keys[0]}" and "{keys[1]}".'
    )
    truth = [dict(zip(keys, pair, strict=True)) for pair in zip(names, numbers, strict=True)]
    items = _object({keys[0]: STRING, keys[1]: INTEGER})
    return Row(question, truth, {"type": "array", "items": items})


def order(source: random.Random) -> Row:
    truth: dict[str, Any] = {
        "order": source.randint(1000, 9999),
        "quantity": source.randint(2, 40),
        "price": source.randint(5, 400) / 4,
        "gift": source.random() < 0.5,
        "method": source.choice(["card", "cash", "transfer"]),
    }
    question = (
        "Order {order}: {quantity} {item} at {price:.2f} each, gift: {said}, paid by {method}.\n"
        'Write "order", "quantity", "price", "gift" and "method" as JSON.'
    ).format(**truth, item=source.choice(GOODS), said="true" if truth["gift"] else "false")
    fields = {
        "order": INTEGER,
        "quantity": INTEGER,
        "price": {"type": "number"},
        "gift": {"type": "boolean"},
        "method": {"enum": ["card", "cash", "transfer"]},
    }
    return Row(question, truth, _object(fields, additionalProperties=False))


TASKS = (
    Task("person", person, examples=False),
    Task("list", listing, examples=True),
    Task("order", order, examples=True, indent=2),
)


def first_value(text: str) -> Any:
    """Return the first JSON object or array in a text; None without one."""
    decoder = json.JSONDecoder()
    for place, character in enumerate(text):
        if character in "{[":
            try:
                return decoder.raw_decode(text, place)[0]
            except ValueError:
                continue
    return None


@rl.function
def ask(s: Any, examples: list[tuple[str, str]], question: str, options: dict[str, Any]) -> None:
    for asked, answered in examples:
        s += rl.user(asked)
        s += rl.assistant(answered)
    s += rl.user(question)
    s += rl.assistant(rl.gen("answer", temperature=0, **options))


def measure(
    runtime: rl.Runtime,
    task: Task,
    mode: str,
    arguments: argparse.Namespace,
    advance: Callable[[int], None],
) -> tuple[Found, list[Answer]]:
    """Return the figures, and every answer."""
    source = random.Random(arguments.seed)
    rows = [task.row(source) for _ in range(arguments.rows + (EXAMPLES if task.examples else 0))]
    shown, rows = (rows[:EXAMPLES], rows[EXAMPLES:]) if task.examples else ([], rows)
    examples = [(row.question, json.dumps(row.truth, indent=task.indent)) for row in shown]
    asked = [
        {
            "examples": examples,
            "question": row.question,
            "options": {"max_tokens": arguments.max_tokens}
            | ({} if mode == "none" else {"json_schema": row.schema, "whitespace": mode}),
        }
        for row in rows
    ]
    answers: list[Answer] = []
    runtime.flush_cache()
    started = time.perf_counter()
    for place in range(0, len(rows), BATCH):
        states = ask.run_batch(asked[place : place + BATCH], backend=runtime)
        for row, state in zip(rows[place : place + BATCH], states, strict=True):
            meta, text = state.get_meta_info("answer"), state.text("answer")
            cut = meta["finish_reason"]["type"] == "length"
            counts = meta["completion_tokens"], meta.get("forced_tokens", 0)
            answers.append(Answer(row.question, text, first_value(text) == row.truth, cut, *counts))
        advance(len(states))
    seconds = time.perf_counter() - started
    sums = {
        name: sum(getattr(answer, name) for answer in answers)
        for name in ("exact", "cut", "tokens", "forced")
    }
    return Found(len(rows), **sums, seconds=round(seconds, 1)), answers


def compared(
    found: Found, answers: list[Answer], none: Found, free: list[Answer]
) -> dict[str, Any]:
    """Compare a mode with no constraint."""
    pairs = list(zip(answers, free, strict=True))
    return {
        "exact": aim(found.exact / max(1, none.exact), ">=", EXACT),
        "tokens": aim(found.tokens / none.tokens, "<=", TOKENS),
        "cut_alone": aim(sum(one.cut and not other.cut for one, other in pairs), "<=", 0),
        "worse": [
            {"question": one.question, "text": one.text, "unconstrained": other.text}
            for one, other in pairs
            if other.exact and not one.exact
        ],
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser("whitespace", __doc__)
    option, names = parser.add_argument, [task.name for task in TASKS]
    option("--model", default="smollm2", help="a chat model's name, folder or file")
    option("--rows", type=int, default=60, help="of each task")
    option("--max-tokens", type=int, default=150)
    option("--tasks", nargs="+", choices=names, default=names)
    option("--modes", nargs="+", choices=MODES, default=list(MODES))
    option("--seed", type=int, default=1)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console = console_of(100)
    report = Report("whitespace", arguments, "llguidance")
    report.found["options"]["model"] = Path(arguments.model).name
    tasks: dict[str, Any] = {}
    with rl.Runtime(arguments.model) as runtime, progress_bar(console) as bar:
        for task in [task for task in TASKS if task.name in arguments.tasks]:
            found: dict[str, Found] = {}
            answers: dict[str, list[Answer]] = {}
            for mode in arguments.modes:
                shown = bar.add_task(f"{task.name}, {mode}", total=arguments.rows)
                advance = partial(bar.advance, shown)
                found[mode], answers[mode] = measure(runtime, task, mode, arguments, advance)
                bar.remove_task(shown)
            told: dict[str, Any] = {"modes": found}
            tasks[task.name] = told
            if "none" in found:
                told["beside_none"] = {
                    mode: compared(found[mode], answers[mode], found["none"], answers["none"])
                    for mode in found
                    if mode != "none"
                }
            report.add("tasks", tasks)
            console.print(table(task.name, found))
            console.print(report.foreign_line())
            report.write()
    return 0


def table(name: str, found: dict[str, Found]) -> Table:
    made = new_table(name, "white space", "right", "cut", "tokens", "forced", "seconds")
    for mode, one in found.items():
        right = f"{one.exact} of {one.rows}"
        row = (right, one.cut, one.tokens, one.forced, one.seconds)
        made.add_row("(no constraint)" if mode == "none" else mode, *map(str, row))
    return made


if __name__ == "__main__":
    raise SystemExit(main())
