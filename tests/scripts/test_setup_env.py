"""How the set-up tells a CPU build of torch from one that brings CUDA along."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup_env() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts" / "setup_env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(*requirements: str) -> dict[str, Any]:
    """What pip reports of a package with these dependencies."""
    return {"install": [{"metadata": {"name": "torch", "requires_dist": list(requirements)}}]}


def test_cuda_build(setup_env: ModuleType) -> None:
    here = {"linux": "Linux", "darwin": "Darwin", "win32": "Windows"}[sys.platform]
    found = report("filelock", f'nvidia-cudnn-cu13==9.20.0.48; platform_system == "{here}"')
    assert setup_env.pulls_cuda(found)
    assert setup_env.pulls_cuda(report("cuda-bindings<14"))
    assert setup_env.pulls_cuda(report("triton==3.7.1"))


def test_cpu_build(setup_env: ModuleType) -> None:
    assert not setup_env.pulls_cuda(report("filelock", "sympy>=1.13.3"))
    assert not setup_env.pulls_cuda(report('nvidia-nccl-cu13; platform_system == "Plan 9"'))
    assert not setup_env.pulls_cuda(report('triton; extra == "gpu"'))
    assert not setup_env.pulls_cuda({"install": [{"metadata": {"name": "torch"}}]})


def test_constraints_fit_the_project(setup_env: ModuleType) -> None:
    """Every dependency has a tested version, and it is one that the project admits."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    tested = {_canonical(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert setup_env.pinned_torch() == f"torch=={tested['torch']}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *extras["runtime"], *extras["test"]]:
        wanted = Requirement(line)
        assert _canonical(wanted.name) in tested, f"{wanted.name} is not in constraints.txt"
        assert wanted.specifier.contains(tested[_canonical(wanted.name)]), line


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-")
