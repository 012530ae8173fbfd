"""Compile time, mask time, memory and forced share of one engine, in its own process: the memory is
the process's, and a crash ends no other engine."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import ForeignLoad, percentile
from benchmarks.constrained.engines import ENGINES, Engine, load_tokenizer
from benchmarks.given import REGEXES, SCHEMAS

KINDS = {
    "regex": f"{len(REGEXES)} regular expressions",
    "json_schema": f"{len(SCHEMAS)} JSON schemas",
}
COMPILES = 5


def constraints() -> Iterator[tuple[str, str, str, list[str]]]:
    """Return (name, kind, source, texts that satisfy it) of each constraint."""
    for regex in REGEXES:
        yield regex.name, "regex", regex.pattern, list(regex.examples)
    for schema in SCHEMAS:
        texts = [
            json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
            for instance in schema.valid
        ]
        yield schema.name, "json_schema", json.dumps(schema.schema), texts


def measure_apart(name: str, tokenizer: Path, seconds: float) -> dict[str, Any]:
    """Run `measure_engine` in a fresh process."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        try:
            return pool.submit(measure_engine, name, tokenizer, seconds).result()
        except Exception as error:  # not installed, failed to start, or crashed
            return {"error": str(error)[:200] or type(error).__name__}


def measure_engine(name: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Measure one engine, on as many constraints as `seconds` permit."""
    make = ENGINES[name]
    tokenizer, load = load_tokenizer(folder), ForeignLoad()
    start = time.perf_counter()
    engine = make(tokenizer)
    engine.compile("regex", "a")  # work at the first use counts as set-up
    begun, process = time.perf_counter(), psutil.Process()
    before = process.memory_info().rss
    found: list[dict[str, Any]] = []
    for constraint, kind, source, texts in constraints():
        result: dict[str, Any] = {"error": "out of time"}
        if time.perf_counter() - begun < seconds:
            try:
                result = measure(engine, tokenizer, kind, source, texts)
            except Exception as error:
                result = {"error": str(error)[:200] or type(error).__name__}
        found.append({"name": constraint, "kind": kind, **result})
    return {
        "setup_seconds": begun - start,
        "memory_mib": (process.memory_info().rss - before) / 2**20,
        "foreign_cores": load.cores(),
        "kinds": {kind: summarise([one for one in found if one["kind"] == kind]) for kind in KINDS},
        "constraints": [
            {key: percentile(v, 0.99) if key.endswith("_us") else v for key, v in one.items()}
            for one in found
        ],
    }


def measure(
    engine: Engine, tokenizer: Any, kind: str, source: str, texts: list[str]
) -> dict[str, Any]:
    """Return milliseconds and microseconds of one constraint; raises the engine's errors."""
    compiles, again = [], []
    for _ in range(COMPILES):
        start = time.perf_counter()
        make = engine.compile(kind, source)
        compiles.append((time.perf_counter() - start) * 1e3)
    for _ in range(1 + COMPILES):
        start = time.perf_counter()
        engine.again(kind, source)
        again.append((time.perf_counter() - start) * 1e3)
    first: list[float] = []
    later: list[float] = []
    refused = positions = forced = 0
    out = np.zeros(-(-engine.vocab_size // 32), np.int32)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for times in (first, later):
            walker = make()
            for token_id in ids:
                start = time.perf_counter()
                walker.fill(out)
                times.append((time.perf_counter() - start) * 1e6)
                if not walker.advance(token_id):
                    refused += times is first
                    break
            else:
                walker.fill(out)
        walker = make()
        at = 0
        while at < len(ids):
            run = walker.forced()
            forced += min(run, len(ids) - at)
            step = max(run, 1)
            if not all(walker.advance(token_id) for token_id in ids[at : at + step]):
                break
            at += step
        positions += len(ids)
    return {
        "compile_ms": min(compiles),
        "compile_first_ms": compiles[0],
        "cached_ms": min(again[1:]),  # the first one fills the cache
        "first_us": first,
        "later_us": later,
        "texts": len(texts),
        "texts_refused": refused,
        "tokens": positions,
        "forced": forced,
    }


def summarise(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return percentiles over all constraints of one kind that the engine accepted."""
    taken = [one for one in found if "error" not in one]
    compiles = [one["compile_ms"] for one in taken]
    first = [value for one in taken for value in one["first_us"]]
    later = [value for one in taken for value in one["later_us"]]
    tokens = sum(one["tokens"] for one in taken)
    return {
        "taken": len(taken),
        "of": len(found),
        "texts": sum(one["texts"] for one in taken),
        "texts_taken": sum(one["texts"] - one["texts_refused"] for one in taken),
        "compile_p50_ms": percentile(compiles, 0.5),
        "compile_p99_ms": percentile(compiles, 0.99),
        "cached_p50_ms": percentile([one["cached_ms"] for one in taken], 0.5),
        "mask_first_p50_us": percentile(first, 0.5),
        "mask_first_p99_us": percentile(first, 0.99),
        "mask_first_max_us": max(first, default=float("nan")),
        "mask_p50_us": percentile(later, 0.5),
        "mask_p99_us": percentile(later, 0.99),
        "forced_share": sum(one["forced"] for one in taken) / tokens if tokens else 0.0,
    }
