"""The options of `python -m benchmarks.peers`."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.known_peers import DRIVERS, KNOWN_PEERS
from benchmarks.peers.workloads import WORKLOADS

QUICK_SCALE = 0.125


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _peer(text: str) -> tuple[str, str]:
    name, value = _named(text)
    if name not in KNOWN_PEERS:
        known = ", ".join(KNOWN_PEERS)
        raise argparse.ArgumentTypeError(f"unknown peer {name!r}; there are: {known}")
    return name, value


def _peer_scale(text: str) -> tuple[str, dict[str, float]]:
    """NAME=0.25 or NAME=W1:0.25,W3:0.5"""
    name, value = _peer(text)
    try:
        if ":" not in value:
            return name, dict.fromkeys(WORKLOADS, float(value))
        parts = dict(part.split(":") for part in value.split(","))
        return name, {workload: float(scale) for workload, scale in parts.items()}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SCALE or NAME=W1:SCALE") from None


def _option(text: str) -> tuple[str, Any]:
    """A keyword of rl.Runtime."""
    name, value = _named(text)
    plain = {"true": True, "false": False}
    return name, plain[value] if value in plain else int(value) if value.isdigit() else value


def parse_arguments(description: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the ratios here")
    parser.add_argument(
        "--peer-python",
        type=_peer,
        action="append",
        default=[],
        metavar="PEER=PATH",
        help=f"the interpreter of a peer, of: {', '.join(KNOWN_PEERS)}",
    )
    parser.add_argument(
        "--peer-scale",
        type=_peer_scale,
        action="append",
        default=[],
        metavar="PEER=W1:0.25,W5:0",
        help="the part of a workload that a slow peer does; 0: none",
    )
    parser.add_argument(
        "--peer-arguments", type=_peer, action="append", default=[], metavar="PEER='--x 1'"
    )
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="for llamacpp")
    parser.add_argument("--url", type=_named, action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--url-api-key", default="", metavar="KEY")
    parser.add_argument("--drivers", type=Path, default=DRIVERS, metavar="DIR")
    parser.add_argument(
        "--models", type=Path, metavar="DIR", help="holds a, b or a-bf16, b-bf16; made if not there"
    )
    parser.add_argument("--sizes", nargs="+", choices=["a", "b"], help="~15M, ~150M parameters")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--seed", type=int, default=0, help="of the first repetition")
    parser.add_argument(
        "--repetitions", type=int, help="each with the next seed (default 3, quick 1)"
    )
    parser.add_argument("--scale", type=float, help="factor on the number of units, for everyone")
    parser.add_argument(
        "--quick", action="store_true", help="an eighth of everything, once, size a"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=_cores(), help="of each engine")
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="SECONDS", help="that a peer may take"
    )
    parser.add_argument(
        "--runtime",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of our runtime (rl.Runtime)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="what took longer is not repeated",
    )
    found = parser.parse_args(arguments)
    for name in ("peer_python", "peer_scale", "peer_arguments", "url", "runtime"):
        setattr(found, name, dict(getattr(found, name)))
    found.peer_python = {n: Path(p).absolute() for n, p in found.peer_python.items()}
    found.peer_arguments = {n: shlex.split(text) for n, text in found.peer_arguments.items()}
    for name, python in found.peer_python.items():
        if not shutil.which(python):
            parser.error(f"--peer-python {name}: there is no {python}")
    if not found.drivers.is_dir():
        parser.error(f"--drivers: there is no {found.drivers}")
    found.sizes = found.sizes or (["a"] if found.quick else ["a", "b"])
    found.repetitions = found.repetitions or (1 if found.quick else 3)
    found.scale = found.scale or (QUICK_SCALE if found.quick else 1.0)
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def checkpoint(size: str, models: Path | None, dtype: str) -> Path:
    """The checkpoint of a size under `models` (by default a cache folder); made if not there."""
    if models is not None:
        kinds = {"bfloat16": "bf16", "float32": "fp32"}
        for name in (f"{size}-{kinds[dtype]}", size):
            if (models / name / "config.json").exists():
                return models / name
    from benchmarks.random_models import make_model

    return make_model(size, (models or Path.home() / ".cache" / "rootlace-bench") / size)
