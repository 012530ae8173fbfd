"""The check of a machine with a GPU, as far as it goes without one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_what_is_brought_is_pinned_and_covers_what_is_needed(check: ModuleType) -> None:
    pinned = check.pins(check.CONSTRAINTS.read_text())
    assert all(check.normalised(name) in pinned for name in check.BROUGHT)
    comes_with_torch = {"torch", "triton", "transformers", "tokenizers", "safetensors", "numpy"}
    assert set(check.NEEDED.values()) - comes_with_torch <= set(check.BROUGHT)


def test_pins_are_read(check: ModuleType) -> None:
    text = "# versions\ntorch==2.13.0\nMarkupSafe==3.0.4  # why\nnumpy>=2\n\nA_b.c==1\n"
    assert check.pins(text) == {"torch": "2.13.0", "markupsafe": "3.0.4", "a-b-c": "1"}


def test_only_lacking_wheels_are_unpacked(check: ModuleType) -> None:
    lacks = Path("no_such_package-1.0-py3-none-any.whl")
    has = Path("pytest-99.0-py3-none-any.whl")
    assert check.distribution(lacks) == "no-such-package"
    assert check.lacking([lacks, has]) == [lacks]


def test_missing_modules_are_named(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"pytest": "pytest", "no_such_module": "such-package", "brought": "brought-package"}
    assert check.missing(wanted) == ["such-package", "brought-package"]
    (tmp_path / "brought").mkdir()
    monkeypatch.setattr(check, "SITE", tmp_path)
    assert check.missing(wanted) == ["such-package"]
    monkeypatch.setattr(check, "NEEDED", wanted)
    with pytest.raises(check.CheckError, match=r"lacks such-package\..*make gpu-wheels"):
        check.look_at_machine()


def test_the_checkout_is_found_through_links(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_command_that_takes_too_long_is_stopped(check: ModuleType) -> None:
    outcome = check.run("sleep", [sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert not outcome.passed and "no time was left" in str(outcome)
    assert check.run("good", [sys.executable, "-c", ""], 60).passed
    assert check.run("fine", [sys.executable, "-c", "exit(5)"], 60, (0, 5)).passed
    assert "FAILED" in str(check.run("bad", [sys.executable, "-c", "exit(3)"], 60))


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
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def run(name: str, command: list[str], seconds: float, fine: tuple[int, ...]) -> object:
        asked.append((name, str(fine), *command))
        return check.Outcome(name, True, 10.0)

    monkeypatch.setattr(check, "run", run)
    check.run_tests([])
    check.run_tests(["-k", "norms"])
    assert [fine for _, fine, *_ in asked] == ["(0,)", "(0,)", "(0, 5)", "(0, 5)"]
    assert all("tests/gpu" in command for command in asked)
    assert [command[-1] for command in asked] == ["not whole_gpu", "whole_gpu"] * 2
