"""How many faults the tests find: small ones are put into the product, one at a time.

    python scripts/mutants.py [--count 30] [--seed 0] [--near] [--cpu-seconds 1800] [--json FILE]
                              [-- PYTEST ARGUMENTS]

A mutant is one place of the product with one fault: a comparison or a sum the other way round, a
number off by one, `and` for `or`, a condition negated. Places are drawn with a fixed seed, as many
of each package as its share of all places. The tests nearest to the place run first (those named
after its file, those of its folder, those of its package), then all others of `make check`
(`-m "not slow"`, or the arguments behind `--`), until the first failure; `--near` leaves these
others out. The test that fails must pass without the fault, or the run ends with exit status 1. A
mutant that no test finds, or none within `--cpu-seconds`, is printed with its difference: either a
test is missing, or the fault changes nothing (an equivalent mutant).

The work is done in a copy of the checkout, with this interpreter. With `--json` the outcomes are
written after each mutant, and a run that was interrupted continues where it was, on the same code.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("frontend", "runtime", "kernels")

# Maps folders of the product to their best tests. The longest matching name counts.
TESTS_OF = {
    "frontend": ["tests/frontend"],
    "frontend/cli": ["tests/cli"],
    "kernels": ["tests/kernels/test_dispatch.py", "tests/kernels/reference", "tests/model"],
    "kernels/native": ["tests/kernels/native"],
    "runtime": ["tests/engine"],
    "runtime/cache": ["tests/cache", "tests/scheduler"],
    "runtime/structured": ["tests/structured"],
    "runtime/contracts": ["tests/scheduler", "tests/engine"],
    "runtime/engine": ["tests/engine"],
    "runtime/server": ["tests/server"],
    "runtime/model": ["tests/model", "tests/engine"],
    "runtime/scheduler": ["tests/scheduler"],
    "runtime/simulation": ["tests/simulation"],
}
# Faults in kernels of Triton's language and in texts of the command line are found elsewhere.
LEFT_OUT = ("kernels/triton/", "runtime/assets/")
CPU_SECONDS = 1800
"""Processor time for the tests of one mutant, which is no shorter on a busy machine. A mutant that
makes a test hang is found by the time limit of that test."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True)
class Place:
    """The `index`-th expression of a file that can be changed. `line` is for people."""

    file: str
    index: int
    line: int


@dataclass(frozen=True)
class Outcome:
    """`found_by`: pytest's line for the first failing test, or "". `all_run`: false if the
    processor time ran out."""

    place: Place
    change: str
    found_by: str
    all_run: bool = True


def changeable(tree: ast.Module) -> Iterator[ast.expr]:
    """Return the expressions within functions that `change` knows, in the order of the text."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    seen: set[int] = set()
    for function in functions:
        for statement in function.body:
            for node in ast.walk(statement):
                if id(node) not in seen and isinstance(node, ast.expr) and change(node) is not None:
                    seen.add(id(node))
                    yield node


def change(node: ast.expr) -> ast.expr | None:
    """Return a copy with one fault, or None if the expression has no change."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        found = copy.deepcopy(node)
        found.ops[0] = COMPARISONS[type(node.ops[0])]()
        return found
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        if any(_is_text(side) for side in (node.left, node.right)):
            return None
        return ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return ast.BoolOp(other, node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.IfExp):
        return ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return ast.Constant(not node.value)
    return None


def _is_text(node: ast.expr) -> bool:
    """Whether the expression joins texts: a fault there is a TypeError that any test finds."""
    if isinstance(node, ast.JoinedStr):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def mutant(source: str, index: int) -> tuple[str, str]:
    """Return the file's text with a fault at its `index`-th place, and the change."""
    tree = ast.parse(source)
    old = list(changeable(tree))[index]
    new = change(old)
    assert new is not None
    said = f"{ast.unparse(old)}  ->  {ast.unparse(new)}"
    return ast.unparse(ast.fix_missing_locations(_Replace(old, new).visit(tree))), said


def places() -> list[Place]:
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(LEFT_OUT):
                nodes = changeable(ast.parse(path.read_text()))
                found += [Place(name, index, node.lineno) for index, node in enumerate(nodes)]
    return found


def draw(count: int, seed: int) -> list[Place]:
    """Return places at even distances through all, from a start chosen by the seed."""
    everything = places()
    step = len(everything) / count
    offset = random.Random(seed).random()
    return [everything[int((number + offset) * step)] for number in range(count)]


def copy_of_the_checkout(target: Path) -> None:
    """Copy all files known to git, and add links under which the three folders are one package."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    package = target / "build" / "tree" / "rootlace"
    package.mkdir(parents=True)
    for entry in [*(target / "frontend").iterdir(), target / "runtime", target / "kernels"]:
        (package / entry.name).symlink_to(entry)
    shared = ROOT.parent / "shared"
    if shared.exists():
        (target.parent / "shared").symlink_to(shared)


class OutOfTime(Exception):
    """Raised when tests took more processor time than permitted."""


def run_tests(target: Path, arguments: list[str], seconds: int = CPU_SECONDS) -> str:
    """Return the first failure in pytest's summary, or "" if all pass.

    Raises `OutOfTime` if pytest's process takes more than `seconds` of processor time.
    """
    environment = {**os.environ, "PYTHONPATH": str(target / "build" / "tree")}
    # Child processes inherit the limit; each counts its own time.
    command = ["sh", "-c", f'ulimit -S -t {seconds}; exec "$@"', "sh"]
    command += [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=target, env=environment, text=True, capture_output=True)
    if done.returncode == -signal.SIGXCPU:
        raise OutOfTime
    if done.returncode in (0, 5):  # 5: no tests
        return ""
    # A test's log may begin with these words, too.
    marks = ("FAILED tests/", "ERROR tests/")
    lines = [line for line in done.stdout.splitlines() if line.startswith(marks)]
    return lines[0] if lines else (done.stdout + done.stderr)[-300:]


def tests_of(file: str) -> list[str]:
    """Return the tests of the file's package."""
    folder = max((name for name in TESTS_OF if file.startswith(f"{name}/")), key=len)
    return TESTS_OF[folder]


def stages(file: str, target: Path) -> list[list[str]]:
    """Yield arguments for pytest that together run all tests once, the nearest ones first."""
    package = [path for path in tests_of(file) if (target / path).exists()]
    folder = target / "tests" / Path(file.removeprefix("runtime/")).parent
    while not folder.exists():
        folder = folder.parent
    around = [folder.relative_to(target).as_posix()]
    if around == ["tests"]:
        around = package
    named = [
        path.relative_to(target).as_posix()
        for name in around
        for path in sorted((target / name).rglob(f"test_{Path(file).stem}*.py"))
    ]
    found: list[list[str]] = []
    done: list[str] = []
    for paths in (named, around, package):
        if new := [path for path in paths if path not in done]:
            found.append([*new, *_without(done)])
            done += new
    return [*found, _without(done)]


def _without(paths: list[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


def first_failure(target: Path, runs: list[list[str]], cpu_seconds: int) -> str:
    """Return pytest's line for the first failing test of any run, or "".

    Raises `OutOfTime` if the runs take more than `cpu_seconds` together.
    """
    end = _cpu_seconds_of_tests() + cpu_seconds
    for arguments in runs:
        left = end - _cpu_seconds_of_tests()
        if left < 1:
            raise OutOfTime
        if found := run_tests(target, arguments, int(left)):
            return found
    return ""


def _cpu_seconds_of_tests() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def judge(place: Place, target: Path, options: argparse.Namespace, sound: set[str]) -> Outcome:
    """Judge a mutant. `sound`: files of tests that pass without a fault; more are added.

    Raises `RuntimeError` if the failing test's file also fails without the fault.
    """
    path = target / place.file
    source = path.read_text()
    changed, said = mutant(source, place.index)
    path.write_text(changed)
    wanted = stages(place.file, target)[: -1 if options.near else None]
    runs = [[*options.pytest, *stage] for stage in wanted]
    try:
        found = first_failure(target, runs, options.cpu_seconds)
    except OutOfTime:
        return Outcome(place, said, "", all_run=False)
    finally:
        path.write_text(source)
    if found.startswith(("FAILED ", "ERROR ")):
        file = found.split()[1].split("::")[0]
        try:
            again = "" if file in sound else run_tests(target, [*options.pytest, file])
        except OutOfTime:
            again = f"{file} takes more than {CPU_SECONDS} s"
        if again:
            raise RuntimeError(f"fails without any fault: {again}")
        sound.add(file)
    return Outcome(place, said, found)


def missed(outcome: Outcome) -> str:
    return "NOT FOUND" if outcome.all_run else "NOT FOUND within the limit"


def commit() -> str:
    """Return the checked-out commit and a digest of differing files, if any."""
    head, changes = (
        subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
        for arguments in (["rev-parse", "HEAD"], ["diff", "HEAD"])
    )
    digest = hashlib.sha256(changes).hexdigest()[:16] if changes else ""
    return f"{head.decode().strip()}{'+' if digest else ''}{digest}"


def earlier(file: Path | None, run: dict[str, object]) -> list[Outcome]:
    """Return the outcomes that the same run wrote to `file` before an interruption."""
    if file is None or not file.exists():
        return []
    written = json.loads(file.read_text())
    of_another = {key: written.get(key) for key in run if written.get(key) != run[key]}
    if of_another:
        raise SystemExit(f"{file} is of another run: {of_another}")
    return [Outcome(**{**one, "place": Place(**one["place"])}) for one in written["mutants"]]


def write(file: Path, run: dict[str, object], outcomes: list[Outcome]) -> None:
    found = sum(bool(outcome.found_by) for outcome in outcomes)
    result = {**run, "found": found, "mutants": [asdict(outcome) for outcome in outcomes]}
    file.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--near", action="store_true", help="the tests of the file's package only")
    parser.add_argument("--cpu-seconds", type=int, default=CPU_SECONDS, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("pytest", nargs="*", default=["-m", "not slow"], metavar="ARGUMENT")
    options = parser.parse_args()
    run: dict[str, object] = {
        "commit": commit(),
        "seed": options.seed,
        "count": options.count,
        "near": options.near,
        "cpu_seconds": options.cpu_seconds,
        "pytest": options.pytest,
    }
    outcomes = earlier(options.json, run)
    sound: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="rootlace-mutants-") as folder, Progress() as bar:
        target = Path(folder) / "checkout"
        copy_of_the_checkout(target)
        task = bar.add_task("", total=options.count, completed=len(outcomes))
        for place in draw(options.count, options.seed)[len(outcomes) :]:
            bar.update(task, description=f"{place.file}:{place.line}")
            try:
                outcome = judge(place, target, options, sound)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                return 1
            outcomes.append(outcome)
            if options.json:
                write(options.json, run, outcomes)
            bar.update(task, advance=1)
            bar.console.print(
                f"{place.file}:{place.line}: {outcome.change}\n"
                f"    {(outcome.found_by or missed(outcome))[:150]}",
                markup=False,
                highlight=False,
            )
    print(f"{sum(bool(outcome.found_by) for outcome in outcomes)} of {len(outcomes)} faults found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
