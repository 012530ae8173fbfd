"""JSON extraction served: constrained with forced text, constrained without, unconstrained."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema

import rootlace as rl
from benchmarks.common import ForeignLoad, percentile
from benchmarks.constrained.engines import load_tokenizer
from benchmarks.given import DATA
from examples.demo_model.evaluate import make_cases

MODES = ("constrained", "jump", "unconstrained")
LOADS = ("closed", "open", "records", "open records")
RECORD: dict[str, Any] = json.loads((DATA / "record.json").read_text())
"""Fixed fields with enumerations and short strings, the kind of record that the SGLang paper's JSON
decoding was measured on (Zheng et al. 2024, arXiv:2312.07104)."""


@dataclass(frozen=True)
class Extraction:
    """A prompt, and the schema of the answer."""

    prompt: list[int]
    schema: dict[str, Any]


@dataclass(frozen=True)
class Served:
    """A run in one mode: seconds, and the runtime's replies."""

    wall: float
    latencies: Sequence[float]
    replies: Sequence[dict[str, Any]]
    foreign_cores: float
    cpu: float

    def all(self, name: str) -> list[Any]:
        """Return a field of every reply's `meta_info`."""
        return [reply["meta_info"][name] for reply in self.replies]


def extraction_load(model: str, count: int, seed: int, kind: str) -> list[Extraction]:
    """Return passages to extract facts from.

    `closed` asks only for the facts that each passage states, one or two short fields, and allows
    no others; `records` asks for `RECORD` each time; `open` and `open records` are the same without
    `additionalProperties: false`.
    """
    tokenizer = load_tokenizer(Path(model))
    load = []
    for case in make_cases("extraction", count, seed, True):
        schema = dict(RECORD)
        if not kind.endswith("records"):
            answer = json.loads(case.answer)
            types = {k: "integer" if isinstance(v, int) else "string" for k, v in answer.items()}
            properties = {key: {"type": name} for key, name in types.items()}
            schema = {"type": "object", "properties": properties, "required": list(answer)}
        if not kind.startswith("open"):
            schema["additionalProperties"] = False
        ids = tokenizer.apply_chat_template(
            case.prompt, add_generation_prompt=True, return_dict=False
        )
        load.append(Extraction(list(ids), schema))
    return load


async def serve(
    engine: rl.Engine,
    load: Sequence[Extraction],
    mode: str,
    concurrency: int,
    lengths: Sequence[int],
) -> Served:
    """Serve all of `load`, at most `concurrency` at a time, greedily.

    Unconstrained, each request decodes as many tokens (`lengths`) as constrained, so that the modes
    compare the speed of decoding, not the length of answers. All modes find the prompts in the
    cache, but no earlier output, in which forced text would be found.
    """
    engine.flush_cache()
    prompts = [case.prompt for case in load]
    await engine.async_generate(input_ids=prompts, sampling_params={"max_new_tokens": 0})
    gate = asyncio.Semaphore(concurrency)

    async def ask(index: int) -> tuple[dict[str, Any], float]:
        params: dict[str, Any] = {"temperature": 0, "max_new_tokens": 256}
        if mode == "unconstrained":
            params |= {"max_new_tokens": lengths[index], "ignore_eos": True}
        else:
            jump = "canonical" if mode == "jump" else "off"
            schema = json.dumps(load[index].schema)
            params |= {"json_schema": schema, "whitespace": "compact", "jump_forward": jump}
        async with gate:
            start = time.perf_counter()
            reply = await engine.async_generate(input_ids=prompts[index], sampling_params=params)
            return reply, time.perf_counter() - start

    foreign, start = ForeignLoad(), time.perf_counter()
    found = await asyncio.gather(*(ask(index) for index in range(len(load))))
    wall = time.perf_counter() - start
    replies, latencies = zip(*found, strict=True)
    return Served(wall, latencies, replies, foreign.cores(), foreign.own_seconds())


def order_of(repetition: int) -> list[str]:
    """Order modes so that each comes first, second and last, and next to others, equally often."""
    start = repetition % len(MODES)
    order = [*MODES[start:], *MODES[:start]]
    return order if repetition // len(MODES) % 2 == 0 else order[::-1]


def runs_of(repetitions: int) -> int:
    """Return how often a load is served: once in each mode before measuring, then in turns."""
    return len(MODES) * (1 + repetitions)


def measure_serving(
    model: str,
    count: int,
    repetitions: int,
    concurrency: int,
    kind: str,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The three modes in turns on one runtime; every constrained output is checked.

    `progress` is called `runs_of(repetitions)` times.
    """
    load = extraction_load(model, count, 11, kind)
    runs: dict[str, list[Served]] = {mode: [] for mode in MODES}
    lengths: list[int] = []
    with rl.Engine(model_path=model) as engine:

        def run(mode: str) -> Served:
            served = asyncio.run(serve(engine, load, mode, concurrency, lengths))
            progress()
            return served

        # Once before measuring: prompts are cached, constraints compiled, masks made.
        for mode in MODES:
            served = run(mode)
            if mode != "unconstrained":
                check(load, served)
            if mode == "constrained":
                lengths = served.all("completion_tokens")
        for repetition in range(repetitions):
            for mode in order_of(repetition):
                runs[mode].append(run(mode))
    ratios = {
        # Ratios within a repetition cancel whatever slows the machine for a while.
        f"{mode} / unconstrained": median(
            plain.wall / served.wall
            for served, plain in zip(runs[mode], runs["unconstrained"], strict=True)
        )
        for mode in ("constrained", "jump")
    }
    return {
        "model": Path(model).name,
        "requests": count,
        "concurrency": concurrency,
        "load": kind,
        "modes": {mode: summarise(served) for mode, served in runs.items()},
        "repetitions": repetitions,
        "ratios": ratios,
    }


def check(load: Sequence[Extraction], served: Served) -> None:
    """Check an output; raises errors of json or jsonschema. An output that was cut off, as open
    schemas permit, is no whole text."""
    reasons = served.all("finish_reason")
    for case, reply, reason in zip(load, served.replies, reasons, strict=True):
        if reason["type"] != "length":
            jsonschema.Draft202012Validator(case.schema).validate(json.loads(reply["text"]))


def summarise(runs: Sequence[Served]) -> dict[str, float]:
    latencies = [value for run in runs for value in run.latencies]
    count, first = len(runs[0].replies), runs[0]
    tokens = sum(first.all("completion_tokens"))
    return {
        "tokens_per_second": median(sum(r.all("completion_tokens")) / r.wall for r in runs),
        "requests_per_second": median(count / run.wall for run in runs),
        "latency_p50_ms": percentile(latencies, 0.5) * 1e3,
        "latency_p99_ms": percentile(latencies, 0.99) * 1e3,
        "tokens": tokens,
        "forced_share": sum(first.all("forced_tokens")) / tokens,
        "cpu_ms_per_request": median(run.cpu / count for run in runs) * 1e3,
        "foreign_cores": max(run.foreign_cores for run in runs),
    }
