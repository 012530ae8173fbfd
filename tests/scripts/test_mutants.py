"""scripts/mutants.py: what it changes, and that it says what was found and what was not."""

import argparse
import ast
import functools
import subprocess
from pathlib import Path

import pytest

from scripts import mutants

ROOT = Path(__file__).resolve().parents[2]


def options(*arguments: str, cpu_seconds: int = 600) -> argparse.Namespace:
    return argparse.Namespace(pytest=list(arguments), near=False, cpu_seconds=cpu_seconds)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a < b", "a <= b"),
        ("a + b", "a - b"),
        ("a and b", "a or b"),
        ("not a", "a"),
        ("7", "8"),
        ("True", "False"),
        ("a is None", "a is not None"),
        ("a if b else c", "a if not b else c"),
    ],
)
def test_one_fault(before: str, after: str) -> None:
    source = f"LIMIT = 3\n\ndef f(a, b, c):\n    return {before}\n"
    text, said = mutants.mutant(source, 0)
    assert text == f"LIMIT = 3\n\ndef f(a, b, c):\n    return {after}"
    assert said == f"{before}  ->  {after}"


def test_texts_are_left_alone() -> None:
    tree = ast.parse("def f(a):\n    return 'x' + a + f'{a}'\n")
    assert list(mutants.changeable(tree)) == []


def test_the_same_places_every_time_through_all_of_the_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mutants, "places", functools.cache(mutants.places))  # parsed once
    drawn = mutants.draw(30, 0)
    assert drawn == mutants.draw(30, 0) != mutants.draw(30, 1)
    assert len({place.file for place in drawn}) > 20
    assert {place.file.split("/")[0] for place in drawn} == {"frontend", "runtime", "kernels"}
    for file in {place.file for place in mutants.places()}:
        assert any((ROOT / path).exists() for path in mutants.tests_of(file)), file


def test_a_fault_is_found_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of two functions, of which one is tested."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # starting them takes seconds
    (tmp_path / "frontend").mkdir()
    (tmp_path / "tests").mkdir()
    code = "def f(a):\n    return a + 1\n\ndef g(a):\n    return a * 2\n"
    (tmp_path / "frontend" / "code.py").write_text(code)
    (tmp_path / "tests" / "test_code.py").write_text(
        "import sys; sys.path.insert(0, 'frontend')\n"
        "import code_under_test as code\n"
        "def test_f():\n    assert code.f(1) == 2\n"
    )
    (tmp_path / "frontend" / "code.py").rename(tmp_path / "frontend" / "code_under_test.py")
    file = "frontend/code_under_test.py"
    for index, found in ((0, True), (2, False)):
        place = mutants.Place(file, index, 0)
        outcome = mutants.judge(place, tmp_path, options("tests/test_code.py"), set())
        assert bool(outcome.found_by) == found and outcome.all_run
    assert (tmp_path / file).read_text() == code
    with pytest.raises(RuntimeError, match="fails without any fault: FAILED tests/"):
        logs = "import logging\ndef test_f():\n    logging.error('no test')\n    assert False\n"
        (tmp_path / "tests" / "test_code.py").write_text(logs)
        mutants.judge(mutants.Place(file, 0, 0), tmp_path, options(), set())
    forever = "def test_f():\n    while True:\n        pass\n"
    (tmp_path / "tests" / "test_code.py").write_text(forever)
    outcome = mutants.judge(mutants.Place(file, 0, 0), tmp_path, options(cpu_seconds=1), set())
    assert not outcome.found_by and not outcome.all_run
    assert (tmp_path / file).read_text() == code


def test_the_nearest_tests_run_first_and_each_once() -> None:
    named, around, others, rest = mutants.stages("runtime/cache/radix_tree.py", ROOT)
    assert named == ["tests/cache/test_radix_tree.py"]
    assert around == ["tests/cache", "--ignore=tests/cache/test_radix_tree.py"]
    assert others[0] == "tests/scheduler" and "--ignore=tests/cache" in others
    assert {f"--ignore={path}" for path in ("tests/cache", "tests/scheduler")} <= set(rest)


def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    run = {"commit": "abc", "seed": 0, "count": 2, "near": False, "pytest": ["-m", "not slow"]}
    outcome = mutants.Outcome(mutants.Place("a.py", 3, 14), "a < b  ->  a <= b", "")
    file = tmp_path / "out.json"
    assert mutants.earlier(None, run) == mutants.earlier(file, run) == []
    mutants.write(file, run, [outcome])
    assert mutants.earlier(file, run) == [outcome]
    with pytest.raises(SystemExit, match="of another run"):
        mutants.earlier(file, {**run, "seed": 1})
    with pytest.raises(SystemExit, match=r"of another run: \{'commit': 'abc'\}"):
        mutants.earlier(file, {**run, "commit": "abc+d"})
    # What was written before there was `near`.
    mutants.write(file, {key: run[key] for key in run if key != "near"}, [outcome])
    with pytest.raises(SystemExit, match=r"of another run: \{'near': None\}"):
        mutants.earlier(file, run)


def test_the_commit_and_what_differs_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        settings = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", *settings, *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    git("init")
    (tmp_path / "code.py").write_text("a = 1\n")
    git("add", "code.py")
    git("commit", "-m", "one")
    clean = mutants.commit()
    assert clean == git("rev-parse", "HEAD")
    dirty = set()
    for text in ("a = 2\n", "a = 3\n"):
        (tmp_path / "code.py").write_text(text)
        dirty.add(mutants.commit())
    assert len(dirty) == 2 and clean not in dirty
    assert all(one.startswith(f"{clean}+") for one in dirty)
