"""A tiny model with a long context, a runtime of it, and drivers of an engine that is no engine."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import rootlace as rl
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `--models` takes it: `a` holds the tiny model."""
    folder = tmp_path_factory.mktemp("models")
    model = make_tiny_model(folder / "a")
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 8192
    (model / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def runtime(models: Path) -> Iterator[rl.Runtime]:
    with rl.Runtime(
        models / "a", threads=1, dtype="float32", http_port=0, num_blocks=2000
    ) as started:
        yield started


COMMON = """
import argparse, time, workloads

def parser():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model")
    ap.add_argument("--dtype")
    ap.add_argument("--threads", type=int)
    return ap

def run_once(engine, w):
    outputs, todo, prompt = {}, w.start(), 0
    start = time.perf_counter()
    while todo:
        r = todo.pop()
        outputs[r.rid] = engine.answer(r)
        prompt += len(r.prompt)
        todo += w.done(r, outputs[r.rid])
    wall = time.perf_counter() - start
    return outputs, dict(
        wall_s=wall, ttft_mean_s=wall / 2, latency_mean_s=wall, requests=len(outputs),
        prompt_tokens=prompt, output_tokens=sum(map(len, outputs.values())),
        own_cores=1.0, foreign_cores=0.0,
    )

def bench(engine, arguments):
    raise SystemExit("bench() was to be replaced")
"""

WORKLOADS = """
import sys
sys.path.insert(0, {root!r})
from benchmarks.peers_parts.workloads import WORKLOADS
from dataclasses import dataclass

@dataclass
class Req:
    rid: str
    prompt: list
    max_new: int

class Told:
    def __init__(self, inner):
        self.inner, self.known = inner, {{}}
    def tell(self, requests):
        self.known.update((r.name, r) for r in requests)
        return [Req(r.name, r.prompt, r.wanted) for r in requests]
    def start(self):
        return self.tell(self.inner.start())
    def done(self, req, out):
        return self.tell(self.inner.answered(self.known[req.rid], out))

def make(name, seed=0, scale=1.0):
    return Told(WORKLOADS[name](seed, scale, {vocab}))
"""

RUN_VLLM = """
import os, sys, time
import common

class Engine:
    name = "echo"
    def __init__(self, a):
        print("chatter on standard output")
        self.a, self.resets = a, 0
    def reset(self):
        self.resets += 1
    def cached(self):
        return 7 * self.resets
    def answer(self, r):
        trouble = os.environ.get("TROUBLE")
        if trouble == "raise":
            raise ValueError("out of luck")
        if trouble == "die":
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        if trouble == "hang":
            time.sleep(60)
        return (r.prompt * 20)[-r.max_new:]

if __name__ == "__main__":
    ap = common.parser()
    a = ap.parse_args()
    if os.environ.get("TROUBLE") == "start":
        raise SystemExit("no such model")
    common.bench(Engine(a), a)
"""


@pytest.fixture
def drivers(tmp_path: Path) -> Path:
    """Drivers in the shape of the real ones, whose `vllm` repeats what it is told."""
    folder = tmp_path / "drivers"
    folder.mkdir()
    root = str(Path(__file__).resolve().parents[3])
    (folder / "common.py").write_text(textwrap.dedent(COMMON))
    (folder / "workloads.py").write_text(WORKLOADS.format(root=root, vocab=260))
    (folder / "run_vllm.py").write_text(RUN_VLLM)
    return folder
