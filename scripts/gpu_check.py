"""Check Rootlace on a machine with a GPU, without installing it. Standard library only.

    python scripts/gpu_check.py all --budget 480   smoke, tests, benchmark: seconds for all of it
    python scripts/gpu_check.py smoke              does it give tokens at all?
    python scripts/gpu_check.py test               the GPU tests alone
    python scripts/gpu_check.py bench              the benchmark alone
    python scripts/gpu_check.py wheels             fetch what such a machine may lack
    python scripts/gpu_check.py all --rehearse     all of it on a CPU, kernels interpreted

Every part has its share of the budget and writes each result as it comes; what a part leaves is for
the parts after it. Kernels are compiled for the tests while the smoke test runs. The end of the
output is a page: targets, figures, what failed, the first failure's traceback.

Run by the Python that has torch with CUDA; nothing is downloaded there and nothing is installed
into it. The packages are found through a tree of links (folder names differ from package names).
What that Python lacks is taken from `build/gpu-wheels`, if it was filled beforehand on a machine
that can reach a package index (`wheels`), and unpacked into `build/gpu-site`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
    "ml_dtypes": "ml_dtypes",
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
    "click": "click",
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
    *("click", "rich", "markdown-it-py", "mdurl", "Pygments"),
    *("pytest", "pytest-timeout", "pytest-xdist", "execnet", "iniconfig", "pluggy", "packaging"),
    *("jsonschema", "jsonschema-rs", "jsonschema-specifications", "referencing"),
    *("rpds-py", "attrs", "ml_dtypes"),
)
"""What `wheels` fetches: small, and not part of what comes with torch and transformers."""

BUDGET = 480.0
SHARES = {"smoke": 45, "test": 190, "bench": 200}
"""Of a budget of `BUDGET` seconds; the rest is for starts and the summary."""
NOT_RUN = ("no time was left", "no sound GPU was left")
"""How tests that did not run say why (`tests/gpu/conftest.py`)."""
NO_TESTS = 5
"""pytest's exit status where it has nothing to run."""
MOST_WORKERS = 14
"""Processes that compile, and test processes that share the GPU: most of a run is compiling."""
SHARED_TESTS = 0.85
"""Of the tests' seconds: for those that share the GPU. Those that need it alone start anew."""
SMOKE, TESTS, BENCH = "gpu_smoke.jsonl", ("gpu_tests.jsonl", "gpu_tests_alone.jsonl"), "gpu.json"
LONGEST_TRACEBACK = 60
"""Lines of the first failure that the summary shows, its last ones."""
KILL_SECONDS = 15
"""What a part gets beyond its share to end by itself."""


class CheckError(Exception):
    """Raised when the check cannot be made; the message says what to do."""


def say(text: str) -> None:
    print(f"gpu-check: {text}", flush=True)


# ---------------------------------------------------------------- wheels


def pins(text: str) -> dict[str, str]:
    """Return distribution (normalised) -> version of a constraints file."""
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
    # pip takes platforms literally, so all that a C library of 2.39 supports are listed.
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
    """Return the distribution in a wheel, by its file name."""
    return normalised(wheel.name.split("-")[0])


def lacking(wheels: Iterable[Path]) -> list[Path]:
    """Return the wheels whose distribution this Python lacks in any version."""
    found = []
    for wheel in wheels:
        try:
            version(distribution(wheel))
        except PackageNotFoundError:
            found.append(wheel)
    return found


def unpack_wheels() -> None:
    """Unpack missing wheels where `environment` finds them."""
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
    """Make a folder in which `import rootlace` finds this checkout."""
    package = tree / "rootlace"
    shutil.rmtree(tree, ignore_errors=True)
    package.mkdir(parents=True)
    for entry in (*(ROOT / "frontend").iterdir(), ROOT / "runtime", ROOT / "kernels"):
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(os.path.relpath(entry, package))


def environment() -> dict[str, str]:
    """Return this process's environment, with packages, wheels and checkout on the path."""
    path = [str(TREE), str(ROOT), *([str(SITE)] if SITE.exists() else [])]
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *([before] if before else [])])}


def missing(modules: dict[str, str]) -> list[str]:
    """Return distributions whose module neither this Python nor the unpacked wheels have."""
    # A module may be a folder or a file, so the import system searches for both.
    importlib.invalidate_caches()
    places = [str(SITE), *sys.path]
    return [name for module, name in modules.items() if not PathFinder.find_spec(module, places)]


def look_at_machine(rehearse: bool) -> None:
    """Print facts about the machine. Raises CheckError for missing requirements."""
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
    if there != "True" and not rehearse:
        raise CheckError(f"torch {torch} (CUDA {cuda}) sees no GPU")
    say(f"Python {sys.version.split()[0]}, torch {torch}, CUDA {cuda}, {' '.join(name)}")
    # Triton compiles its launchers from C, with Python's headers.
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not rehearse and not (header.exists() and any(map(shutil.which, ("cc", "gcc", "clang")))):
        say(f"no C compiler or no {header}: Triton's kernels will not start")


# ---------------------------------------------------------------- the parts


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
    """Run a command from the checkout for at most so many seconds. It passes if its exit status is
    in `fine`."""
    start = time.monotonic()
    process = begin(command)
    try:
        passed, note = process.wait(seconds) in fine, ""
    except subprocess.TimeoutExpired:
        passed, note = False, " (stopped: no time was left)"
    finally:
        end(process)
    return Outcome(name, passed, time.monotonic() - start, note)


def begin(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command from the checkout in a new session, for `end`."""
    return subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process of `begin` and its descendants: a worker left alone would keep GPU memory
    and cores from later parts."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def workers() -> int:
    return max(2, min(MOST_WORKERS, (os.cpu_count() or 2) - 2))


def start_compiling(seconds: float, rehearse: bool) -> subprocess.Popen[bytes]:
    """Fill Triton's cache beside the next part. Rehearsed: one kernel's variants, for sm_90."""
    # The smoke test, which runs at the same time, has priority.
    command = ["nice", sys.executable, "scripts/compile_kernels.py", "--into-cache"]
    command += ["--processes", str(workers()), "--seconds", str(seconds)]
    command += ["kv_storage", "--arch", "90"] if rehearse else []
    return begin(command)


def run_smoke(seconds: float, results: Path, rehearse: bool) -> Outcome:
    command = [sys.executable, "-m", "tests.gpu.smoke", "--json", str(results / SMOKE)]
    command += ["--seconds", str(seconds), *["--rehearse"] * rehearse]
    return run("smoke", command, seconds + 2 * KILL_SECONDS)


def run_tests(
    seconds: float, results: Path, rehearse: bool, extra: Sequence[str] = ()
) -> list[Outcome]:
    """Run tests that may share the GPU in several processes, if pytest can; then the others."""
    # All tests take minutes with interpreted kernels, so the smallest kernel's tests are enough.
    folder = "tests/gpu/test_pointwise.py::test_copy_slots" if rehearse else "tests/gpu"
    command = [sys.executable, "-m", "pytest", folder, "-q", "-p", "no:cacheprovider"]
    # A first test compiles its kernels, so the usual time limit would be too tight.
    command += [f"--timeout={max(60, seconds / 2):.0f}", "--tb=short", *extra]
    command += ["--on-cpu=triton"] * rehearse
    parallel = []
    if not missing(USEFUL):
        count = 1 if rehearse else workers()
        parallel = ["-n", str(count), "--dist", "load", "--maxschedchunk", "1"]
    # With `-k`, or with few tests, one of the two runs may have no tests.
    fine = (0, NO_TESTS) if extra or rehearse else (0,)
    found: list[Outcome] = []
    for name, more, report in (
        ("tests", [*parallel, "-m", "not whole_gpu"], TESTS[0]),
        ("tests alone on the GPU", ["-m", "whole_gpu"], TESTS[1]),
    ):
        share = 1.0 if found else SHARED_TESTS
        left = max(share * seconds - sum(one.seconds for one in found), KILL_SECONDS)
        limits = ["--gpu-seconds", f"{left:.0f}", "--gpu-report", str(results / report)]
        found.append(run(name, [*command, *limits, *more], left + 2 * KILL_SECONDS, fine))
    return found


def run_benchmark(
    seconds: float, results: Path, rehearse: bool, extra: Sequence[str] = ()
) -> Outcome:
    command = [sys.executable, "-m", "benchmarks.gpu", "--json", str(results / BENCH)]
    command += ["--budget", f"{seconds:.0f}", *extra]
    command += ["--smoke", "--device", "cpu"] if rehearse else []
    return run("benchmark", command, seconds + 2 * KILL_SECONDS)


# ---------------------------------------------------------------- the summary


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of JSON written so far; the last one may be cut."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def summary(results: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """Return a page: results, targets beside figures, failures, and parts that did not run."""
    told = ["", "=" * 30 + " gpu-check " + "=" * 30, *map(str, outcomes)]
    smoke = lines_of(results / SMOKE)
    failures = [(f"{one['check']}, {one['way']}", one["error"]) for one in smoke if "error" in one]
    for one in smoke:
        verdict = "passed" if one["passed"] else "FAILED"
        told.append(f"  {one['check']:10} {verdict} {one['way']}")
    tests = [line for name in TESTS for line in lines_of(results / name)]
    if tests:
        counts = Counter(line["outcome"] for line in tests)
        told.append("tests: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    for reason in NOT_RUN:
        late = [line["test"] for line in tests if reason in line.get("why", "")]
        if late:
            told.append(f"{reason} for {len(late)} tests:")
            told += [f"  {name.removeprefix('tests/gpu/')}" for name in late]
    for line in tests:
        if line["outcome"] == "failed":
            told.append(f"FAILED {line['test']}")
            failures.append((line["test"], line.get("why", "")))
    bench = json.loads((results / BENCH).read_text()) if (results / BENCH).exists() else {}
    for name, target in bench.get("targets", {}).items():
        value = "not measured" if target["value"] is None else f"{target['value']:.3f}"
        verdict = {None: "", True: "met", False: "MISSED"}[target["met"]]
        told.append(f"{name:38} {target['target']:>9} {value:>13}  {verdict}")
    for name, part in bench.get("parts", {}).items():
        if "error" in part:
            told.append(f"benchmark {name}: {part['error']}")
            failures.append((f"benchmark {name}", part["error"]))
    if failures:
        name, text = failures[0]
        told += ["", f"first failure: {name}", *text.splitlines()[-LONGEST_TRACEBACK:]]
    return told


def copy_results(results: Path) -> None:
    """Copy the results into the folder OUT, if set."""
    folder = os.environ.get("OUT")
    if folder:
        for name in (SMOKE, *TESTS, BENCH):
            if (results / name).exists():
                shutil.copyfile(results / name, Path(folder) / name)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Check Rootlace on a machine with a GPU. "
        "What follows `--` goes to pytest, or to the benchmark."
    )
    parser.add_argument("what", choices=("all", "smoke", "test", "bench", "wheels"))
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for everything (480)")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny shapes")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of what is measured")
    parser.add_argument("--python-version", default="3.12", help="wheels: of that machine's Python")
    parser.add_argument("--machine", default="x86_64", choices=("x86_64", "aarch64"))
    parser.add_argument("extra", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def check(arguments: argparse.Namespace) -> list[Outcome]:
    """Run the requested parts one after the other, each within its share of the remaining time."""
    deadline = time.monotonic() + arguments.budget
    results, rehearse = arguments.results.resolve(), arguments.rehearse
    results.mkdir(parents=True, exist_ok=True)
    for name in (SMOKE, *TESTS, BENCH):
        (results / name).unlink(missing_ok=True)
    wanted = [name for name in SHARES if arguments.what in (name, "all")]
    outcomes: list[Outcome] = []
    compiling = None
    if arguments.what in ("all", "test"):
        compiling = start_compiling(arguments.budget * SHARES["test"] / BUDGET / 2, rehearse)
    try:
        for place, part in enumerate(wanted):
            coming = sum(SHARES[name] for name in wanted[place:])
            spare = (BUDGET - sum(SHARES.values())) / BUDGET * arguments.budget
            seconds = max(deadline - time.monotonic() - spare, 1.0) * SHARES[part] / coming
            begun = time.monotonic()
            extra = arguments.extra if arguments.what == part else ()
            if part == "smoke":
                outcomes.append(run_smoke(seconds, results, rehearse))
            elif part == "test":
                if compiling is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):  # a compiler may hang
                        compiling.wait(seconds / 2)
                    end(compiling)
                left = seconds - (time.monotonic() - begun)
                outcomes += run_tests(max(left, 1.0), results, rehearse, extra)
            else:
                outcomes.append(run_benchmark(seconds, results, rehearse, extra))
            copy_results(results)
    finally:
        if compiling is not None:
            end(compiling)
    print("\n".join(summary(results, outcomes)), flush=True)
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.what == "wheels":
        wheels = fetch_wheels(arguments.python_version, arguments.machine)
        size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
        say(f"{len(wheels)} wheels, {size:.1f} MiB, in {WHEELS.relative_to(ROOT)}")
        return 0
    link_packages()
    unpack_wheels()
    look_at_machine(arguments.rehearse)
    return 0 if all(outcome.passed for outcome in check(arguments)) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        sys.exit(f"gpu-check: {error}")
