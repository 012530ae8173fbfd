"""Programs on a runtime that plans a step while the previous one runs: results stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rootlace as rl

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "job": {"enum": ["baker", "teacher", "driver"]},
    },
    "required": ["name", "age", "job"],
    "additionalProperties": False,
}


@rl.function
def everything(s, name):
    """Run forks of text that is still being generated, constraints, choices, samples, streams."""
    s += f"{name} is a baker, 34 years old.\nAs JSON: "
    s += rl.gen("person", json_schema=PERSON, max_tokens=80)
    s += "\nCode: " + rl.gen("code", regex=r"[A-Z]{3}-[0-9]{2}", max_tokens=16)
    s += "\nIn short: " + rl.gen("short", max_tokens=20, stop="\n")
    forks = s.fork(3)
    forks += lambda i: f"\nPoint {i}:" + rl.gen("point", max_tokens=12, frequency_penalty=0.4)
    forks.join("concate_and_append")
    s += "\nJob:" + rl.select("job", [" baker", " teacher"])
    s += "\nMore:" + rl.gen("more", max_tokens=9, temperature=0.8, seed=7, return_logprob=True)


@pytest.fixture(scope="module")
def runtimes(runtime: rl.Runtime, demo_model: Path) -> Iterator[list[rl.Runtime]]:
    """On a CPU steps overlap only on request."""
    with rl.Runtime(
        demo_model,
        dtype="float32",
        device="cpu",
        threads=1,
        num_blocks=1024,
        check_invariants=True,
        overlap=True,
        launch_timeout=240,
    ) as overlapping:
        yield [runtime, overlapping]


def usage(meta: dict[str, Any]) -> tuple[Any, ...]:
    return meta["prompt_tokens"], meta["completion_tokens"], meta["finish_reason"]


def test_programs_say_the_same(runtimes: list[rl.Runtime]) -> None:
    seen = []
    for runtime in runtimes:
        run = partial(everything.run, temperature=0, backend=runtime)
        with ThreadPoolExecutor(4) as pool:
            states = list(pool.map(run, ["Mara", "Ida", "Ben", "Jon"]))
        seen.append([(s.text(), usage(s.get_meta_info("person"))) for s in states])
        info = runtime.get_server_info()
        assert info["forced_tokens"] > 0 and not info["running"]
    assert seen[0] == seen[1]


def test_one_after_the_other_they_find_the_same_cached(runtimes: list[rl.Runtime]) -> None:
    found = []
    for runtime in runtimes:
        runtime.flush_cache()
        cached = []
        for name in ("Ann", "Tom", "Ann"):
            state = everything.run(name, temperature=0, backend=runtime)
            for variable in ("person", "code", "short", "more"):
                meta = state.get_meta_info(variable)
                cached.append((variable, *usage(meta), meta["cached_tokens"]))
        found.append(cached)
    assert found[0] == found[1]
