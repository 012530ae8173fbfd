"""A tiny model with a long context, a runtime of it, and drivers of an engine that is no engine."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import rootlace as rl
from benchmarks.peers import known_peers, turns
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


RUN_VLLM = """
import os, sys, time
sys.path.insert(0, {real!r})
from serve import News, arguments_of, serve

class Engine:
    name = "echo"
    replies_are_ids = True

    def __init__(self):
        print("chatter on standard output")
        self.resets, self.waiting = 0, []

    def reset(self):
        self.resets += 1

    def cached(self):
        return 7 * self.resets

    def add(self, request):
        self.waiting.append(request)

    def step(self):
        trouble = os.environ.get("TROUBLE")
        if trouble == "raise":
            raise ValueError("out of luck")
        if trouble == "die":
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        if trouble == "hang":
            time.sleep(60)
        request = self.waiting.pop()
        reply = (request.prompt * 20)[-request.wanted:]
        return [News(request.name, reply, True, time.perf_counter())]

if __name__ == "__main__":
    arguments_of()
    if os.environ.get("TROUBLE") == "start":
        raise SystemExit("no such model")
    serve(Engine())
"""


@pytest.fixture
def running(runtime: rl.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes a runtime that is there already, in place of one of its own."""
    there = SimpleNamespace(Runtime=lambda *_, **__: contextlib.nullcontext(runtime))
    monkeypatch.setattr(turns, "rl", there)


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of drivers whose `vllm` repeats what it is told, in place of the real ones."""
    folder = tmp_path / "drivers"
    folder.mkdir()
    (folder / "run_vllm.py").write_text(RUN_VLLM.format(real=str(known_peers.DRIVERS)))
    monkeypatch.setattr(known_peers, "DRIVERS", folder)
    return folder
