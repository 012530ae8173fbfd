"""Check Rootlace on a machine with a GPU, without installing it. Standard library only.

    python scripts/gpu_check.py all      the GPU tests, then the benchmark
    python scripts/gpu_check.py test     the GPU tests alone
    python scripts/gpu_check.py bench    the benchmark alone
    python scripts/gpu_check.py wheels   fetch what such a machine may lack

Run by the Python that has torch with CUDA; nothing is downloaded there and nothing is installed
into it. The packages are found through a tree of links (folder names differ from package names).
What that Python lacks is taken from `build/gpu-wheels`, if it was filled beforehand on a machine
that can reach a package index (`wheels`), and unpacked into `build/gpu-site`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "gpu-tree"
SITE = ROOT / "build" / "gpu-site"
WHEELS = ROOT / "build" / "gpu-wheels"
CONSTRAINTS = ROOT / "constraints.txt"
RESULTS = ROOT / "benchmarks" / "results"

NEEDED = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "numpy": "numpy",
    "psutil": "psutil",
    "msgspec": "msgspec",
    "zmq": "pyzmq",
    "llguidance": "llguidance",
    "interegular": "interegular",
    "outlines_core": "outlines-core",
    "jsonschema": "jsonschema",
    "jsonschema_rs": "jsonschema-rs",
    "aiohttp": "aiohttp",
    "jinja2": "Jinja2",
    "rich": "rich",
    "typer": "typer",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
}
"""Import name -> distribution: without these nothing can be checked."""
USEFUL = {"xdist": "pytest-xdist"}
"""Without these the tests take longer."""
BROUGHT = (
    *("msgspec", "pyzmq", "llguidance", "psutil", "interegular", "outlines-core"),
    *("aiohttp", "aiohappyeyeballs", "aiosignal", "frozenlist", "multidict", "propcache", "yarl"),
    *("Jinja2", "MarkupSafe", "idna", "typing-extensions"),
    *("rich", "markdown-it-py", "mdurl", "Pygments"),
    *("typer", "click", "shellingham", "annotated-doc"),
    *("pytest", "pytest-timeout", "iniconfig", "pluggy", "packaging"),
    *("jsonschema", "jsonschema-rs", "jsonschema-specifications", "referencing"),
    *("rpds-py", "attrs"),
)
"""What `wheels` fetches: small, and not part of what comes with torch and transformers."""

TEST_SECONDS, BENCH_SECONDS = 560, 530
NO_TESTS = 5
"""pytest's exit status where it has nothing to run."""
MOST_WORKERS = 6
"""Test processes that share the GPU: most of a run is compiling kernels, which is CPU work."""


class CheckError(Exception):
    """The check cannot be made; the message says what to do."""


def say(text: str) -> None:
    print(f"gpu-check: {text}", flush=True)


# ---------------------------------------------------------------- wheels


def pins(text: str) -> dict[str, str]:
    """Distribution (normalised) -> version, of a constraints file."""
    found = {}
    for line in text.splitlines():
        name, separator, pinned = line.split("#")[0].strip().partition("==")
        if separator:
            found[normalised(name)] = pinned
    return found


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def fetch_wheels(python: str, machine: str, folder: Path = WHEELS) -> list[Path]:
    """Download what `BROUGHT` names for a Python version ("3.12") on Linux, at the versions of the
    constraints file. Raises CheckError if pip cannot."""
    wanted = pins(CONSTRAINTS.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # pip takes the platforms literally: all that a C library of 2.39 is compatible with.
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(17, 40)]
    platforms += [f"manylinux2014_{machine}"]
    names = [f"{name}=={wanted[normalised(name)]}" for name in BROUGHT]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", python, "--dest", str(folder)]
    command += [part for platform in platforms for part in ("--platform", platform)]
    if subprocess.run([*command, *names]).returncode:
        raise CheckError("pip could not fetch them all (its reasons are above)")
    return sorted(folder.glob("*.whl"))


def distribution(wheel: Path) -> str:
    """The distribution a wheel holds, by its file name."""
    return normalised(wheel.name.split("-")[0])


def lacking(wheels: Iterable[Path]) -> list[Path]:
    """Those wheels whose distribution this Python does not have, in any version."""
    found = []
    for wheel in wheels:
        try:
            version(distribution(wheel))
        except PackageNotFoundError:
            found.append(wheel)
    return found


def unpack_wheels() -> None:
    """Put the wheels that are lacking where `environment` finds them."""
    wanted = lacking(sorted(WHEELS.glob("*.whl")))
    if not wanted:
        return
    say(f"unpacking {len(wanted)} wheels of {WHEELS.relative_to(ROOT)}")
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--no-deps", "--no-compile", "--target", str(SITE)]
    if subprocess.run([*command, *map(str, wanted)]).returncode:
        python = ".".join(map(str, sys.version_info[:2]))
        raise CheckError(
            "the wheels do not fit this Python: fetch them again with "
            f"`make gpu-wheels GPU_PYTHON_VERSION={python}`"
        )


# ---------------------------------------------------------------- the machine


def link_packages(tree: Path = TREE) -> None:
    """A folder in which `import rootlace` finds this checkout."""
    package = tree / "rootlace"
    shutil.rmtree(tree, ignore_errors=True)
    package.mkdir(parents=True)
    for entry in (*(ROOT / "frontend").iterdir(), ROOT / "runtime", ROOT / "kernels"):
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(os.path.relpath(entry, package))


def environment() -> dict[str, str]:
    """This process's environment, with the packages, the wheels and the checkout on the path."""
    path = [str(TREE), str(ROOT), *([str(SITE)] if SITE.exists() else [])]
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *([before] if before else [])])}


def missing(modules: dict[str, str]) -> list[str]:
    """Distributions whose module this Python (or what was unpacked) does not have."""
    places = [str(SITE)] if SITE.exists() else []
    found = []
    for module, name in modules.items():
        here = any((Path(place) / module).exists() for place in places)
        if not here and importlib.util.find_spec(module) is None:
            found.append(name)
    return found


def look_at_machine() -> None:
    """Say what was found. Raises CheckError for what must be there and is not."""
    lacks = missing(NEEDED)
    if lacks:
        python = ".".join(map(str, sys.version_info[:2]))
        raise CheckError(
            f"{sys.executable} lacks {', '.join(lacks)}. Small ones can be brought along: run "
            f"`make gpu-wheels GPU_PYTHON_VERSION={python}` where there is a package index, copy "
            "build/gpu-wheels here, and try again. torch with CUDA, triton and transformers must "
            "be there; name another Python with `make GPU_PYTHON=... gpu-check`"
        )
    absent = missing(USEFUL)
    if absent:
        say(f"not there, so the tests run one after the other: {absent}")
    probe = (
        "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available(), "
        "torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    )
    done = subprocess.run([sys.executable, "-c", probe], text=True, capture_output=True)
    if done.returncode:
        raise CheckError(f"torch cannot be imported: {done.stderr.strip().splitlines()[-1:]}")
    torch, cuda, there, *name = done.stdout.split()
    if there != "True":
        raise CheckError(f"torch {torch} (CUDA {cuda}) sees no GPU")
    say(f"Python {sys.version.split()[0]}, torch {torch}, CUDA {cuda}, {' '.join(name)}")


# ---------------------------------------------------------------- the two halves


@dataclass(frozen=True)
class Outcome:
    name: str
    passed: bool
    seconds: float
    note: str = ""

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return f"{self.name}: {verdict} in {self.seconds:.0f} s{self.note}"


def run(name: str, command: Sequence[str], seconds: float, fine: Sequence[int] = (0,)) -> Outcome:
    """Run a command from the checkout; it is stopped after so many seconds. It passes if its exit
    status is among `fine`."""
    start = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment(), timeout=seconds)
        passed, note = done.returncode in fine, ""
    except subprocess.TimeoutExpired:
        passed, note = False, " (stopped: no time was left)"
    return Outcome(name, passed, time.monotonic() - start, note)


def run_tests(extra: Sequence[str]) -> list[Outcome]:
    """Tests that may share the GPU by several processes, where pytest can; then the others."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider"]
    # A first test compiles what it tests: the usual limit of a test would be too tight.
    command += ["--timeout=300", "--durations=5", *extra]
    workers = min(MOST_WORKERS, (os.cpu_count() or 2) // 2)
    parallel = []
    if workers > 1 and importlib.util.find_spec("xdist") is not None:
        parallel = ["-n", str(workers), "--dist", "worksteal"]
    # Where tests are chosen (`-k`), one of the two runs may have none of them.
    fine = (0, NO_TESTS) if extra else (0,)
    first = run("tests", [*command, *parallel, "-m", "not whole_gpu"], TEST_SECONDS, fine)
    left = max(TEST_SECONDS - first.seconds, 30)
    second = run("tests alone on the GPU", [*command, "-m", "whole_gpu"], left, fine)
    return [first, second]


def run_benchmark(results: Path, extra: Sequence[str]) -> list[Outcome]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--json", str(results / "gpu.json")]
    command += ["--budget", str(BENCH_SECONDS), *extra]
    # The benchmark keeps to its budget by itself; the margin is for its start.
    return [run("benchmark", command, BENCH_SECONDS + 45)]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Check Rootlace on a machine with a GPU. "
        "What follows `--` goes to pytest, or to the benchmark."
    )
    parser.add_argument("what", choices=("all", "test", "bench", "wheels"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the benchmark's")
    parser.add_argument("--python-version", default="3.12", help="wheels: of that machine's Python")
    parser.add_argument("--machine", default="x86_64", choices=("x86_64", "aarch64"))
    parser.add_argument("extra", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.what == "wheels":
        wheels = fetch_wheels(arguments.python_version, arguments.machine)
        size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
        say(f"{len(wheels)} wheels, {size:.1f} MiB, in {WHEELS.relative_to(ROOT)}")
        return 0
    link_packages()
    unpack_wheels()
    look_at_machine()
    outcomes: list[Outcome] = []
    if arguments.what in ("all", "test"):
        outcomes += run_tests(arguments.extra if arguments.what == "test" else ())
    if arguments.what in ("all", "bench"):
        arguments.results.mkdir(parents=True, exist_ok=True)
        extra = arguments.extra if arguments.what == "bench" else ()
        outcomes += run_benchmark(arguments.results.resolve(), extra)
    for outcome in outcomes:
        say(str(outcome))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        sys.exit(f"gpu-check: {error}")
