"""How the set-up tells a CPU build of torch from one that brings CUDA along."""

import importlib.util
import platform
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


def test_constraints_fit_the_project(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every dependency has a tested version, and it is one that the project admits."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    monkeypatch.delenv("ROOTLACE_TORCH", raising=False)
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    tested = {_canonical(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert setup_env.pinned_torch() == f"torch=={tested['torch']}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = [*extras["runtime"], *extras["test"], *extras["clients"]]
    for line in [*project["dependencies"], *installed]:
        wanted = Requirement(line)
        assert _canonical(wanted.name) in tested, f"{wanted.name} is not in constraints.txt"
        assert wanted.specifier.contains(tested[_canonical(wanted.name)]), line


@pytest.fixture
def pins(setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text(
        "tqdm==4\n# about torch\ntorch == 2.15.0  # why\n# about triton\ntriton==3.9.0\n"
        "Triton == 3.8\ntritonclient==2\ntorchvision==1\ntyper==0.1\n"
    )
    monkeypatch.setattr(setup_env, "CONSTRAINTS", file)
    monkeypatch.delenv("ROOTLACE_TORCH", raising=False)


@pytest.mark.usefixtures("pins")
def test_the_pinned_triton_gives_way_to_torchs_own(setup_env: ModuleType) -> None:
    """All pins but triton's."""
    kept = setup_env.constraints(setup_env.pinned_torch(), pin_triton=False)
    assert kept == (
        "tqdm==4\n# about torch\ntorch == 2.15.0  # why\n# about triton\n"
        "tritonclient==2\ntorchvision==1\ntyper==0.1\n"
    )


@pytest.mark.usefixtures("pins")
def test_another_torch_than_the_pinned_one(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable's, in what is asked of pip and in what constrains the rest."""
    assert setup_env.pinned_torch() == "torch == 2.15.0"
    monkeypatch.setenv("ROOTLACE_TORCH", "2.13.0")
    assert setup_env.pinned_torch() == "torch==2.13.0"
    lines = setup_env.constraints(setup_env.pinned_torch(), pin_triton=True).splitlines()
    assert [line.split("#")[0].strip() for line in lines if line.startswith("t")] == [
        *("tqdm==4", "torch==2.13.0", "triton==3.9.0", "tritonclient==2"),
        *("torchvision==1", "typer==0.1"),
    ]


@pytest.mark.parametrize(
    ("requirements", "brings"),
    [
        ([], False),
        (["filelock", "sympy"], False),
        (['triton==3.7.1; platform_system == "Plan 9"'], False),
        (['triton==3.7.1; extra == "gpu"'], False),
        (["triton==3.7.1"], True),
        ([f'triton==3.7.1; platform_system == "{platform.system()}"'], True),
    ],
)
def test_whether_torch_brings_triton(
    setup_env: ModuleType, tmp_path: Path, requirements: list[str], brings: bool
) -> None:
    """Asked of an environment's Python; here one that only knows a torch of this metadata."""
    metadata = tmp_path / "torch-2.13.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: torch", "Version: 2.13.0"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    metadata.write_text("\n".join(lines) + "\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert setup_env.torch_brings_triton(python) is brings


def test_no_torch_brings_no_triton(setup_env: ModuleType, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    assert not setup_env.torch_brings_triton(python)


@pytest.mark.parametrize("there", [True, False])
def test_a_model_that_cannot_be_had_stops_nothing(
    setup_env: ModuleType, tmp_path: Path, there: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Asked of the environment's Python; here a program that notes what it is asked for."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexit {0 if there else 1}\n')
    python.chmod(0o755)
    setup_env.get_model(python, "smollm2")
    assert (tmp_path / "asked").read_text() == "-m rootlace.cli models get smollm2\n"
    said = capfd.readouterr().out
    assert ("going on without the model smollm2" in said) is not there
    assert ("rootlace models get smollm2" in said) is not there


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-")
