"""`rootlace eval`, against a backend that says what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rootlace.cli import run as command
from rootlace.cli.app import app
from rootlace.testing import Scripted
from tests.evaluation.test_runs import SUMS, rightly
from tests.evaluation.test_tasks import write


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The one that is connected to."""
    held: list[Any] = [Scripted(default=rightly)]

    @contextmanager
    def connected(*_: object, **__: object) -> Iterator[Any]:
        yield held[0]

    monkeypatch.setattr(command, "connected", connected)
    return held


def run(folder: Path, *arguments: str | Path) -> Result:
    command = ["eval", *map(str, arguments), "--output", str(folder / "out")]
    return CliRunner().invoke(app, command, env={"COLUMNS": "120"})


def test_a_task_is_run_shown_and_compared(tmp_path: Path, backend: list[Any]) -> None:
    path = write(tmp_path, "data: rows.jsonl\nprompt: 'Q: {question}'", SUMS)
    done = run(tmp_path, path, "--shots", "1", "--limit", "4")
    assert done.exit_code == 0, done.output
    assert "acc 1.000" in done.output and "% cached" in done.output and "4/4" in done.output
    folder = tmp_path / "out" / "task" / "scripted"
    assert (folder / "report.html").read_text().count("<details>") == 4
    backend[0] = Scripted({r"[23]\+1$": lambda prompt: f" {prompt[-3]}"}, default=rightly)
    other = tmp_path / "other"
    assert run(other, path, "--shots", "1", "--limit", "4").exit_code == 0
    shown = run(tmp_path, other / "out" / "task" / "scripted", "--compare", folder)
    assert shown.exit_code == 0 and "-0.5000" in shown.output, shown.output
    # Both columns are of one model, in folders of one name.
    head = next(line for line in shown.output.splitlines() if "the other " in line)
    assert head.split()[:4] == ["metric", "this", "the", "other"]
    told = "".join(shown.output.split())
    assert f"this:scripted,{other / 'out' / 'task' / 'scripted'}theother:scripted,{folder}" in told
    assert "Compared with" in (other / "out" / "task" / "scripted" / "report.html").read_text()


def test_what_fails_and_what_is_wrong(tmp_path: Path, backend: list[Any]) -> None:
    path = write(tmp_path, "data: rows.jsonl\nprompt: 'Q: {question}'", SUMS)
    backend[0] = Scripted({r"3\+1": RuntimeError("broken")}, default=rightly)
    done = run(tmp_path, path)
    assert done.exit_code == 1 and "row rows.jsonl:4 failed: select" in done.output
    assert "give its rows with --data" in run(tmp_path, "mmlu").stderr
    near = {"gsm8": "gsm8k", "Hella-Swag": "hellaswag", "arc_c": "arc", "tasks/mmlu.yaml": "mmlu"}
    for name, meant in near.items():
        assert (
            f"neither a file nor a ready task; did you mean {meant}?" in run(tmp_path, name).stderr
        )
    for name in ("xyzzy", "xyzzy.yaml"):
        unlike = run(tmp_path, name).stderr
        assert f"{name} is neither a file nor a ready task (mmlu, " in unlike
        assert "gsm8k" in unlike and "winogrande" in unlike and "questions" not in unlike
    path.write_text("data: rows.jsonl\nshot: 3")
    assert "task.yaml:2: shot: there is no such key; did you mean 'shots'?" in run(
        tmp_path, path
    ).stderr.replace("\n", "")
    assert "holds no run" in run(tmp_path, path, "--compare", tmp_path).stderr


def test_interrupted(tmp_path: Path, backend: list[Any]) -> None:
    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    path = write(tmp_path, "data: rows.jsonl\nprompt: 'Q: {question}'", SUMS)
    backend[0] = Scripted({r"5\+1": interrupt}, default=rightly)
    done = run(tmp_path, path, "--concurrency", "1")
    assert done.exit_code == 130 and "goes on where it was" in done.stderr
    backend[0]._patterns.clear()
    assert run(tmp_path, path).exit_code == 0 and len(backend[0].calls) == 6
