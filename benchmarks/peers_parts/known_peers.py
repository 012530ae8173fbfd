"""How each peer is started: its driver, what the driver needs, the environment it wants."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers_parts.peer_process import PeerError, PeerProcess


@dataclass(frozen=True)
class Setting:
    """What all peers of a run are given. `kv_gib`: size of the KV cache where it can be set."""

    drivers: Path
    work: Path
    threads: int
    dtype: str
    kv_gib: int
    limit: float
    llama_server: Path | None = None
    arguments: dict[str, list[str]] = field(default_factory=dict)


Prepare = Callable[[Path, Path, Setting], tuple[list[str], dict[str, str]]]
"""(interpreter, model's folder, setting) -> (arguments for the driver, environment)."""


@dataclass(frozen=True)
class KnownPeer:
    """`scale`: the share of a workload that it does unless told otherwise; 0: it does none."""

    driver: str
    prepare: Prepare
    scale: dict[str, float] = field(default_factory=dict)


def _vllm(python: Path, model: Path, setting: Setting) -> tuple[list[str], dict[str, str]]:
    """Left alone, vLLM on a CPU binds one core of two; its OpenMP runtime wants preloading."""
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(setting.kv_gib),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    # Beside the interpreter as it was named: the environment's, not what its link points to.
    library = python.absolute().parent.parent / "lib" / "libiomp5.so"
    if library.exists():
        environment["LD_PRELOAD"] = str(library)
    return ["--model", str(model), "--dtype", setting.dtype], environment


def _transformers(python: Path, model: Path, setting: Setting) -> tuple[list[str], dict[str, str]]:
    return ["--model", str(model), "--dtype", setting.dtype, "--mode", "generate"], {}


def _continuous(python: Path, model: Path, setting: Setting) -> tuple[list[str], dict[str, str]]:
    arguments = ["--mode", "cb", "--num-blocks", "4096", "--max-requests", "8"]
    return ["--model", str(model), "--dtype", setting.dtype, *arguments], {}


def _llama_server(python: Path, model: Path, setting: Setting) -> tuple[list[str], dict[str, str]]:
    found = setting.llama_server or shutil.which("llama-server")
    if not found:
        raise PeerError("llamacpp: name the server with --llama-server PATH")
    return ["--model", str(_gguf(python, model, setting)), "--server", str(found)], {}


def _llama_library(python: Path, model: Path, setting: Setting) -> tuple[list[str], dict[str, str]]:
    return ["--model", str(_gguf(python, model, setting)), "--slots", "8"], {}


def _gguf(python: Path, model: Path, setting: Setting) -> Path:
    """The checkpoint in llama.cpp's format: beside it, or converted with the peer's interpreter."""
    beside = model.with_name(f"{model.name}.gguf")
    if beside.exists():
        return beside
    made = setting.work / f"{model.name}.gguf"
    if not made.exists():
        partial = made.with_suffix(".partial")
        done = subprocess.run(
            [str(python), str(setting.drivers / "to_gguf.py"), str(model), str(partial)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise PeerError(f"llamacpp: {model.name} was not converted: {done.stderr[-500:]}")
        partial.rename(made)
    return made


_WITHOUT_SHARING = {"W1": 0.25, "W3": 0.25, "W5": 0.0}
"""Of engines that compute every prompt from its beginning: documents would take minutes."""

KNOWN_PEERS = {
    "vllm": KnownPeer("run_vllm.py", _vllm),
    "transformers": KnownPeer("run_transformers.py", _transformers, _WITHOUT_SHARING),
    "transformers-cb": KnownPeer(
        "run_transformers.py", _continuous, {"W2": 0.25, "W4": 0.25, **_WITHOUT_SHARING}
    ),
    "llamacpp": KnownPeer(
        "run_llama_server.py", _llama_server, {"W1": 0.25, "W3": 0.25, "W5": 0.25}
    ),
    "llamacpp-lib": KnownPeer(
        "run_llamacpp.py", _llama_library, {"W1": 0.25, "W3": 0.25, "W5": 0.25}
    ),
}


def start(name: str, python: Path, model: Path, setting: Setting) -> PeerProcess:
    """Load `model` in a peer. Raises PeerError."""
    peer = KNOWN_PEERS[name]
    driver = setting.drivers / peer.driver
    if not driver.exists():
        raise PeerError(f"{name}: there is no {driver}")
    arguments, environment = peer.prepare(python, model, setting)
    # The driver's own report is not used; a limit of its own would only skip repetitions.
    arguments += ["--threads", str(setting.threads), *setting.arguments.get(name, [])]
    log = setting.work / f"{name}-{model.name}.log"
    return PeerProcess(name, python, driver, arguments, environment, log, setting.limit)
