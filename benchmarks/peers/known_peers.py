"""How each peer is started: its driver, what the driver needs, the environment it wants."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.peer_process import PeerError, PeerProcess

DRIVERS = Path(__file__).with_name("drivers")


@dataclass(frozen=True)
class Setting:
    """What all peers of a run are given. `kv_gib`: size of the KV cache where it can be set."""

    work: Path
    threads: int
    dtype: str
    kv_gib: int
    limit: float
    llama_server: Path | None = None
    arguments: dict[str, list[str]] = field(default_factory=dict)
    drivers: Path = DRIVERS


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


def _openvino(python: Path, model: Path, setting: Setting) -> tuple[list[str], dict[str, str]]:
    arguments = ["--model", str(_ir(python, model, setting)), "--dtype", setting.dtype]
    return [*arguments, "--kv-gib", str(setting.kv_gib)], {}


def _gguf(python: Path, model: Path, setting: Setting) -> Path:
    """The checkpoint in llama.cpp's format."""
    convert = [str(python), str(setting.drivers / "to_gguf.py"), str(model)]
    return _converted("llamacpp", model, ".gguf", convert, setting)


def _ir(python: Path, model: Path, setting: Setting) -> Path:
    """The checkpoint in OpenVINO's format, by the exporter of the peer's environment."""
    exporter = str(python.absolute().with_name("optimum-cli"))
    convert = [exporter, "export", "openvino", "--model", str(model)]
    # bfloat16 weights are stored as float16: OpenVINO's files know no bfloat16.
    convert += ["--task", "text-generation-with-past", "--weight-format", "fp16"]
    return _converted("openvino", model, ".openvino", convert, setting)


def _converted(name: str, model: Path, suffix: str, convert: list[str], setting: Setting) -> Path:
    """The checkpoint in a peer's format: beside it, or made by `convert`, which is told where."""
    beside = model.with_name(f"{model.name}{suffix}")
    if beside.exists():
        return beside
    made = setting.work / beside.name
    if not made.exists():
        partial = made.with_suffix(".partial")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*convert, str(partial)], capture_output=True, text=True, env=environment
        )
        if done.returncode:
            raise PeerError(f"{name}: {model.name} was not converted: {done.stderr[-500:]}")
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
    "openvino": KnownPeer("run_openvino.py", _openvino),
}


def start(name: str, python: Path, model: Path, setting: Setting) -> PeerProcess:
    """Load `model` in a peer. Raises PeerError."""
    peer = KNOWN_PEERS[name]
    driver = setting.drivers / peer.driver
    arguments, environment = peer.prepare(python, model, setting)
    arguments += ["--threads", str(setting.threads), *setting.arguments.get(name, [])]
    log = setting.work / f"{name}-{model.name}.log"
    return PeerProcess(name, python, driver, arguments, environment, log, setting.limit)
