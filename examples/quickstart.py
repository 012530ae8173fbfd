"""Sort a headline, give tips on its subject, expand each in a branch of its own, and sum up.

    python examples/quickstart.py [--model PATH | --url URL] ["a headline"]

The program shows the whole of Rootlace in one piece: few-shot examples, a constrained choice, text
that streams while it is written, a fork whose branches share everything before them, and a join.
Then a table of what the cache did.
"""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import rootlace as rl
from backend import arguments, backend

TIPS_ON = {"health": "staying healthy", "travel": "planning a trip", "money": "saving money"}

EXAMPLES = """\
Headline: the nurse gave the vaccine
Topic: health

Headline: the bank raised interest rates
Topic: money

Headline: pack a suitcase for the trip
Topic: travel

Headline: the medicine cures the cough
Topic: health

"""


@rl.function
def advise(s: rl.ProgramState, headline: str) -> list[tuple[str, dict[str, Any]]]:
    s += rl.user(EXAMPLES + f"Headline: {headline}\nTopic:")
    s += rl.assistant(rl.select("topic", list(TIPS_ON)))

    s += rl.user(f"Give two tips for {TIPS_ON[s['topic']]}.")
    s += rl.assistant(rl.gen("tips", max_tokens=48, temperature=0))

    forks = s.fork(2)
    forks += lambda i: rl.user(f"Expand tip {i + 1} in one sentence.")
    forks += rl.assistant(rl.gen("more", max_tokens=48, temperature=0))
    forks.join("concate_and_append")

    s += rl.user("Sum up the tips in one sentence.")
    s += rl.assistant(rl.gen("summary", max_tokens=48, temperature=0))

    branches = [(f"more, fork {i}", fork.get_meta_info("more")) for i, fork in enumerate(forks)]
    own = [(name, s.get_meta_info(name)) for name in ("topic", "tips", "summary")]
    return [*own[:2], *branches, own[2]]


def cache_table(title: str, operations: list[tuple[str, dict[str, Any]]]) -> Table:
    """What each operation found in the cache, what was computed, and how fast it wrote."""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column("operation")
    for name in ("prompt tokens", "cached", "computed", "written", "tokens/s"):
        table.add_column(name, justify="right")
    total = [0, 0, 0, 0]
    for name, meta in operations:
        prompt, cached = meta["prompt_tokens"], meta["cached_tokens"]
        numbers = [prompt, cached, prompt - cached, meta["completion_tokens"]]
        total = [a + b for a, b in zip(total, numbers, strict=True)]
        table.add_row(name, *map(str, numbers), f"{numbers[3] / meta['e2e_latency']:.0f}")
    table.add_section()
    table.add_row("all", *map(str, total), "")
    return table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("headline", nargs="?", default="the flight lands in the evening")
    given = parser.parse_args()
    console = Console(highlight=False)
    with backend(given):
        state = advise.run(given.headline, stream=True)
        for text in state.text_iter():
            console.print(text, end="", markup=False, soft_wrap=True)
        assert state.error() is None
        console.print(cache_table("\nWhat the cache did", state.ret_value))
        again = advise.run("stocks fell on Friday")
        console.print(cache_table("The same program on another headline", again.ret_value))


if __name__ == "__main__":
    main()
