"""Imports go downwards only: the table of docs/architecture.md, checked on the source and live."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"rootlace": "frontend", "rootlace.runtime": "runtime", "rootlace.kernels": "kernels"}

HEAVY = {"torch", "transformers", "safetensors", "triton"}
SERVING = {"aiohttp", "tokenizers", "jinja2"}
RUNTIME = "rootlace.runtime"

# Module prefix -> the prefixes of our own modules it may import (itself always).
MAY_IMPORT: dict[str, set[str]] = {
    "rootlace.wire": set(),
    "rootlace.types": {"rootlace.wire.errors"},
    # What a run did and when, and the page that draws it: data that every layer above may make.
    "rootlace.timeline": set(),
    "rootlace.language": {"rootlace.wire", "rootlace.types", "rootlace.timeline"},
    # The client starts a runtime as a child process: it may name its configuration, no more.
    "rootlace.client": {
        "rootlace.wire",
        "rootlace.language",
        "rootlace.runtime.config",
        "rootlace.runtime.options",
        "rootlace.runtime.processes",
        "rootlace.runtime.assets",
        "rootlace.runtime.model.hub.local",
    },
    "rootlace.program": {
        "rootlace.wire",
        "rootlace.types",
        "rootlace.language",
        "rootlace.client",
        "rootlace.trace",
        "rootlace.timeline",
    },
    "rootlace.evaluation": {
        "rootlace.wire",
        "rootlace.language",
        "rootlace.client",
        "rootlace.program",
    },
    # Backends without a model, for the tests of programs.
    "rootlace.testing": {"rootlace.wire", "rootlace.language", "rootlace.client"},
    # The other interpreter of the language: it knows nothing of runtimes.
    "rootlace.trace": {"rootlace.wire", "rootlace.language", "rootlace.timeline"},
    # What `import rootlace` gives.
    "rootlace": {
        "rootlace.wire",
        "rootlace.language",
        "rootlace.client",
        "rootlace.program",
        "rootlace.timeline",
        "rootlace.trace",
    },
    # The command line stands above everything: `rootlace serve` is the gateway.
    "rootlace.cli": {
        "rootlace",
        "rootlace.wire",
        "rootlace.language",
        "rootlace.client",
        "rootlace.program",
        "rootlace.timeline",
        "rootlace.evaluation",
        "rootlace.runtime.config",
        "rootlace.runtime.options",
        "rootlace.runtime.processes",
        "rootlace.runtime.assets",
        "rootlace.runtime.gateway.app",
        "rootlace.runtime.gateway.keys.key_file",
        "rootlace.runtime.doctor",
        "rootlace.runtime.model.checkpoint.config",
        "rootlace.runtime.model.checkpoint.source",
        "rootlace.runtime.model.hub.local",
        "rootlace.runtime.simulation",
        "rootlace.runtime.contracts.step_cost",
    },
    "rootlace.cli.bench.sending": {"rootlace.cli.bench"},
    # Serve applications: the gateway and the engines of a Ray cluster.
    "rootlace.deploy": {
        "rootlace.client.runtime",
        "rootlace.runtime.config",
        "rootlace.runtime.contracts.transfer",
        "rootlace.runtime.gateway.app",
        "rootlace.runtime.gateway.http.source",
        "rootlace.runtime.model.hub.local",
        "rootlace.runtime.options",
        "rootlace.runtime.replicas",
        "rootlace.wire",
    },
    "rootlace.runtime": set(),
    "rootlace.runtime.config": {"rootlace.runtime.options"},
    "rootlace.runtime.options": set(),
    "rootlace.runtime.processes": set(),
    "rootlace.runtime.lane": set(),
    "rootlace.runtime.curve": set(),
    "rootlace.runtime.logs": {"rootlace.runtime.config"},
    "rootlace.runtime.assets": set(),
    "rootlace.runtime.contracts": {"rootlace.wire"},
    "rootlace.runtime.gateway": {
        "rootlace.wire",
        "rootlace.runtime.assets",
        "rootlace.runtime.config",
        "rootlace.runtime.logs",
        "rootlace.runtime.processes",
        "rootlace.runtime.contracts",
        "rootlace.runtime.engine.client",
        "rootlace.runtime.replicas",
        "rootlace.runtime.constrained",
        "rootlace.runtime.model.checkpoint.config",
        "rootlace.runtime.model.checkpoint.source",
    },
    # Several engines in the place of one.
    "rootlace.runtime.replicas": {
        "rootlace.wire",
        "rootlace.runtime.cache.journal",
        "rootlace.runtime.config",
        "rootlace.runtime.curve",
        "rootlace.runtime.processes",
        "rootlace.runtime.contracts",
        "rootlace.runtime.engine.client",
        "rootlace.runtime.routing",
    },
    "rootlace.runtime.engine": {
        "rootlace.wire",
        "rootlace.runtime.config",
        "rootlace.runtime.logs",
        "rootlace.runtime.processes",
        "rootlace.runtime.contracts",
        "rootlace.runtime.scheduler",
        "rootlace.runtime.model",
        "rootlace.runtime.constrained",
        "rootlace.runtime.cache",
        "rootlace.runtime.tiers",
        "rootlace.runtime.transfer",
    },
    "rootlace.runtime.tiers": {"rootlace.runtime.contracts"},
    # Blocks from one engine to another.
    "rootlace.runtime.transfer": {
        "rootlace.wire",
        "rootlace.runtime.contracts",
        "rootlace.runtime.curve",
    },
    "rootlace.runtime.engine.client": {
        "rootlace.wire",
        "rootlace.runtime.config",
        "rootlace.runtime.processes",
        "rootlace.runtime.contracts",
    },
    "rootlace.runtime.scheduler": {
        "rootlace.wire",
        "rootlace.runtime.cache",
        "rootlace.runtime.config",
        "rootlace.runtime.contracts",
    },
    "rootlace.runtime.cache": set(),
    "rootlace.runtime.routing": {"rootlace.runtime.cache", "rootlace.runtime.contracts"},
    "rootlace.runtime.simulation": {
        "rootlace.wire",
        "rootlace.runtime.cache",
        "rootlace.runtime.routing",
        "rootlace.runtime.scheduler",
        "rootlace.runtime.contracts",
        "rootlace.runtime.config",
    },
    "rootlace.runtime.doctor": {
        "rootlace.wire",
        "rootlace.runtime.config",
        "rootlace.runtime.model",
        "rootlace.kernels",
    },
    "rootlace.runtime.constrained": {
        "rootlace.wire",
        "rootlace.types",
        "rootlace.runtime.config",
        "rootlace.runtime.lane",
        "rootlace.runtime.processes",
        "rootlace.runtime.contracts",
    },
    "rootlace.runtime.model": {
        "rootlace.wire",
        "rootlace.runtime.config",
        "rootlace.runtime.contracts",
        "rootlace.kernels",
    },
    # The ranks of a model are processes.
    "rootlace.runtime.model.parallel": {
        "rootlace.wire",
        "rootlace.runtime.config",
        "rootlace.runtime.logs",
        "rootlace.runtime.processes",
        "rootlace.runtime.contracts",
        "rootlace.runtime.model",
        "rootlace.kernels",
    },
    "rootlace.runtime.model.parallel.shard": {"rootlace.runtime.model.families"},
    # A model is judged before anything heavy is imported.
    "rootlace.runtime.model.families": {"rootlace.wire"},
    "rootlace.runtime.model.checkpoint.config": {
        "rootlace.wire",
        "rootlace.runtime.model.families",
        "rootlace.runtime.model.foreign.installed",
        # Imported only where a model is of no family of ours.
        "rootlace.runtime.model.foreign.reading",
        "rootlace.runtime.model.checkpoint.source",
        "rootlace.runtime.model.checkpoint.quantised",
    },
    "rootlace.runtime.model.foreign": {
        "rootlace.wire",
        "rootlace.runtime.contracts",
        "rootlace.runtime.model",
        "rootlace.kernels",
    },
    "rootlace.runtime.model.foreign.installed": {"rootlace.wire"},
    "rootlace.runtime.model.hub": {
        "rootlace.wire",
        "rootlace.runtime.model.checkpoint.config",
        "rootlace.runtime.model.checkpoint.source",
        "rootlace.runtime.model.checkpoint.folder",
        "rootlace.runtime.model.checkpoint.pooling",
    },
    "rootlace.runtime.model.checkpoint.expected": set(),
    "rootlace.runtime.model.checkpoint.quantised": {
        "rootlace.wire",
        "rootlace.runtime.model.families",
        "rootlace.runtime.model.checkpoint.expected",
    },
    "rootlace.runtime.model.checkpoint.quantised.reading": {
        "rootlace.runtime.model.checkpoint.quantised",
        "rootlace.runtime.model.gguf.layout",
        "rootlace.kernels",
    },
    "rootlace.runtime.model.checkpoint.quantised.gguf_blocks": {"rootlace.kernels"},
    "rootlace.runtime.model.checkpoint.source": {
        "rootlace.wire",
        "rootlace.runtime.model.families",
        "rootlace.runtime.model.checkpoint.folder",
        "rootlace.runtime.model.checkpoint.pooling",
        "rootlace.runtime.model.checkpoint.quantised",
        "rootlace.runtime.model.gguf",
    },
    "rootlace.runtime.model.checkpoint.pooling": {
        "rootlace.runtime.model.checkpoint.pooling",
        "rootlace.wire.errors",
    },
    "rootlace.runtime.model.checkpoint.folder": {
        "rootlace.wire",
        "rootlace.runtime.model.gguf.file",
    },
    "rootlace.runtime.model.gguf": {
        "rootlace.wire",
        "rootlace.runtime.model.families",
        "rootlace.runtime.model.checkpoint.expected",
        "rootlace.runtime.model.checkpoint.quantised.quantisation",
    },
    "rootlace.kernels": set(),
}

# Module prefix -> third-party packages that it must not import.
MUST_NOT_IMPORT: dict[str, set[str]] = {
    "rootlace.wire": HEAVY | SERVING | {"numpy"},
    "rootlace.types": HEAVY | SERVING | {"numpy", "zmq", "pydantic"},
    "rootlace.timeline": HEAVY | SERVING | {"numpy", "zmq"},
    "rootlace.language": HEAVY | SERVING | {"numpy", "zmq"},
    "rootlace.client": HEAVY | SERVING | {"numpy"},
    "rootlace.program": HEAVY | SERVING | {"numpy", "zmq"},
    "rootlace.evaluation": HEAVY | SERVING | {"numpy", "zmq"},
    "rootlace.testing": HEAVY | SERVING | {"numpy"},
    "rootlace.trace": HEAVY | SERVING | {"numpy", "zmq"},
    "rootlace": HEAVY | SERVING | {"numpy", "zmq"},
    "rootlace.cli": HEAVY | SERVING | {"numpy"},
    # Imported when that command runs, which needs the runtime's packages.
    "rootlace.cli.bench.sending": HEAVY | {"numpy"},
    "rootlace.deploy": HEAVY | {"numpy", "zmq"},
    "rootlace.runtime": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.config": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.options": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.lane": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.processes": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.curve": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.logs": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.assets": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.contracts": HEAVY | SERVING | {"zmq"},
    "rootlace.runtime.gateway": HEAVY,
    "rootlace.runtime.engine": {"aiohttp", "transformers", "triton"},
    "rootlace.runtime.engine.client": HEAVY | SERVING,
    "rootlace.runtime.scheduler": HEAVY | SERVING | {"zmq"},
    "rootlace.runtime.cache": HEAVY | SERVING | {"zmq", "msgspec"},
    "rootlace.runtime.replicas": HEAVY | SERVING,
    "rootlace.runtime.tiers": HEAVY | SERVING | {"zmq"},
    "rootlace.runtime.transfer": HEAVY | SERVING,
    "rootlace.runtime.routing": HEAVY | SERVING | {"zmq"},
    "rootlace.runtime.simulation": HEAVY | SERVING | {"zmq"},
    "rootlace.runtime.constrained": HEAVY | {"aiohttp"},
    "rootlace.runtime.model": {"aiohttp", "transformers", "zmq"},
    "rootlace.runtime.model.parallel": {"aiohttp", "transformers", "zmq"},
    "rootlace.runtime.model.parallel.shard": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.families": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.foreign": {"aiohttp", "zmq"},
    "rootlace.runtime.model.foreign.installed": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.checkpoint.config": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.checkpoint.source": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.hub": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.checkpoint.folder": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.checkpoint.pooling": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.checkpoint.expected": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.checkpoint.quantised": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.checkpoint.quantised.reading": {"aiohttp", "transformers", "zmq"},
    "rootlace.runtime.model.checkpoint.quantised.gguf_blocks": {"aiohttp", "transformers", "zmq"},
    "rootlace.runtime.model.gguf": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.doctor": {"aiohttp", "zmq"},
    "rootlace.kernels": {"aiohttp", "zmq", "transformers", "safetensors", "msgspec"},
}


def modules() -> dict[str, Path]:
    """Every module of the three packages, by dotted name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path
    return found


MODULES = modules()


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def layer_of(name: str) -> str:
    """The longest prefix of the table that `name` falls under."""
    return max((prefix for prefix in MAY_IMPORT if is_within(name, prefix)), key=len)


def imports(name: str, path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of each import, those inside functions included."""
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from package import module` means the module, not the package.
                submodule = f"{base}.{alias.name}"
                yield node.lineno, submodule if submodule in MODULES else base


def violations(name: str, path: Path) -> Iterator[str]:
    """What module `name`, whose source is at `path`, imports against the tables."""
    layer = layer_of(name)
    allowed = {layer} | MAY_IMPORT[layer]
    for line, target in imports(name, path):
        if is_within(target, "rootlace"):
            # "rootlace" as a layer is what `import rootlace` gives, not the packages below it;
            # "rootlace.runtime" likewise.
            fine = any(
                layer_of(target) == prefix
                if prefix in ("rootlace", RUNTIME)
                else is_within(target, prefix)
                for prefix in allowed
            )
        else:
            fine = target.split(".")[0] not in MUST_NOT_IMPORT[layer]
        if not fine:
            yield f"{name}, line {line}, must not import {target}"


@pytest.mark.parametrize("package", ["frontend", "runtime", "kernels"])
def test_imports_go_downwards(package: str) -> None:
    folder = ROOT / package
    found = [
        violation
        for name, path in sorted(MODULES.items())
        if path.is_relative_to(folder)
        for violation in violations(name, path)
    ]
    assert not found, "\n".join(found)


def circles() -> list[set[str]]:
    """The sets of modules that import each other, however indirectly, late imports included.

    Strongly connected components of more than one module, by Tarjan's algorithm (1972).
    """
    graph = {
        name: {t for _, t in imports(name, path) if t in MODULES and t != name}
        for name, path in MODULES.items()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            place = stack.index(name)
            if len(stack) - place > 1:
                found.append(set(stack[place:]))
            del stack[place:]

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def test_no_module_imports_itself_through_others() -> None:
    found = [sorted(circle) for circle in circles()]
    assert not found, "\n".join(" ".join(circle) for circle in found)


INSTRUCTIONS = re.compile(
    r"^ *# *(if|elif)\b.*__(x86|i386|aarch64|amd64|arm|AVX|AMX|SSE|F16C)", re.I
)
"""A condition on what the compiler was told of the processor."""


def test_only_one_folder_asks_for_instruction_sets() -> None:
    source = ROOT / "kernels" / "native" / "src"
    asking = {
        path.parent.relative_to(source)
        for path in source.rglob("*")
        if path.suffix in (".h", ".cpp")
        and any(INSTRUCTIONS.match(line) for line in path.read_text("utf-8").splitlines())
    }
    assert asking == {Path("isa")}


def loaded_by(module: str) -> set[str]:
    """The top-level modules in memory after `import module` in a new interpreter."""
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    )
    return set(output.stdout.split())


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("rootlace", {"torch", "numpy", "transformers", "tokenizers", "aiohttp", "safetensors"}),
        ("rootlace.cli", {"torch", "numpy", "transformers", "aiohttp"}),
        ("rootlace.runtime.cache", {"torch", "transformers"}),
        ("rootlace.runtime.scheduler.scheduler", {"torch", "transformers"}),
        ("rootlace.runtime.simulation.study", {"torch", "transformers", "matplotlib"}),
        ("rootlace.runtime.gateway.servers", {"torch", "transformers"}),
        ("rootlace.runtime.engine.client", {"torch", "transformers"}),
        ("rootlace.runtime.model.checkpoint.config", {"torch", "numpy", "transformers"}),
        ("rootlace.runtime.model.executor.runner", {"transformers"}),
        ("rootlace.kernels.native.library", {"torch", "numpy"}),
    ],
)
def test_what_an_import_loads(module: str, forbidden: set[str]) -> None:
    assert not loaded_by(module) & forbidden


def test_every_layer_has_both_rules() -> None:
    assert MAY_IMPORT.keys() == MUST_NOT_IMPORT.keys()


@pytest.mark.parametrize(
    "line",
    [
        "import torch",
        "from rootlace.runtime.scheduler import plan",
        "from ..contracts.plan import StepPlan",
        "from rootlace import client",
    ],
)
def test_a_violation_is_seen(line: str, tmp_path: Path) -> None:
    path = tmp_path / "tree.py"
    path.write_text(f"import numpy\n\n\ndef late():\n    {line}\n")
    (found,) = violations("rootlace.runtime.cache.tree", path)
    assert found.startswith("rootlace.runtime.cache.tree, line 5, must not import")


def test_relative_imports_resolve(tmp_path: Path) -> None:
    path = tmp_path / "tree.py"
    path.write_text("from ..scheduler import scheduler\nfrom .node import Node\n")
    found = [target for _, target in imports("rootlace.runtime.cache.tree", path)]
    assert found == ["rootlace.runtime.scheduler.scheduler", "rootlace.runtime.cache.node"]
