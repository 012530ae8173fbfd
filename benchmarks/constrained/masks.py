"""Compile time, mask time, memory and forced share of one engine, measured in a process of its own.

    python -m benchmarks.constrained.masks ENGINE TOKENIZER_FOLDER SECONDS

prints one JSON line per constraint and is started by `benchmarks.constrained`: memory is the
process's, and an engine that runs away is killed alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.constrained.engines import ENGINES, load_tokenizer
from benchmarks.given import REGEXES, SCHEMAS

COMPILES = 5


def constraints() -> Iterator[tuple[str, str, str, list[str]]]:
    """(name, kind, source, texts that satisfy it)."""
    for regex in REGEXES:
        yield regex.name, "regex", regex.pattern, list(regex.examples)
    for schema in SCHEMAS:
        texts = [
            json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
            for instance in schema.valid
        ]
        yield schema.name, "json_schema", json.dumps(schema.schema), texts


def measure(
    engine: Any, tokenizer: Any, kind: str, source: str, texts: list[str]
) -> dict[str, Any]:
    """Milliseconds and microseconds of one constraint; raises what the engine raises."""
    compiles, again = [], []
    for _ in range(COMPILES):
        start = time.perf_counter()
        make = engine.compile(kind, source)
        compiles.append((time.perf_counter() - start) * 1e3)
    engine.again(kind, source)
    for _ in range(COMPILES):
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
                    refused += 1
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
        "cached_ms": min(again),
        "first_us": first,
        "later_us": later,
        "texts": len(texts),
        "texts_refused": refused // 2 + refused % 2,
        "tokens": positions,
        "forced": forced,
    }


def main() -> None:
    name, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    tokenizer = load_tokenizer(folder)
    process = psutil.Process()
    make, option = ENGINES[name]
    start = time.perf_counter()
    engine = make(tokenizer, option)
    engine.compile("regex", "a")  # what is built once at first use counts as set-up
    print(json.dumps({"setup_seconds": time.perf_counter() - start}), flush=True)
    before, begun = process.memory_info().rss, time.perf_counter()
    for constraint, kind, source, texts in constraints():
        if time.perf_counter() - begun > seconds:
            result: dict[str, Any] = {"error": "out of time"}
        else:
            try:
                result = measure(engine, tokenizer, kind, source, texts)
            except Exception as error:
                result = {"error": str(error)[:200] or type(error).__name__}
        print(json.dumps({"name": constraint, "kind": kind, **result}), flush=True)
    print(json.dumps({"memory_mib": (process.memory_info().rss - before) / 2**20}), flush=True)


if __name__ == "__main__":
    main()
