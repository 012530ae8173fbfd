"""A GGUF file served by Rootlace and by llama.cpp: `python -m benchmarks.gguf --gguf FILE`.

    python -m benchmarks.gguf --gguf FILE --llama-python PY [--json FILE] [--plot FILE.svg]

Both are servers with their defaults, asked over HTTP in turns, in one run: llama.cpp's own
(`--llama-server`), or that of the package xllamacpp (2026.10.11549) under the interpreter PY. It
has 16 slots with one KV cache for all (`--divided`: each has its part, which is faster for many
long contexts), flash attention where it chooses to, and its own reuse of prefixes. Prompts are new
in each round, so that nothing is known from the round before.

start    from starting the process to the first token of a short prompt, the second time
memory   proportional set size of all processes, after a short prompt and after 4,000 tokens
prefill  time to the first token of a prompt that nobody knows
decode   time between tokens of so many sequences behind prompts of so many tokens, drawn from the
         40 likeliest, so that drafts hardly help
W1 - W5  the workloads of `benchmarks.peers` at a scale of 0.25
programs those of `benchmarks.speculation` by OpenAI's interface, time per token of output: what
         drafts bring (llama.cpp's with `--llama-arguments "--spec-type ngram-simple"`)
records  60 sentences as JSON of a schema, four at a time
labels   60 rows behind the same 20 examples: the probabilities of the next token

Printed are medians, and how many times longer llama.cpp takes. Rounds in which other programs kept
more than 0.1 cores busy are dropped unless `--busy` says not to.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema

import rootlace as rl
from benchmarks.common import (
    ForeignLoad,
    Report,
    console_of,
    new_parser,
    new_table,
    progress_bar,
)
from benchmarks.peers.completion_server import DIRECT, Answer, Body, CompletionServer, LlamaServer
from benchmarks.peers.drive import drive
from benchmarks.peers.family import Family, end
from benchmarks.peers.workloads import WORKLOADS, Workload
from benchmarks.plot import figure_of, ratio_bars
from benchmarks.speculation import LOADS, RECORD, sentence, states_of
from rootlace.kernels.native.machine import usable_cores

DRIVER = Path(__file__).parent / "peers" / "drivers" / "serve_xllamacpp.py"
LEAST_ID, MOST_ID = 300, 40_000
"""Random prompts are of these tokens."""
SLOTS, CONTEXT = 16, 65536
DECODED = 48
QUIET = 0.1
START_SECONDS = 180
SCALE = 0.25
LONG = 4000

JSON_PROMPT = (
    "The person in each sentence as JSON.\n"
    f"Sentence: {sentence(7)}\n"
    'JSON: {"name": "Anna Berg", "age": 41, "town": "Norwick", "occupation": "pilot"}\n'
)


class Ours(CompletionServer):
    """Rootlace's server through sglang's interface, which returns token ids."""

    path = "/generate"

    def body(self, prompt: Sequence[int], wanted: int) -> Body:
        params = {"max_new_tokens": wanted, "temperature": 0, "ignore_eos": True}
        return {"input_ids": list(prompt), "sampling_params": params, "stream": True}

    def read(self, event: Body, answer: Answer) -> None:
        answer.ids[:] = event["output_ids"]
        answer.count = event["meta_info"]["completion_tokens"]
        answer.cached = event["meta_info"]["cached_tokens"]

    def reset(self) -> None:
        self.open("/flush_cache", {}).close()
        super().reset()

    def drawn(self, prompt: Sequence[int], seed: int) -> Body:
        body = self.body(prompt, DECODED)
        body["sampling_params"] |= {"temperature": 1, "top_k": 40, "sampling_seed": seed}
        return body

    def record(self, text: str) -> Body:
        params = {"max_new_tokens": 100, "temperature": 0, "json_schema": json.dumps(RECORD)}
        return {"text": text, "sampling_params": params}

    def label(self, text: str) -> Body:
        params = {"max_new_tokens": 1, "temperature": 0}
        return {
            "text": text,
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": 5,
        }

    @staticmethod
    def text(reply: Any) -> str:
        return str(reply["text"])


class Theirs(LlamaServer):
    """llama.cpp's server."""

    def drawn(self, prompt: Sequence[int], seed: int) -> Body:
        by = {"temperature": 1.0, "top_k": 40, "samplers": ["top_k", "temperature"], "seed": seed}
        return self.body(prompt, DECODED) | by

    def record(self, text: str) -> Body:
        plain = {"prompt": text, "n_predict": 100, "temperature": 0.0, "cache_prompt": True}
        return plain | {"json_schema": RECORD}

    def label(self, text: str) -> Body:
        plain = {"prompt": text, "n_predict": 1, "temperature": 0.0, "cache_prompt": True}
        return plain | {"n_probs": 5}

    @staticmethod
    def text(reply: Any) -> str:
        return str(reply["content"])


Server = Ours | Theirs


@dataclass(frozen=True)
class Engine:
    """How to start and ask a server."""

    name: str
    command: Callable[[int], list[str]]
    connect: Callable[[str], Server]

    @contextmanager
    def started(self) -> Iterator[tuple[Server, Family, float]]:
        """Start a server; return it, its processes, and the seconds until its first token."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # Modules are compiled once, as in an installed package.
        compiled = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        begun = time.perf_counter()
        process = subprocess.Popen(
            self.command(port),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=compiled,
        )
        family = Family(process.pid)
        try:
            url = f"http://127.0.0.1:{port}"
            while True:
                try:
                    DIRECT.open(f"{url}/health").close()
                    break
                except OSError:
                    if process.poll() is not None or time.perf_counter() - begun > START_SECONDS:
                        raise
                    time.sleep(0.01)
            server = self.connect(url)
            reply(server, server.label("Hello"))
            yield server, family, time.perf_counter() - begun
        finally:
            ours = list(family)
            process.terminate()
            end(ours, 20)


def engines(
    file: Path,
    python: Path | None,
    llama_server: Path | None,
    slots: int,
    context: int,
    divided: bool = False,
    given: str = "",
) -> list[Engine]:
    """Return our engine and llama.cpp's, whose slots share or divide a cache of `context` tokens.

    `given`: further arguments of llama.cpp's.
    """
    threads = str(usable_cores())

    def ours(port: int) -> list[str]:
        return [sys.executable, "-m", "rootlace.cli", "serve", str(file), "--port", str(port)]

    def theirs(port: int) -> list[str]:
        program = [str(llama_server)] if llama_server else [str(python), str(DRIVER)]
        sizes = ["-m", str(file), "--port", str(port), "-np", str(slots), "-c", str(context)]
        cache = "--no-kv-unified" if divided else "--kv-unified"
        more = ["-tb", threads] if llama_server else []
        return [*program, *sizes, "-t", threads, cache, *more, *given.split()]

    found = [Engine("rootlace", ours, partial(Ours, "rootlace"))]
    if python or llama_server:
        found.append(Engine("llama.cpp", theirs, partial(Theirs, "llama.cpp")))
    return found


def reply(server: Server, body: Body) -> Any:
    with server.open(server.path, body | {"stream": False}) as response:
        return json.load(response)


def memory(family: Family) -> float:
    """Return the megabytes of all processes; shared memory counts once."""
    return sum(process.memory_full_info().pss for process in family) / 1e6


def random_prompt(count: int, *seed: object) -> list[int]:
    draw = random.Random(repr(seed))
    return [draw.randrange(LEAST_ID, MOST_ID) for _ in range(count)]


# Measures -----------------------------------------------------------------------------------------


def prefill(server: Server, turn: int, count: int) -> float:
    """Return milliseconds to the first token."""
    prompt = random_prompt(count, "prefill", turn, count)
    begun = time.perf_counter()
    next(iter(server.events(server.body(prompt, 1))))
    return 1e3 * (time.perf_counter() - begun)


def decode(server: Server, turn: int, rows: int, context: int) -> float:
    """Return milliseconds between a sequence's tokens while all sequences decode."""
    times: list[list[float]] = [[] for _ in range(rows)]
    barrier = threading.Barrier(rows)

    def ask(row: int) -> None:
        body = server.drawn(random_prompt(context, "decode", rows, context, row), turn)
        barrier.wait()
        answer = Answer()
        for event in server.events(body):
            server.read(event, answer)
            times[row] += [time.perf_counter()] * (len(answer.ids) - len(times[row]))

    with ThreadPoolExecutor(rows) as pool:
        list(pool.map(ask, range(rows)))
    begun, ended = max(row[0] for row in times), min(row[-1] for row in times)
    steps = sum(begun < at <= ended for row in times for at in row) / rows
    return 1e3 * (ended - begun) / max(steps, 1e-9)


def workload(server: Server, turn: int, name: str) -> float:
    """Return the seconds of a workload."""
    return drive(server, Workload(name, turn, SCALE, MOST_ID)).wall


def records(server: Server, turn: int) -> float:
    """Return seconds. Raises ValidationError for an answer that does not fit the schema."""
    prompts = [
        f"{JSON_PROMPT}Sentence: {sentence(60 * turn + n)} ({turn}, {n})\nJSON:" for n in range(60)
    ]
    begun = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda text: reply(server, server.record(text)), prompts))
    seconds = time.perf_counter() - begun
    for one in replies:
        jsonschema.validate(json.loads(server.text(one)), RECORD)
    return seconds


def labels(server: Server, turn: int) -> float:
    """Return seconds."""
    shots = "".join(f"{sentence(n + turn)} Old: {'yes' if n % 3 else 'no'}\n" for n in range(20))
    prompts = [f"Run {turn}. Is the person old?\n{shots}{sentence(n)} Old:" for n in range(60)]
    begun = time.perf_counter()
    with ThreadPoolExecutor(SLOTS) as pool:
        list(pool.map(lambda text: reply(server, server.label(text)), prompts))
    return time.perf_counter() - begun


def programs(server: Server, turn: int, name: str) -> float:
    """Return milliseconds per token of output."""
    server.reset()
    backend = rl.OpenAIBackend(server.url + "/v1")
    try:
        rl.set_default_backend(backend)
        states, seconds = states_of(LOADS[name], f"Round {turn}. ")
    finally:
        rl.set_default_backend(None)
        backend.close()
    counts = (state.get_meta_info(gen)["completion_tokens"] for state in states for gen in state)
    return 1e3 * seconds / sum(counts)


Measure = Callable[[Server, int], float]
DECODES = [(rows, context) for context in (128, 2048) for rows in (1, 4, 8, 16)]
MEASURES: dict[str, tuple[str, Measure]] = {
    **{f"prefill {n}": ("ms", partial(prefill, count=n)) for n in (128, 1024, 4096)},
    **{
        f"decode {rows} x {context}": ("ms", partial(decode, rows=rows, context=context))
        for rows, context in DECODES
    },
    **{name: ("s", partial(workload, name=name)) for name in WORKLOADS},
    **{
        name: ("ms", partial(programs, name=name))
        for name in LOADS
        if name != "records as JSON"  # llama.cpp's /v1/completions has no schemas
    },
    "60 records": ("s", records),
    "60 labels": ("s", labels),
}


@dataclass
class Row:
    """Results of one measurement: for each engine the values of the quiet rounds."""

    unit: str
    values: dict[str, list[float]] = field(default_factory=dict)
    dropped: int = 0

    def note(self, name: str, value: float, foreign: float, busy: bool) -> None:
        values = self.values.setdefault(name, [])
        if busy or foreign <= QUIET:
            values.append(value)
        else:
            self.dropped += 1

    def median(self, name: str) -> float | None:
        values = self.values.get(name)
        return statistics.median(values) if values else None

    def ratio(self) -> float | None:
        """Return llama.cpp's median over ours."""
        ours, theirs = self.median("rootlace"), self.median("llama.cpp")
        return theirs / ours if ours and theirs else None


def starts(found: list[Engine], rows: dict[str, Row], rounds: int, busy: bool) -> None:
    """Measure start and memory; llama.cpp starts for one client, with a context of 4,096."""
    for name, unit in (("start", "s"), ("memory", "MB"), ("memory at 4k", "MB")):
        rows[name] = Row(unit)
    for turn in range(rounds + 1):
        for engine in found:
            load = ForeignLoad()
            with engine.started() as (server, family, seconds):
                small = memory(family)
                next(iter(server.events(server.body(random_prompt(LONG, "memory", turn), 1))))
                large = memory(family)
            foreign = load.cores()
            if turn:  # the first start fills the system's cache of files
                for name, value in zip(list(rows)[:3], (seconds, small, large), strict=True):
                    rows[name].note(engine.name, value, foreign, busy)


def keep(report: Report, rows: dict[str, Row]) -> None:
    report.add("rows", {name: vars(row) | {"ratio": row.ratio()} for name, row in rows.items()})
    report.write()


def main() -> None:
    parser = new_parser("gguf", __doc__)
    parser.add_argument("--gguf", type=Path, required=True, metavar="FILE")
    parser.add_argument("--llama-python", type=Path, metavar="PY", help="that has xllamacpp")
    parser.add_argument("--llama-server", type=Path, metavar="PATH")
    parser.add_argument("--llama-arguments", default="", metavar="TEXT", help="more of its own")
    parser.add_argument("--divided", action="store_true", help="llama.cpp's cache, among its slots")
    parser.add_argument("--only", nargs="+", choices=["starts", *MEASURES], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", action="store_true", help="keep what a busy machine measured")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.llama_python = args.llama_python and args.llama_python.absolute()
    console, report = console_of(90), Report("gguf", args)
    wanted = args.only or ["starts", *MEASURES]
    names = [name for name in MEASURES if name in wanted]
    rows: dict[str, Row] = {}
    peers = args.llama_python, args.llama_server
    with progress_bar(console) as bar:
        if "starts" in wanted:
            starts(engines(args.gguf, *peers, 1, 4096 + 64), rows, args.rounds, args.busy)
        task = bar.add_task("", total=len(names) * args.rounds)
        context = 2 * CONTEXT if args.divided else CONTEXT  # 8,192 tokens per slot
        both = engines(args.gguf, *peers, SLOTS, context, args.divided, args.llama_arguments)
        with ExitStack() as stack:
            asked = both if names else []
            servers = {one.name: stack.enter_context(one.started())[0] for one in asked}
            if "llama.cpp" in servers:
                with servers["llama.cpp"].open("/props", method="GET") as told:
                    report.found["llama.cpp"] = json.load(told).get("build_info")
            for name in names:
                unit, measure = MEASURES[name]
                rows[name] = Row(unit)
                for server in servers.values():  # decoding has put these prompts into the cache
                    if name.startswith("decode"):
                        measure(server, 0)
                for turn in range(1, args.rounds + 1):
                    bar.update(task, description=name, advance=1)
                    for each in sorted(servers, reverse=bool(turn % 2)):
                        load = ForeignLoad()
                        value = measure(servers[each], turn)
                        rows[name].note(each, value, load.cores(), args.busy)
                keep(report, rows)  # a run takes a quarter of an hour
    table = new_table(args.gguf.name, "", "unit", "rootlace", "llama.cpp", "times as fast")
    for name, row in rows.items():
        medians = [row.median(engine.name) for engine in both]
        cells = ["" if value is None else f"{value:.4g}" for value in (*medians, row.ratio())]
        table.add_row(name, row.unit, *cells)
    console.print(table, report.foreign_line())
    keep(report, rows)
    if args.plot:
        known = [name for name, row in rows.items() if row.ratio()]
        with figure_of(args.plot, figsize=(9, 3.2)) as (_, axes):
            ratio_bars(axes, {"": [rows[name].ratio() for name in known]}, known)
            axes.get_legend().remove()
            axes.tick_params(axis="x", labelrotation=60)
            axes.set_ylabel("llama.cpp / Rootlace")


if __name__ == "__main__":
    main()
