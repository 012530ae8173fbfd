"""How the set-up tells a CPU build of torch from one that brings CUDA along."""

import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import setup_env

ROOT = Path(__file__).resolve().parents[2]


HERE = {"linux": "Linux", "darwin": "Darwin", "win32": "Windows"}[sys.platform]


@pytest.mark.parametrize(
    ("requirements", "cuda"),
    [
        (["filelock", f'nvidia-cudnn-cu13==9.20.0.48; platform_system == "{HERE}"'], True),
        (["cuda-bindings<14"], True),
        (["triton==3.7.1"], True),
        (["filelock", "sympy>=1.13.3"], False),
        (['nvidia-nccl-cu13; platform_system == "Plan 9"'], False),
        (['triton; extra == "gpu"'], False),
        (None, False),
    ],
)
def test_whether_a_build_brings_cuda(requirements: list[str] | None, cuda: bool) -> None:
    """By what pip reports of its dependencies."""
    metadata = {"name": "torch"} | ({} if requirements is None else {"requires_dist": requirements})
    assert setup_env.pulls_cuda({"install": [{"metadata": metadata}]}) is cuda


def test_constraints_fit_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
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
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text(
        "tqdm==4\n# about torch\ntorch == 2.15.0  # why\n# about triton\ntriton==3.9.0\n"
        "Triton == 3.8\ntritonclient==2\ntorchvision==1\ntyper==0.1\n"
    )
    monkeypatch.setattr(setup_env, "CONSTRAINTS", file)
    monkeypatch.delenv("ROOTLACE_TORCH", raising=False)


@pytest.mark.usefixtures("pins")
def test_the_pinned_triton_gives_way_to_torchs_own() -> None:
    """All pins but triton's."""
    kept = setup_env.constraints(setup_env.pinned_torch(), pin_triton=False)
    assert kept == (
        "tqdm==4\n# about torch\ntorch == 2.15.0  # why\n# about triton\n"
        "tritonclient==2\ntorchvision==1\ntyper==0.1\n"
    )


@pytest.mark.usefixtures("pins")
def test_another_torch_than_the_pinned_one(monkeypatch: pytest.MonkeyPatch) -> None:
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
        (None, False),
        ([], False),
        (["filelock", "sympy"], False),
        (['triton==3.7.1; platform_system == "Plan 9"'], False),
        (['triton==3.7.1; extra == "gpu"'], False),
        (["triton==3.7.1"], True),
        ([f'triton==3.7.1; platform_system == "{HERE}"'], True),
    ],
)
def test_whether_torch_brings_triton(
    tmp_path: Path, requirements: list[str] | None, brings: bool
) -> None:
    """Asked of an environment's Python; here one that knows a torch of this metadata, or none."""
    if requirements is not None:
        metadata = tmp_path / "torch-2.13.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        lines = ["Metadata-Version: 2.1", "Name: torch", "Version: 2.13.0"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
        metadata.write_text("\n".join(lines) + "\n")
    python = program(tmp_path, f'PYTHONPATH={tmp_path} exec {sys.executable} -S "$@"')
    assert setup_env.torch_brings_triton(python) is brings


@pytest.mark.parametrize("there", [True, False])
def test_a_model_that_cannot_be_had_stops_nothing(
    tmp_path: Path, there: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Asked of the environment's Python; here a program that notes what it is asked for."""
    python = program(tmp_path, f'echo "$@" >> {tmp_path}/asked; exit {0 if there else 1}')
    setup_env.get_model(python, "smollm2")
    assert (tmp_path / "asked").read_text() == "-m rootlace.cli models get smollm2\n"
    said = capfd.readouterr().out
    assert ("going on without the model smollm2" in said) is not there
    assert ("rootlace models get smollm2" in said) is not there


def program(folder: Path, command: str) -> Path:
    """What stands for an environment's Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
    return path


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-")
