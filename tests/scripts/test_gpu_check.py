"""The check of a machine with a GPU, as far as it goes without one."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.targets import TARGETS
from scripts import gpu_check as check
from tests.gpu import conftest as gpu_tests

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_brought_is_pinned_and_covers_what_is_needed() -> None:
    pinned = check.pins(check.CONSTRAINTS.read_text())
    assert all(check.normalised(name) in pinned for name in check.BROUGHT)
    comes_with_torch = {"torch", "triton", "transformers", "tokenizers", "safetensors", "numpy"}
    wanted = {*check.NEEDED.values(), *check.USEFUL.values(), "execnet"}
    assert wanted - comes_with_torch <= set(check.BROUGHT)


def test_pins_are_read() -> None:
    text = "# versions\ntorch==2.13.0\nMarkupSafe==3.0.4  # why\nnumpy>=2\n\nA_b.c==1\n"
    assert check.pins(text) == {"torch": "2.13.0", "markupsafe": "3.0.4", "a-b-c": "1"}


def test_only_lacking_wheels_are_unpacked() -> None:
    lacks = Path("no_such_package-1.0-py3-none-any.whl")
    has = Path("pytest-99.0-py3-none-any.whl")
    assert check.distribution(lacks) == "no-such-package"
    assert check.lacking([lacks, has]) == [lacks]


def test_missing_modules_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"pytest": "pytest", "no_such_module": "such-package", "brought": "brought-package"}
    assert check.missing(wanted) == ["such-package", "brought-package"]
    (tmp_path / "brought.py").write_text("")  # as pytest_timeout: a file, no folder
    monkeypatch.setattr(check, "SITE", tmp_path)
    assert check.missing(wanted) == ["such-package"]
    monkeypatch.setattr(check, "NEEDED", wanted)
    with pytest.raises(check.CheckError, match=r"lacks such-package\..*make gpu-wheels"):
        check.look_at_machine(rehearse=False)


def test_the_checkout_is_found_through_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python that knows nothing of this checkout imports it from the tree, without installing."""
    tree = tmp_path / "tree"
    check.link_packages(tree)
    check.link_packages(tree)  # again, over what is there
    monkeypatch.setattr(check, "TREE", tree)
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    environment = check.environment()
    path = environment["PYTHONPATH"].split(os.pathsep)
    assert path[:2] == [str(tree), str(ROOT)] and path[-1] == "somewhere"
    code = (
        "import rootlace, rootlace.runtime.config, rootlace.wire.protocol as p; print(p.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.startswith(str(tree)), done.stderr


def test_a_command_that_takes_too_long_is_stopped() -> None:
    outcome = check.run("sleep", [sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert not outcome.passed and "no time was left" in str(outcome)
    assert check.run("good", [sys.executable, "-c", ""], 60).passed
    assert check.run("fine", [sys.executable, "-c", "exit(5)"], 60, (0, 5)).passed
    assert "FAILED" in str(check.run("bad", [sys.executable, "-c", "exit(3)"], 60))


def test_what_a_stopped_command_started_is_stopped_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that its parent did not live to stop would keep the GPU's memory."""
    code = (
        "import subprocess, sys, time; end = open(sys.argv[1], 'wb', 0); "
        "subprocess.Popen(['sleep', '600'], pass_fds=[end.fileno()]); end.write(b'x'); "
        "time.sleep(600 * {wait})"
    )
    begin = check.begin

    def begun(command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Begin a command, and wait until it has started what it starts."""
        process = begin(command)
        assert select.select([reader], [], [], 300.0)[0]
        assert os.read(reader, 1) == b"x"
        return process

    monkeypatch.setattr(check, "begin", begun)
    for wait in (1, 0):  # one that is stopped, one that ends before what it started
        pipe = tmp_path / f"pipe {wait}"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        command = [sys.executable, "-c", code.format(wait=wait), str(pipe)]
        outcome = check.run("parent", command, 0.1 if wait else 300.0)
        assert outcome.passed is not bool(wait)
        os.set_blocking(reader, True)
        while os.read(reader, 1):  # to the end of the file: nobody has the other end any more
            pass
        os.close(reader)


@pytest.mark.parametrize("among_others", [False, True])
def test_no_test_runs_where_the_gpu_has_faulted(
    among_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    faulted = [False]
    monkeypatch.setattr(gpu_tests, "has_faulted", lambda: faulted[0])
    monkeypatch.setattr(gpu_tests.os, "_exit", ended.append)
    clock = gpu_tests.Clock(None, None, among_others)

    def report(outcome: str) -> None:
        clock.pytest_runtest_logreport(
            pytest.TestReport("test_it", ("", 0, ""), {}, outcome, None, "call")  # type: ignore[arg-type]
        )

    item = cast(pytest.Item, None)
    report("failed")
    faulted[0] = True
    report("passed")
    clock.pytest_runtest_setup(item)
    assert not ended
    report("failed")
    with pytest.raises(pytest.skip.Exception, match="no sound GPU was left for it after test_it"):
        clock.pytest_runtest_setup(item)
    assert ended == [1] * among_others


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "all"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "sees no GPU" in done.stderr or "lacks" in done.stderr


def test_no_test_is_fine_only_where_tests_are_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, ...]] = []

    def run(name: str, command: list[str], seconds: float, fine: tuple[int, ...]) -> object:
        asked.append((name, str(fine), *command))
        return check.Outcome(name, True, 10.0)

    monkeypatch.setattr(check, "run", run)
    check.run_tests(100, tmp_path, False)
    check.run_tests(100, tmp_path, False, ["-k", "norms"])
    assert [fine for _, fine, *_ in asked] == ["(0,)", "(0,)", "(0, 5)", "(0, 5)"]
    assert all("tests/gpu" in command for command in asked)
    assert [command[-1] for command in asked] == ["not whole_gpu", "whole_gpu"] * 2
    limits = [command[command.index("--gpu-seconds") + 1] for command in asked]
    assert limits == ["85", "90"] * 2


def test_parts_share_what_is_left_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a clock that only parts move: one takes less than its share, one more."""
    now, given = 0.0, {}

    def part(name: str, takes: float) -> object:
        def run(seconds: float, *rest: object) -> object:
            nonlocal now
            given[name] = seconds
            now += takes
            outcome = check.Outcome(name, True, takes)
            return [outcome] if name == "test" else outcome

        return run

    monkeypatch.setattr(check.time, "monotonic", lambda: now)
    monkeypatch.setattr(check, "start_compiling", lambda *_: subprocess.Popen(["true"]))
    for name, takes in (("smoke", 10.0), ("tests", 250.0), ("benchmark", 1.0)):
        monkeypatch.setattr(check, f"run_{name}", part({"tests": "test"}.get(name, name), takes))
    arguments = check.parse_arguments(["all", "--results", str(tmp_path)])
    assert [one.name for one in check.check(arguments)] == ["smoke", "test", "benchmark"]
    assert given["smoke"] == pytest.approx(45)
    assert given["test"] == pytest.approx((480 - 45 - 10) * 190 / 390)
    assert given["benchmark"] == pytest.approx(480 - 45 - 260)


def test_the_summary_names_what_failed_and_what_did_not_run(tmp_path: Path) -> None:
    smoke = [
        {"check": "eager", "way": "as a server runs", "passed": False, "error": "a\nTrace: why"},
        {"check": "eager", "way": "--no-cuda-graphs", "passed": True},
    ]
    tests = [
        {"test": "tests/gpu/test_a.py::one", "outcome": "passed", "seconds": 1},
        {"test": "tests/gpu/test_a.py::two", "outcome": "failed", "seconds": 1, "why": "assert"},
        {"test": "tests/gpu/test_a.py::late", "outcome": "skipped", "seconds": 0,
         "why": "Skipped: no time was left for it"},
    ]  # fmt: skip
    for name, lines in ((check.SMOKE, smoke), (check.TESTS[0], tests)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (tmp_path / check.TESTS[1]).open("w") as file:
        file.write('{"test": "cut in the mid')
    target = {"target": ">= 0.8", "value": 0.5, "met": False}
    bench = {"targets": {"share": target}, "parts": {"prefill": {"error": "stopped after 9 s"}}}
    (tmp_path / check.BENCH).write_text(json.dumps(bench))
    told = "\n".join(check.summary(tmp_path, [check.Outcome("smoke", False, 3.0)]))
    for wanted in (
        "smoke: FAILED in 3 s",
        "1 failed, 1 passed, 1 skipped",
        "no time was left for 1 tests:\n  test_a.py::late",
        "FAILED tests/gpu/test_a.py::two",
        "MISSED",
        "benchmark prefill: stopped after 9 s",
    ):
        assert wanted in told, told
    assert told.endswith("first failure: eager, as a server runs\na\nTrace: why")


@pytest.mark.slow
@pytest.mark.timeout(3600)  # some minutes where nothing else runs
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_all_of_it_is_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    """Every part to its end, with the Python of the tests; figures mean nothing."""
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "all", "--rehearse"]
    command += ["--budget", "4800", "--results", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OUT": str(out)}
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert all(line["passed"] for line in check.lines_of(out / check.SMOKE))
    assert {line["outcome"] for line in check.lines_of(out / check.TESTS[0])} <= {
        "passed",
        "skipped",
    }
    assert any(line["outcome"] == "passed" for line in check.lines_of(out / check.TESTS[0]))
    bench = json.loads((out / check.BENCH).read_text())
    assert list(bench["parts"]) == list(PARTS)
    for name, part in bench["parts"].items():
        assert part["cases"] and "error" not in part, (name, part)
        assert not any("error" in case for case in part["cases"]), (name, part)
    assert all(target["met"] is None for target in bench["targets"].values())
    page = done.stdout.partition("= gpu-check =")[2]  # the benchmark prints its own lines before
    assert page.count("not measured") == len(TARGETS)
