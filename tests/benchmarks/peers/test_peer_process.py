"""Peers in processes of their own: orders and answers, faults, and holding still."""

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.common import ROOT
from benchmarks.peers.completion_server import LlamaServer
from benchmarks.peers.drive import PeerError
from benchmarks.peers.known_peers import DRIVERS, KNOWN_PEERS, Setting, start
from benchmarks.peers.measure import Task
from benchmarks.peers.peer_process import PeerProcess
from benchmarks.peers.turns import Engine
from benchmarks.peers.workloads import WORKLOADS, Workload
from tests.processes import alive
from tests.waiting import eventually

PYTHON = Path(sys.executable)
Start = Callable[..., PeerProcess]


@pytest.fixture
def setting(tmp_path: Path, drivers: Path) -> Setting:
    return Setting(tmp_path, threads=1, dtype="bfloat16", kv_gib=1, limit=120.0)


def task(workload: str, vocab: int = 260) -> Task:
    return Task("a", workload, seed=5, repetition=0, scale=0.1, vocab_size=vocab)


def wait_until_stopped(process: psutil.Process) -> None:
    """A signal takes a moment."""
    eventually(lambda: process.status() == psutil.STATUS_STOPPED)


def test_a_peer_does_one_workload_after_the_other(setting: Setting, models: Path) -> None:
    with start("vllm", PYTHON, models / "a", setting) as peer:
        assert peer.about["engine"] == "echo" and "torch" in peer.about["packages"]
        for count, name in enumerate(WORKLOADS, 1):
            row = Engine("vllm", peer.run, {"W1": 0.5}).row(task(name))
            scale = 0.05 if name == "W1" else 0.1
            first = Workload(name, 5, scale, 260).start()
            assert (row.engine, row.workload, row.seed, row.scale) == ("vllm", name, 5, scale)
            assert row.cached_tokens == 7 * count  # emptied before each
            assert row.outputs[first[0].name] == (first[0].prompt * 20)[-first[0].wanted :]
            assert row.output_tokens == sum(map(len, row.outputs.values()))


def test_it_holds_still_between_runs_and_ends(setting: Setting, models: Path) -> None:
    with start("vllm", PYTHON, models / "a", setting) as peer:
        process = psutil.Process(peer._process.pid)
        wait_until_stopped(process)
        Engine("vllm", peer.run).row(task("W4"))
        wait_until_stopped(process)
    assert not alive(process)


@pytest.mark.parametrize(
    ("trouble", "message"),
    [("raise", "out of luck"), ("die", "status 3(.|\n)*last words"), ("hang", "said nothing")],
)
def test_trouble_in_a_run(
    trouble: str,
    message: str,
    setting: Setting,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TROUBLE", trouble)
    with start("vllm", PYTHON, models / "a", setting) as peer:
        peer.limit = 0.5 if trouble == "hang" else 120.0
        with pytest.raises(PeerError, match=message):
            Engine("vllm", peer.run).row(task("W4"))
        if trouble == "hang":
            peer.stop(grace=0.2)
        if trouble == "die":
            with pytest.raises(PeerError):
                Engine("vllm", peer.run).row(task("W4"))


def test_trouble_at_the_start(
    setting: Setting, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUBLE", "start")
    with pytest.raises(PeerError, match="no such model"):
        start("vllm", PYTHON, models / "a", setting)
    with pytest.raises(PeerError, match="--llama-server"):
        KNOWN_PEERS["llamacpp"].prepare(PYTHON, models / "a", setting)


@pytest.mark.parametrize("peer", ["vllm", "sglang"])
def test_a_peer_gets_its_cores_and_its_threads_library(
    peer: str, tmp_path: Path, setting: Setting
) -> None:
    python = tmp_path / "bin" / "python"
    (tmp_path / "lib").mkdir()
    setting = replace(setting, threads=2)
    without = KNOWN_PEERS[peer].prepare(python, tmp_path, setting)[2]
    assert without[f"{peer.upper()}_CPU_OMP_THREADS_BIND"] == "0-1" and "LD_PRELOAD" not in without
    (tmp_path / "lib" / "libiomp5.so").touch()
    found = KNOWN_PEERS[peer].prepare(python, tmp_path, setting)[2]
    assert found["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")


def test_it_does_not_outlive_us(drivers: Path, models: Path, tmp_path: Path) -> None:
    """Even if we are killed while it is stopped."""
    code = f"""
import os, signal, time
from pathlib import Path
import psutil
from benchmarks.peers import known_peers
known_peers.DRIVERS = Path({str(drivers)!r})
setting = known_peers.Setting(Path({str(tmp_path)!r}), 1, "bfloat16", 1, 120.0)
peer = known_peers.start("vllm", Path({sys.executable!r}), Path({str(models)!r}), setting)
print(peer._process.pid, flush=True)
while psutil.Process(peer._process.pid).status() != psutil.STATUS_STOPPED:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    pid = int(done.stdout)
    eventually(lambda: not alive(pid))


@pytest.mark.parametrize("driver", sorted(path.name for path in DRIVERS.glob("run_*.py")))
def test_a_driver_needs_nothing_of_ours_and_offers_all_that_is_asked(driver: str) -> None:
    """Peers are not installed here: what is asked of an engine is looked for in the source."""
    tree = ast.parse((DRIVERS / driver).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(str(module).startswith(("benchmarks", "rootlace")) for module in imported)
    engines = [
        {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "Engine"
    ]
    wanted = {"reset", "add", "step", "cached"}
    if "LlamaServer" in (DRIVERS / driver).read_text():
        wanted = {"reset", "body", "read"}
        engines = [methods | vars(LlamaServer).keys() for methods in engines]
    assert engines and all(wanted <= methods for methods in engines)


def test_every_known_peer_has_its_driver() -> None:
    assert {peer.driver for peer in KNOWN_PEERS.values()} == {
        path.name for path in DRIVERS.glob("run_*.py")
    }
