"""Imports go downwards only: the table of docs/architecture.md, checked on the source and live."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import layer_rules
from tests.layer_rules import HEAVY, SERVING

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"rootlace": "frontend", "rootlace.runtime": "runtime", "rootlace.kernels": "kernels"}
RUNTIME = "rootlace.runtime"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


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


def full_name(short: str) -> str:
    """The module that the table of layers means by `short`."""
    if short == "rootlace":
        return short
    (found,) = {f"rootlace.{short}", f"{RUNTIME}.{short}"} & MODULES.keys()
    return found


def table() -> dict[str, tuple[set[str], set[str]]]:
    """The table of layers: package -> (modules of ours, other packages that it never imports)."""
    (section,) = re.findall(r"^## Layers\n(.*?)^## ", ARCHITECTURE.read_text(), re.M | re.S)
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    groups = {"heavy": HEAVY, "serving": SERVING}
    found = {}
    for package, allowed, never in rows:
        forbidden = set(re.findall(r"`([\w.]+)`", never))
        for word in set(re.findall(r"(?<![`\w])\w+", never)) & groups.keys():
            forbidden |= groups[word]
        allowed_names = {full_name(name) for name in re.findall(r"`([\w.]+)`", allowed)}
        found[full_name(package)] = (allowed_names, forbidden)
    return found


# Module prefix -> the prefixes of our own modules it may import (itself always).
MAY_IMPORT = {name: allowed for name, (allowed, _) in table().items()} | layer_rules.MAY_IMPORT
# Module prefix -> third-party packages that it must not import.
MUST_NOT_IMPORT = {
    name: never for name, (_, never) in table().items()
} | layer_rules.MUST_NOT_IMPORT


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
        # The scheduler and the cache with it. (Of the package itself: frontend/test_import.py; of
        # the gateway: server/test_imports.py.)
        ("rootlace.runtime.simulation.study", {"torch", "transformers", "matplotlib"}),
        ("rootlace.runtime.model.checkpoint.config", {"torch", "numpy", "transformers"}),
        ("rootlace.runtime.model.executor.runner", {"torch", "transformers", "safetensors.torch"}),
        (
            "rootlace.runtime.engine.constraints",
            {"torch", "llguidance", "jsonschema", "tokenizers"},
        ),
        ("rootlace.kernels.native.library", {"torch", "numpy"}),
    ],
)
def test_what_an_import_loads(module: str, forbidden: set[str]) -> None:
    assert not loaded_by(module) & forbidden


def test_the_table_has_every_package() -> None:
    packages = {
        name
        for name, path in MODULES.items()
        if path.stem == "__init__" and name.removeprefix(RUNTIME).count(".") == 1
    }
    assert packages - {f"{RUNTIME}.assets"} <= table().keys()
    assert not table().keys() & layer_rules.MAY_IMPORT.keys()


def test_the_architecture_stays_short() -> None:
    assert len(ARCHITECTURE.read_text().splitlines()) <= 250


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
    (found,) = violations("rootlace.runtime.cache.radix_tree", path)
    assert found.startswith("rootlace.runtime.cache.radix_tree, line 5, must not import")


def test_relative_imports_resolve(tmp_path: Path) -> None:
    path = tmp_path / "tree.py"
    path.write_text("from ..scheduler import scheduler\nfrom .node import Node\n")
    found = [target for _, target in imports("rootlace.runtime.cache.radix_tree", path)]
    assert found == ["rootlace.runtime.scheduler.scheduler", "rootlace.runtime.cache.node"]
