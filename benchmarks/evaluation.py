"""Few-shot evaluation beside lm-eval's `hf` and `vllm` back ends, on the CPU, in one run.

    python -m benchmarks.evaluation --data DIR --model DIR --peer-python hf=PATH --peer-python \
vllm=PATH --json benchmarks/results/evaluation.json

Rows of MMLU with 5 examples and of HellaSwag with 20 (the same ones for all rows), each choice
scored by its log-likelihood. Every engine gets the same texts, with its model loaded and its cache
empty; a peer is held still while others run. Ourselves are all of `rootlace eval` but its start.
Printed per load: rows per second of each, how many times longer the peers take, the share of rows
where the choice is the same, and, for ourselves, what twice and four times as many rows cost: the
tokens that were computed, and the time they took.

DIR of the data holds `mmlu/*_{dev,test}.jsonl` and `hellaswag/rc_5shot.jsonl` (query, choices,
gold). A peer's interpreter has lm-eval with that back end (for `hf` also accelerate).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import rootlace as rl
from benchmarks.common import Report, aim, console_of, new_parser, new_table
from benchmarks.peers.drive import PeerError
from benchmarks.peers.known_peers import KNOWN_PEERS, Setting
from benchmarks.peers.peer_process import PeerProcess
from rootlace.evaluation.questions import Question, read_questions
from rootlace.evaluation.run import Results, evaluate
from rootlace.evaluation.task import Task, ready_task
from rootlace.kernels.native.machine import usable_cores

DRIVER = Path(__file__).with_name("log_likelihoods") / "run_lm_eval.py"
TARGET = 3.0
LIMIT = 600.0
"""Seconds that a peer may take to load, and for a load."""
GROWTH = (1, 2, 4)


@dataclass(frozen=True)
class Load:
    """`rows` of a task; `arguments` are those of `ready_task`."""

    name: str
    format: str
    data: str
    shots: int
    shots_data: str = ""

    def task(self, folder: Path, rows: int) -> Task:
        given = {"data": str(folder / self.data), "shots.count": self.shots, "limit": rows}
        if self.shots_data:
            given["shots.data"] = str(folder / self.shots_data)
        return ready_task(self.format, given)


LOADS = {
    "mmlu": Load(
        *("MMLU, 5 shots", "mmlu", "mmlu/philosophy_test.jsonl", 5, "mmlu/philosophy_dev.jsonl")
    ),
    "hellaswag": Load("HellaSwag, 20 shots", "prepared", "hellaswag/rc_5shot.jsonl", 20),
}


@dataclass(frozen=True)
class Ours:
    """`rows` of a load: time, tokens of the prompts, and tokens that the engine computed."""

    rows: int
    seconds: float
    prompt_tokens: int
    computed_tokens: int


def requests_of(questions: Sequence[Question], delimiter: str) -> list[tuple[str, str]]:
    """Return (context, continuation) of each choice, as lm-eval asks for them."""
    return [
        (question.before + question.prompt, delimiter + choice)
        for question in questions
        for choice in question.choices
    ]


def chosen(log_likelihoods: Sequence[float], questions: Sequence[Question]) -> list[int]:
    """Return the likeliest choice of each question."""
    left = iter(log_likelihoods)
    found = []
    for question in questions:
        values = [next(left) for _ in question.choices]
        found.append(values.index(max(values)))
    return found


def run_ours(runtime: rl.Runtime, task: Task) -> tuple[Ours, Results]:
    runtime.flush_cache()
    before = runtime.get_server_info()["computed_tokens"]
    found = evaluate(task, runtime)
    if found.failures:
        raise RuntimeError(str(found.failures[0]))
    computed = runtime.get_server_info()["computed_tokens"] - before
    return Ours(len(found.records), found.seconds, found.prompt_tokens, computed), found


def peers(arguments: argparse.Namespace, work: Path) -> Iterator[PeerProcess]:
    """Load every peer and suspend it."""
    setting = Setting(work, arguments.threads, arguments.dtype, 2, LIMIT)
    for name, python in arguments.peer_python.items():
        environment = {"OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
        if name == "vllm":
            _, _, more = KNOWN_PEERS["vllm"].prepare(Path(python), arguments.model, setting)
            environment = {**environment, **more}
        options = ["--backend", name, "--model", str(arguments.model), "--dtype", arguments.dtype]
        options += ["--threads", str(arguments.threads)]
        log = work / f"{name}.log"
        yield PeerProcess(name, Path(python), DRIVER, options, environment, log, LIMIT)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser("evaluation", __doc__)
    option = parser.add_argument
    option("--data", type=Path, required=True, metavar="DIR", help="the evaluation sets")
    option("--model", type=Path, required=True, metavar="DIR", help="a checkpoint")
    option("--peer-python", action="append", default=[], metavar="BACKEND=PATH", help="hf, vllm")
    option("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    option("--rows", type=int, default=16, help="of each load, for all engines")
    option("--repetitions", type=int, default=3, help="of ourselves; a peer does each load once")
    option("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    option("--threads", type=int, default=usable_cores(), help="of each engine")
    found = parser.parse_args(argv)
    found.peer_python = dict(given.split("=", 1) for given in found.peer_python)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console = console_of(100)
    report = Report("evaluation", arguments)
    about: dict[str, Any] = {}
    loads: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rootlace-evaluation-") as work, ExitStack() as stack:
        started = [stack.enter_context(peer) for peer in peers(arguments, Path(work))]
        about = {peer.name: peer.about for peer in started}
        runtime = stack.enter_context(
            rl.Runtime(
                arguments.model, dtype=arguments.dtype, device="cpu", threads=arguments.threads
            )
        )
        evaluate(LOADS["mmlu"].task(arguments.data, 2), runtime)  # compiles once
        for load in [LOADS[name] for name in arguments.loads]:
            loads[load.name] = measure(load, arguments, runtime, started)
            console.print(_table(load.name, loads[load.name]))
    report.add("peers", about)
    report.add("loads", loads)
    console.print(report.foreign_line())
    report.write()
    return 0


def measure(
    load: Load, arguments: argparse.Namespace, runtime: rl.Runtime, started: Sequence[PeerProcess]
) -> dict[str, Any]:
    """Measure one load: our engine, with more and more rows, and every peer."""
    task = load.task(arguments.data, arguments.rows)
    questions = read_questions(task)
    runs = [run_ours(runtime, task) for _ in range(arguments.repetitions)]
    seconds = median(one.seconds for one, _ in runs)
    choice = [scores for record in runs[0][1].records for scores in record.log_likelihoods]
    more = [run_ours(runtime, load.task(arguments.data, arguments.rows * k))[0] for k in GROWTH[1:]]
    found: dict[str, Any] = {
        "ours": {**vars(runs[0][0]), "seconds": seconds},
        "runs": [one.seconds for one, _ in runs],
        "growth": [vars(one) for one in (runs[0][0], *more)],
        "peers": {},
    }
    for peer in started:
        try:
            answer, foreign = peer.ask({"requests": requests_of(questions, task.delimiter)})
        except PeerError as error:
            found["peers"][peer.name] = {"error": str(error)}
            continue
        theirs = chosen(answer["log_likelihoods"], questions)
        same = [a == b for a, b in zip(chosen(choice, questions), theirs, strict=True)]
        found["peers"][peer.name] = {
            "seconds": answer["seconds"],
            "ratio": aim(answer["seconds"] / seconds, ">=", TARGET),
            "same_choice": sum(same) / len(same),
            "foreign_cores": foreign.cores(),
        }
    return found


def _table(name: str, found: dict[str, Any]) -> Any:
    ours = found["ours"]
    table = new_table(name, "", "rows", "seconds", "rows/s", "x longer", "same choice", "computed")
    for one in found["growth"]:
        if one["rows"] == ours["rows"]:
            one = ours
        rate, computed = one["rows"] / one["seconds"], f"{one['computed_tokens']:,}"
        cells = (str(one["rows"]), f"{one['seconds']:.2f}", f"{rate:.2f}", "", "", computed)
        table.add_row("rootlace eval", *cells)
    for peer, said in found["peers"].items():
        if "error" in said:
            table.add_row(f"lm-eval, {peer}", said["error"][:40])
            continue
        table.add_row(
            f"lm-eval, {peer}",
            str(ours["rows"]),
            f"{said['seconds']:.2f}",
            f"{ours['rows'] / said['seconds']:.2f}",
            f"{said['ratio']['value']:.1f}",
            f"{said['same_choice']:.0%}",
            f"{ours['prompt_tokens']:,}",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
