"""Run worlds by their seeds; shrink and print those that fail.

    python -m tests.deterministic --seeds 0:1000 [--jobs 2] [--programs 60] [--no-shrink] [--first]
    python -m tests.deterministic --replay FILE

A world is a runtime and its clients on a virtual clock (docs/simulation.md). `--replay` runs a
scenario from a file.
"""

import argparse
import multiprocessing
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.deterministic.run import Result, run
from tests.deterministic.scenario import Scenario, draw
from tests.deterministic.shrink import shrink

MAX_SHRUNK = 3
"""Most failures that are shrunk; of further ones only the seed is printed."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deterministic")
    parser.add_argument("--seeds", default="0:100", metavar="FROM:TO")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--programs", type=int, default=60, help="programs of a world")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--first", action="store_true", help="end with the first that fails")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.replay:
        result = run(msgspec.json.decode(options.replay.read_bytes(), type=Scenario))
        print(short(result.failure) or "all held")
        return 1 if result.failure else 0
    first, last = map(int, options.seeds.split(":"))
    jobs = [(seed, options.programs) for seed in range(first, last)]
    began, worlds, operations, virtual, failed = time.perf_counter(), 0, 0, 0.0, 0
    for seed, result in _results(jobs, options.jobs):
        worlds += 1
        operations += result.operations
        virtual += result.virtual_seconds
        if result.failure:
            failed += 1
            print(f"seed {seed}: {short(result.failure)}", flush=True)
            if failed <= MAX_SHRUNK and not options.no_shrink:
                _shrink_and_print(draw(seed, options.programs), result)
            if options.first:
                break
    seconds = time.perf_counter() - began
    print(
        f"{worlds} worlds, {operations:,} operations, {virtual:,.0f} virtual seconds in "
        f"{seconds:.0f} s ({operations / seconds:.0f} operations a second): {failed} failed"
    )
    return 1 if failed else 0


def _results(jobs: list[tuple[int, int]], processes: int) -> Iterator[tuple[int, Result]]:
    if processes == 1:
        yield from map(_run, jobs)
        return
    # Workers are restarted now and then, so that their caches do not grow without bound.
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=200) as pool:
        yield from pool.imap_unordered(_run, jobs)


def _run(job: tuple[int, int]) -> tuple[int, Result]:
    seed, programs = job
    return seed, run(draw(seed, programs))


def _shrink_and_print(scenario: Scenario, result: Result) -> None:
    small, runs = shrink(scenario, lambda other: alike(run(other).failure, result.failure))
    failure = run(small).failure
    print(f"  shrunk from {scenario.size} to {small.size} parts in {runs} runs: {short(failure)}")
    print(msgspec.json.encode(small).decode(), flush=True)


def alike(one: str, other: str) -> bool:
    """Whether two failures may have one cause, judged by their texts."""
    return bool(one) and _kind(one) == _kind(other)


def _kind(failure: str) -> str:
    """Return the words of a failure, without parts that belong to its world."""
    op = re.search(r"\): (.*?); it ended at .*? with (\w+)", failure, re.DOTALL)
    said = f"{op[1]} {op[2]}" if op else failure
    return " ".join(re.findall(r"[A-Za-z]+", said)[:5])


def short(text: str) -> str:
    """Return the text without the default fields of operations."""
    names = (
        "top_p|top_k|min_p|\\w+_penalty|logit_bias|top_logprobs|prompt_logprobs_from|"
        "skip_special_tokens|no_stop_trim|whitespace|strict|tell_cached|name|ignore_eos"
    )
    return re.sub(rf"\b({names})=[^,)]*(, )?", "", text)
