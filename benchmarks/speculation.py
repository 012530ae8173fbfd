"""What drafts from the cache save: `python -m benchmarks.speculation --model FILE [--json FILE]`.

Loads of programs that repeat what they read (answers that quote, an agent that copies what its
tools told, an edit of a file), what others wrote (votes, self-consistency), the form of answers
before (records as JSON), and nothing (chats). Each with `speculation_tokens` 0 and as given, in
turns, caches flushed before every turn, each answer compared with the other's to the token. Printed
are medians of the rounds' ratios of output tokens per second, and how many tokens came of drafts.
"""

from __future__ import annotations

import html
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import rootlace as rl
from benchmarks.common import Report, console_of, new_parser, progress_bar, table_of
from benchmarks.random_models import make_pair
from rootlace.runtime.assets import demo_model

PASSAGES = (
    "The lighthouse of Varn stands on a cliff of black stone, forty metres above the sea. It was "
    "built in 1841 by the sisters Helga and Ilse Brandt, after their brother was lost in a storm. "
    "Its lamp burned whale oil until 1893, then gas, and since 1926 it has been electric. Ships "
    "see its light from thirty kilometres away. The last keeper, Otto Lindqvist, left in 1978; "
    "since then a small computer in the harbour has switched the lamp on and off.",
    "The market of Alden opens every Thursday at six in the morning. Farmers from the valley sell "
    "apples, honey, goat cheese and rye bread. The fish comes from Norwick, on a train that leaves "
    "at four. Near the fountain an old woman named Rosa Bell mends shoes, and has done so for "
    "fifty years. At noon the bell of the town hall rings, and everything that is left is sold "
    "for half of its price.",
    "The river Tessel rises in the Grey Hills and flows two hundred kilometres to the sea. In "
    "spring it floods the meadows of Lindau, which makes their soil rich. Three bridges cross it: "
    "the Stone Bridge of 1602, the railway bridge of 1877, and the new bridge, which only "
    "bicycles may use. Otters live below the second weir. In the summer of 1911 the river was so "
    "low that people walked from one bank to the other.",
    "The library of Bergfeld has ninety thousand books and a cat called Comma. Its oldest book is "
    "a herbal of 1533, kept in a box of cedar wood. Members may take six books home for four "
    "weeks. The reading room has a glass roof, made in 1888 by the engineer Paul Ostrow. In the "
    "winter of 1944 the librarian Anna Meer hid eleven children behind the shelves of the "
    "geography section.",
    "The Sandvik engine is a pump that needs no fuel. A column of warm water lifts a copper "
    "piston, and cold water from a stream lets it fall again, nine times a minute. It was "
    "invented in 1868 by Lars Sandvik, a teacher of music, to water the gardens of his school. "
    "Two of the engines still run: one in the museum of Riga, and one on a farm near Oslo, where "
    "it has worked for more than a century.",
)
ASKED = (
    "Repeat what the text says about its beginning, word for word.",
    "Quote the sentence with a year in it.",
    "Which names are in the text? Quote each sentence with a name.",
    "Quote the last sentence of the text.",
    "Quote the text from its second sentence on.",
    "Repeat the whole text.",
)
CHATS = (
    "Write a short poem about the wind.",
    "Explain why the sky is blue.",
    "What should I cook for four friends?",
    "Tell me a story about a fox and a clock.",
    "How do I learn to play the piano?",
    "Describe a day in the life of a baker.",
    "What are the advantages of trains?",
    "Give me advice for a long walk in the mountains.",
)
NAMES = ("Ida Lund", "Karl Brandt", "Maria Costa", "Tom Becker", "Anna Berg", "Olaf Weiss")
TOWNS = ("Bergfeld", "Norwick", "Alden", "Lindau", "Riga", "Varn", "Tessel")
JOBS = ("pilot", "baker", "judge", "nurse", "teacher", "carpenter", "librarian", "gardener")
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "town": {"type": "string", "maxLength": 40},
        "occupation": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "age", "town", "occupation"],
    "additionalProperties": False,
}


@rl.function
def answer(
    s: rl.ProgramState,
    prompt: str,
    tokens: int = 96,
    seed: int | None = None,
    logprobs: bool = False,
) -> None:
    heat = 0.0 if seed is None else 0.7
    text = rl.gen("answer", max_tokens=tokens, temperature=heat, seed=seed or 0, logprobs=logprobs)
    s += rl.user(prompt) + rl.assistant(text)


@rl.function
def agent(s: rl.ProgramState, subject: int, mark: str = "") -> None:
    """Look into a document and write down findings, step by step."""
    s += f"{mark}Each observation is copied into the notes, word for word.\n"
    for step in range(3):
        passage = PASSAGES[(subject + step) % len(PASSAGES)]
        s += f"Action: open document {step}\nObservation: {passage}\nNotes: {passage[:60]}"
        s += rl.gen(f"notes{step}", max_tokens=96, temperature=0.0, stop="\nAction")
        s += "\n"


@rl.function
def edit(s: rl.ProgramState, mark: str = "") -> None:
    s += (
        f"{mark}A file:\n```python\n{SOURCE}```\nThe same file with `area` in place of `surface`:\n"
    )
    s += "```python\n" + SOURCE[:120].replace("surface", "area")
    s += rl.gen("answer", max_tokens=400, temperature=0.0)


@rl.function
def record(s: rl.ProgramState, text: str, mark: str = "") -> None:
    s += f"{mark}The person in each sentence as JSON.\n"
    s += f"Sentence: {sentence(7)}\nJSON: "
    s += '{"name": "Anna Berg", "age": 41, "town": "Norwick", "occupation": "pilot"}\n'
    s += f"Sentence: {text}\nJSON: "
    s += rl.gen("answer", json_schema=RECORD, max_tokens=80, temperature=0.0)


SOURCE = "import math\n\n" + "\n\n".join(
    f"def surface_of_{name}(size):\n    if size < 0:\n        raise ValueError('size must not be "
    f"negative')\n    surface = {rule}\n    return round(surface, 2)\n"
    for name, rule in (
        ("square", "size * size"),
        ("circle", "math.pi * size * size"),
        ("cube", "6 * size * size"),
        ("sphere", "4 * math.pi * size * size"),
        ("triangle", "math.sqrt(3) / 4 * size * size"),
        ("hexagon", "3 * math.sqrt(3) / 2 * size * size"),
        ("octagon", "2 * (1 + math.sqrt(2)) * size * size"),
        ("tetrahedron", "math.sqrt(3) * size * size"),
    )
)


def sentence(at: int) -> str:
    name, town = NAMES[at % len(NAMES)], TOWNS[at % len(TOWNS)]
    return (
        f"{name} is {20 + 7 * at % 60} years old, lives in {town} and is a {JOBS[at % len(JOBS)]}."
    )


def quoting() -> list[str]:
    return [f"{passage}\n\n{asked}" for passage in PASSAGES for asked in ASKED]


Program = Callable[[], rl.ProgramState]


@dataclass(frozen=True)
class Load:
    """Programs, so many at a time, whose prompts begin with a mark."""

    programs: Callable[[str], list[Program]]
    at_once: int = 1


def answering(
    prompts: Iterable[str], tokens: int = 96, votes: int = 1
) -> Callable[[str], list[Program]]:
    seeds = range(1, votes + 1) if votes > 1 else (None,)
    asked = [(prompt, seed) for prompt in prompts for seed in seeds]
    return lambda mark: [partial(answer.run, mark + prompt, tokens, seed) for prompt, seed in asked]


SUMS = [f"Tom has {a} apples and buys {b} more. How many has he? Think." for a, b in
        ((15, 28), (7, 9), (31, 12), (22, 22))]  # fmt: skip
LOADS = {
    "answers that quote": Load(answering(quoting()[::3])),
    "answers that quote, 8 at once": Load(answering(quoting()), 8),
    "agent that copies": Load(lambda mark: [partial(agent.run, n, mark) for n in range(3)]),
    "edit of a file": Load(lambda mark: [partial(edit.run, mark)]),
    "vote of 8": Load(answering(SUMS[:2], 64, votes=8)),
    "self-consistency, 4 at once": Load(answering(SUMS, 64, votes=5), 4),
    "records as JSON": Load(
        lambda mark: [partial(record.run, sentence(n), mark) for n in range(20)]
    ),
    "chats": Load(answering(CHATS, 64)),
    "chats, 8 at once": Load(answering(CHATS, 64), 8),
}


@dataclass(frozen=True)
class Finding:
    """Results of a load: output tokens, tokens per second without and with drafts (medians), the
    median of the rounds' ratios, and the shares of the output from drafts, by source."""

    tokens: int
    without: float
    with_drafts: float
    speedup: float
    spread: tuple[float, float]
    drafts: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Run:
    answers: list[list[int]]
    seconds: float
    drafts: dict[str, dict[str, int]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


def states_of(load: Load, mark: str = "") -> tuple[list[rl.ProgramState], float]:
    """Return the ended programs of a load on the default backend, and the seconds."""
    programs, begun = load.programs(mark), time.perf_counter()
    with ThreadPoolExecutor(load.at_once) as pool:
        states = list(pool.map(lambda program: program(), programs))
        for state in states:
            state.sync()
    return states, time.perf_counter() - begun


def run(runtime: rl.Runtime, load: Load) -> Run:
    rl.set_default_backend(runtime)
    rl.flush_cache(runtime)
    states, seconds = states_of(load)
    answers: list[list[int]] = []
    drafts: dict[str, dict[str, int]] = {}
    for state in states:
        for name in state:
            meta = state.get_meta_info(name)
            answers.append(meta["output_ids"])
            for source, counts in meta.get("drafts", {}).items():
                sums = drafts.setdefault(source, dict.fromkeys(counts, 0))
                for kind, count in counts.items():
                    sums[kind] += count
    return Run(answers, seconds, drafts)


def compare(off: rl.Runtime, on: rl.Runtime, name: str, rounds: int) -> Finding:
    turns: list[tuple[Run, Run]] = []
    for number in range(rounds):
        order = (off, on) if number % 2 else (on, off)
        done = [run(runtime, LOADS[name]) for runtime in order]
        turns.append((done[order.index(off)], done[order.index(on)]))
        if turns[-1][0].answers != turns[-1][1].answers:
            raise AssertionError(f"{name}: other tokens with drafts than without")
    ratios = [one.seconds / other.seconds for one, other in turns]
    last = turns[-1][1]
    without, with_drafts = (
        statistics.median(turn[at].tokens / turn[at].seconds for turn in turns) for at in (0, 1)
    )
    return Finding(
        last.tokens,
        without,
        with_drafts,
        statistics.median(ratios),
        (min(ratios), max(ratios)),
        last.drafts,
    )


COLOURS = {"sampled": "#555555", "tree": "#2e7d4f", "output": "#6a4fb3", "model": "#a1486a"}
SAYS = {
    "sampled": "sampled",
    "tree": "from other requests",
    "output": "from its own prompt or text",
    "model": "by a draft model",
}


def picture(runtime: rl.Runtime) -> str:
    """Draw an answer as SVG, each token in the colour of its source."""
    rl.set_default_backend(runtime)
    for asked in ASKED[:2]:
        answer.run(f"{PASSAGES[2]}\n\n{asked}")
    state = answer.run(f"{PASSAGES[2]}\n\n{ASKED[2]}", logprobs=True)
    texts = [entry[2] for entry in state.get_meta_info("answer")["output_token_logprobs"]]
    (span,) = state.trace().spans
    kinds = [one.kind for one in span.stretches for _ in range(one.tokens)]
    lines, column, line = [], 0, 0
    for text, kind in zip(texts, kinds, strict=True):
        shown = text.replace("\n", "\u21b5")
        if column + len(shown) > 88:
            column, line = 0, line + 1
        place = f'x="{20 + 7.9 * column:.1f}" y="{66 + 26 * line}"'
        size = f'width="{7.9 * len(shown) - 1:.1f}" height="20" y="{52 + 26 * line}"'
        if kind != "sampled":
            box = f'x="{20 + 7.9 * column:.1f}" {size} rx="3" fill="{COLOURS[kind]}"'
            lines.append(f'<rect {box} fill-opacity="0.18"/>')
        lines.append(
            f'<text {place} fill="{COLOURS[kind]}" xml:space="preserve">{html.escape(shown)}</text>'
        )
        column += len(shown)
    legend = [
        f'<text x="{20 + 210 * at}" y="28" fill="{COLOURS[kind]}">'
        f"{kinds.count(kind)} {SAYS[kind]}</text>"
        for at, kind in enumerate(SAYS)
        if kind != "model" or kind in kinds
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="740" height="{90 + 26 * line}"'
    style = 'font-family="monospace" font-size="13"'
    body = "\n".join((*legend, *lines))
    return f'{head} {style}>\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


def main() -> None:
    parser = new_parser("speculation", __doc__)
    parser.add_argument("--model", type=Path, default=demo_model(), help="a folder or a GGUF file")
    parser.add_argument("--load", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1 << 18, help="that the index holds")
    parser.add_argument("--draft-model", type=Path, help="that drafts beside the texts")
    parser.add_argument("--pair", type=Path, help="folder to make random models in, with a draft")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw one answer, and no more")
    args = parser.parse_args()
    console, report = console_of(90), Report("speculation", args)
    found: dict[str, Finding] = {}
    if args.pair is not None:
        if not (args.pair / "draft").exists():
            make_pair(args.pair)
        args.model, args.draft_model = args.pair / "target", args.pair / "draft"
    model = str(args.model)
    if args.picture is not None:
        with rl.Runtime(model, speculation_tokens=args.tokens) as runtime:
            args.picture.write_text(picture(runtime), encoding="utf-8")
        return
    with (
        rl.Runtime(model, speculation_tokens=0) as off,
        rl.Runtime(model, speculation_tokens=args.tokens, draft_model=args.draft_model or "") as on,
        progress_bar(console) as bar,
    ):
        for name in bar.track(args.load, description="loads"):
            found[name] = compare(off, on, name, args.rounds)
    columns = {
        "tokens": "{tokens}",
        "tokens/s": "{without:.1f}",
        "with drafts": "{with_drafts:.1f}",
        "speedup": "{speedup:.2f}",
        "accepted": "{accepted:.2f}",
        "rejected": "{rejected:.2f}",
    }
    rows = {}
    for name, one in found.items():
        kinds = {
            kind: sum(counts[kind] for counts in one.drafts.values()) / max(one.tokens, 1)
            for kind in ("accepted", "rejected")
        }
        rows[name] = asdict(one) | kinds
    console.print(table_of("Output tokens per second; drafts per output token", rows, columns))
    console.print(report.foreign_line())
    report.add("findings", found)
    report.write()


if __name__ == "__main__":
    main()
