"""How to start each peer: its driver, the driver's options, the environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.drive import PeerError
from benchmarks.peers.peer_process import PeerProcess

DRIVERS = Path(__file__).with_name("drivers")


@dataclass(frozen=True)
class Setting:
    """Options for all peers of a run. `kv_gib`: size of the KV cache, where it can be set; `limit`:
    seconds that a peer may take to load, and for a workload."""

    work: Path
    threads: int
    dtype: str
    kv_gib: int
    limit: float
    llama_server: Path | None = None


Launch = tuple[Path, list[str], dict[str, str]]
"""What a driver is started with: the model, arguments, the environment."""
Prepare = Callable[[Path, Path, Setting], Launch]
"""Of the peer's interpreter, the checkpoint's folder and the setting."""


@dataclass(frozen=True)
class KnownPeer:
    """`scale`: share of each workload that the peer runs, if not all; 0: none."""

    driver: str
    prepare: Prepare
    scale: dict[str, float] = field(default_factory=dict)


def vllm_environment(python: Path, threads: int, kv_gib: int) -> dict[str, str]:
    """Return vLLM's environment: by default, vLLM on a CPU binds one core of two."""
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    return environment | _intel_openmp(python)


def _vllm(python: Path, model: Path, setting: Setting) -> Launch:
    return model, [], vllm_environment(python, setting.threads, setting.kv_gib)


def _sglang(python: Path, model: Path, setting: Setting) -> Launch:
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
    }
    return model, [], environment | _intel_openmp(python)


def _intel_openmp(python: Path) -> dict[str, str]:
    """Return Intel's OpenMP runtime, which needs preloading, if the environment has it."""
    # Search beside the interpreter's path as given, not beside the target of its link.
    library = python.absolute().parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.exists() else {}


def _transformers(python: Path, model: Path, setting: Setting) -> Launch:
    return model, [], {}


def _llama_server(python: Path, model: Path, setting: Setting) -> Launch:
    found = setting.llama_server or shutil.which("llama-server")
    if not found:
        raise PeerError("llamacpp: name the server with --llama-server PATH")
    convert = [str(python), str(DRIVERS / "to_gguf.py"), str(model)]
    return _converted(model, ".gguf", convert, setting), ["--server", str(found)], {}


def _openvino(python: Path, model: Path, setting: Setting) -> Launch:
    """Convert a checkpoint by the exporter of the peer's environment."""
    exporter = str(python.absolute().with_name("optimum-cli"))
    convert = [exporter, "export", "openvino", "--model", str(model)]
    # bfloat16 weights become float16, since OpenVINO's files have no bfloat16.
    convert += ["--task", "text-generation-with-past", "--weight-format", "fp16"]
    kv_size = ["--kv-gib", str(setting.kv_gib)]
    return _converted(model, ".openvino", convert, setting), kv_size, {}


def _converted(model: Path, suffix: str, convert: list[str], setting: Setting) -> Path:
    """Return the checkpoint in a peer's format: beside it, or made there by `convert`."""
    beside = model.with_name(f"{model.name}{suffix}")
    made = beside if beside.exists() else setting.work / beside.name
    if not made.exists():
        partial = made.with_suffix(".partial")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*convert, str(partial)], capture_output=True, text=True, env=environment
        )
        if done.returncode:
            raise PeerError(f"{model.name} was not converted: {done.stderr[-500:]}")
        partial.rename(made)
    return made


KNOWN_PEERS = {
    "vllm": KnownPeer("run_vllm.py", _vllm),
    "sglang": KnownPeer("run_sglang.py", _sglang),
    # transformers computes every prompt from its beginning: documents would take minutes.
    "transformers": KnownPeer(
        "run_transformers.py", _transformers, {"W1": 0.25, "W3": 0.25, "W5": 0.0}
    ),
    "llamacpp": KnownPeer(
        "run_llama_server.py", _llama_server, {"W1": 0.25, "W3": 0.25, "W5": 0.25}
    ),
    "openvino": KnownPeer("run_openvino.py", _openvino),
}


def start(name: str, python: Path, model: Path, setting: Setting) -> PeerProcess:
    """Load `model` in a peer. Raises PeerError."""
    peer = KNOWN_PEERS[name]
    loaded, more, environment = peer.prepare(python, model, setting)
    arguments = ["--model", str(loaded), "--dtype", setting.dtype]
    arguments += ["--threads", str(setting.threads), *more]
    log = setting.work / f"{name}-{model.name}.log"
    driver = DRIVERS / peer.driver
    return PeerProcess(name, python, driver, arguments, environment, log, setting.limit)
