"""JSON extraction served: constrained with forced text, constrained without, unconstrained."""

from __future__ import annotations

import asyncio
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
from transformers import AutoTokenizer

import rootlace as rl
from benchmarks.common import ForeignLoad, percentile
from examples.demo_model.evaluate import make_cases

MODES = ("unconstrained", "constrained", "jump")


@dataclass(frozen=True)
class Extraction:
    """A prompt, the schema of what is asked for, and the right answer where there is one."""

    prompt: tuple[int, ...]
    schema: dict[str, Any]
    answer: dict[str, Any] | None

    @functools.cached_property
    def schema_text(self) -> str:
        return json.dumps(self.schema)


@dataclass(frozen=True)
class Served:
    """One mode, once. Seconds."""

    wall: float
    tokens: int
    forced: int
    latencies: tuple[float, ...]
    outputs: tuple[str, ...]
    lengths: tuple[int, ...]
    cut: tuple[bool, ...]
    """Which outputs `max_new_tokens` ended."""
    foreign_cores: float
    cpu: float


RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "pattern": "^[A-Z][a-z]{1,11} [A-Z][a-z]{1,11}$"},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"enum": ["singer", "teacher", "farmer", "doctor", "something else"]},
        "employment_status": {"enum": ["employed", "self-employed", "retired", "student"]},
        "phone_number": {"type": "string", "pattern": "^555-[0-9]{4}$"},
        "city_of_residence": {"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"},
        "preferred_contact": {"enum": ["phone", "email", "letter"]},
        "is_subscribed": {"type": "boolean"},
    },
}
RECORD["required"] = list(RECORD["properties"])
"""Fixed fields with enumerations and short strings, the kind of record that the SGLang paper's JSON
decoding was measured on (Zheng et al. 2024, arXiv:2312.07104)."""


def extraction_load(model: str, count: int, seed: int, kind: str) -> list[Extraction]:
    """Passages to take facts from.

    `closed` asks for just the facts each passage states, one or two short fields, and allows
    nothing else; `records` asks for `RECORD` each time; `open` and `open records` are the same
    without `additionalProperties: false`.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    records, closed = kind.endswith("records"), not kind.startswith("open")
    load = []
    for case in make_cases("extraction", count, seed, True):
        assert isinstance(case.prompt, list)
        answer = json.loads(case.answer)
        kinds = {name: "integer" if isinstance(v, int) else "string" for name, v in answer.items()}
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: {"type": value} for name, value in kinds.items()},
            "required": list(answer),
        }
        schema = dict(RECORD) if records else schema
        if closed:
            schema["additionalProperties"] = False
        ids = tokenizer.apply_chat_template(
            case.prompt, add_generation_prompt=True, return_dict=False
        )
        load.append(Extraction(tuple(ids), schema, None if records else answer))
    return load


async def serve(
    engine: rl.Engine,
    load: Sequence[Extraction],
    mode: str,
    concurrency: int,
    lengths: Sequence[int] | None,
) -> Served:
    """All of `load`, at most `concurrency` at a time, greedily.

    Unconstrained, each request decodes as many tokens (`lengths`) as it did constrained: what is
    compared is the speed of decoding, not how long a model goes on. All modes find the same in the
    cache: the prompts, and nothing that was generated before (forced text would be found there).
    """
    await cache_prompts(engine, load)
    gate = asyncio.Semaphore(concurrency)
    replies: list[dict[str, Any]] = [{}] * len(load)
    latencies = [0.0] * len(load)

    async def ask(index: int) -> None:
        case = load[index]
        if mode == "unconstrained":
            assert lengths is not None
            params: dict[str, Any] = {"max_new_tokens": lengths[index], "ignore_eos": True}
        else:
            params = {
                "max_new_tokens": 256,
                "json_schema": case.schema_text,
                "jump_forward": "canonical" if mode == "jump" else "off",
            }
        async with gate:
            start = time.perf_counter()
            replies[index] = await engine.async_generate(
                input_ids=list(case.prompt), sampling_params={"temperature": 0, **params}
            )
            latencies[index] = time.perf_counter() - start

    foreign, start = ForeignLoad(), time.perf_counter()
    await asyncio.gather(*(ask(index) for index in range(len(load))))
    wall = time.perf_counter() - start
    metas = [reply["meta_info"] for reply in replies]
    return Served(
        wall=wall,
        tokens=sum(meta["completion_tokens"] for meta in metas),
        forced=sum(meta["forced_tokens"] for meta in metas),
        latencies=tuple(latencies),
        outputs=tuple(reply["text"] for reply in replies),
        lengths=tuple(meta["completion_tokens"] for meta in metas),
        cut=tuple(meta["finish_reason"]["type"] == "length" for meta in metas),
        foreign_cores=foreign.cores(),
        cpu=foreign.own_seconds(),
    )


async def cache_prompts(engine: rl.Engine, load: Sequence[Extraction]) -> None:
    """Empty the cache, and compute the prompts."""
    engine.flush_cache()
    await asyncio.gather(
        *(
            engine.async_generate(
                input_ids=list(case.prompt), sampling_params={"max_new_tokens": 0}
            )
            for case in load
        )
    )


def order_of(repetition: int) -> list[str]:
    """Each mode comes first, second and last equally often, and before and behind each other."""
    start = repetition % len(MODES)
    order = [*MODES[start:], *MODES[:start]]
    return order if repetition // len(MODES) % 2 == 0 else order[::-1]


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
    with rl.Engine(model_path=model) as engine:
        lengths: Sequence[int] | None = None
        # Once for all: prompts cached, constraints compiled, masks seen.
        for mode in ("constrained", "jump", "unconstrained"):
            served = asyncio.run(serve(engine, load, mode, concurrency, lengths))
            lengths = served.lengths if mode == "constrained" else lengths
            if mode != "unconstrained":
                check(load, served)
            progress()
        for repetition in range(repetitions):
            for mode in order_of(repetition):
                runs[mode].append(asyncio.run(serve(engine, load, mode, concurrency, lengths)))
                progress()
    same = sum(
        a == b for a, b in zip(runs["constrained"][0].outputs, runs["jump"][0].outputs, strict=True)
    )
    summary = {mode: summarise(served) for mode, served in runs.items()}

    def ratios(mode: str, base: str) -> list[float]:
        """Of the rates within each repetition: what slows the machine for a while cancels out."""
        pairs = zip(runs[mode], runs[base], strict=True)
        return [other.wall / served.wall for served, other in pairs]

    compared = (
        ("constrained", "unconstrained"),
        ("jump", "unconstrained"),
        ("jump", "constrained"),
    )
    of_all = {f"{mode} / {base}": ratios(mode, base) for mode, base in compared}
    return {
        "model": Path(model).name,
        "requests": count,
        "concurrency": concurrency,
        "load": kind,
        "modes": summary,
        "repetitions": repetitions,
        "ratios": {name: statistics.median(found) for name, found in of_all.items()},
        "ratio_quartiles": {
            name: [percentile(found, 0.25), percentile(found, 0.75)]
            for name, found in of_all.items()
        },
        "same_text_with_and_without_jump": same / count,
        "exact_answers": None
        if kind.endswith("records")
        else statistics.mean(
            json.loads(text) == case.answer
            for text, case in zip(runs["jump"][0].outputs, load, strict=True)
        ),
    }


def runs_of(repetitions: int) -> int:
    """How often a load is served: once in each mode before anything counts, and then in turns."""
    return len(MODES) * (1 + repetitions)


def check(load: Sequence[Extraction], served: Served) -> None:
    """Raises what json or jsonschema raise for an output that is not what was asked for. What was
    cut off (an open schema lets a model go on as long as it likes) is no whole text."""
    for case, text, cut in zip(load, served.outputs, served.cut, strict=True):
        if not cut:
            jsonschema.Draft202012Validator(case.schema).validate(json.loads(text))


def summarise(runs: Sequence[Served]) -> dict[str, float]:
    latencies = [value for run in runs for value in run.latencies]
    return {
        "tokens_per_second": statistics.median(run.tokens / run.wall for run in runs),
        "requests_per_second": statistics.median(len(run.latencies) / run.wall for run in runs),
        "latency_p50_ms": percentile(latencies, 0.5) * 1e3,
        "latency_p99_ms": percentile(latencies, 0.99) * 1e3,
        "tokens": runs[0].tokens,
        "cut_share": sum(runs[0].cut) / len(runs[0].cut),
        "forced_share": runs[0].forced / runs[0].tokens,
        "cpu_ms_per_request": statistics.median(r.cpu / len(r.latencies) for r in runs) * 1e3,
        "foreign_cores": max(run.foreign_cores for run in runs),
    }
