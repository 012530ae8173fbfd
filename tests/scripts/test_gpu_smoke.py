"""The smoke test of a machine with a GPU: its reserves, and what it says when a way fails."""

import json
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import smoke

STEPS = [name for name, _ in smoke.WAYS]


@dataclass
class Machine:
    """Stands for the processes of ways: which checks pass in which, and which never end."""

    failing: dict[str, set[str]]
    hangs: str = ""
    dies: str = ""

    def __post_init__(self) -> None:
        self.asked: list[tuple[str, list[str], float]] = []

    def run(self, command: list[str], timeout: float, env: dict[str, str]) -> Any:
        way = STEPS[int(command[command.index("--way") + 1])]
        checks = [part for part in command if part in smoke.CHECKS]
        into = Path(command[command.index("--json") + 1])
        self.asked.append((way, checks, timeout))
        for name in checks:
            if way == self.dies:
                return subprocess.CompletedProcess(command, -6)
            if way == self.hangs:
                raise subprocess.TimeoutExpired(command, timeout)
            line: dict[str, Any] = {"check": name, "way": way, "passed": True}
            if name in self.failing.get(way, ()):
                line |= {"passed": False, "error": f"Traceback of {name}"}
            with into.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return subprocess.CompletedProcess(command, 0)


def tried(machine: Machine, monkeypatch: pytest.MonkeyPatch, path: Path) -> list[dict[str, Any]]:
    monkeypatch.setattr(smoke.subprocess, "run", machine.run)
    return smoke.smoke(45.0, path / "smoke.jsonl", False, list(smoke.CHECKS))


def test_where_all_is_well_one_way_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine({})
    lines = tried(machine, monkeypatch, tmp_path)
    assert [line["check"] for line in lines] == list(smoke.CHECKS)
    assert [(way, checks) for way, checks, _ in machine.asked] == [
        ("as a server runs", list(smoke.CHECKS))
    ]


def test_reserves_are_tried_for_what_failed_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second, third = STEPS[:3]
    machine = Machine({first: {"graphs", "schema"}, second: {"schema"}})
    lines = tried(machine, monkeypatch, tmp_path)
    assert [(way, checks) for way, checks, _ in machine.asked][1:] == [
        (second, ["graphs", "schema"]),
        (third, ["schema"]),
    ]
    passed = Counter(line["check"] for line in lines if line["passed"])
    assert passed == Counter(list(smoke.CHECKS))
    told = smoke.summary(lines)
    assert told[-2:] == ["first failure (graphs, as a server runs):", "Traceback of graphs"]


@pytest.mark.parametrize("fault", ["hangs", "dies"])
def test_a_way_that_hangs_or_dies_leaves_time_for_the_last_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    machine = Machine({}, **{fault: STEPS[0]})  # type: ignore[arg-type]
    lines = tried(machine, monkeypatch, tmp_path)
    assert not lines[0]["passed"] and lines[0]["check"] == "machine"
    assert ("stopped after" if fault == "hangs" else "status -6") in lines[0]["error"]
    assert {line["check"] for line in lines if line["passed"]} == set(smoke.CHECKS)

    spent = iter([0.0] + [100.0] * 50)
    monkeypatch.setattr(smoke.time, "monotonic", lambda: next(spent))
    late = Machine({})
    assert all(line["passed"] for line in tried(late, monkeypatch, tmp_path))
    assert [(way, limit) for way, _, limit in late.asked] == [(STEPS[-1], smoke.LAST_WAY_SECONDS)]


def test_other_tokens_are_told_unless_two_are_all_but_equal() -> None:
    @dataclass
    class Outcome:
        token_ids: list[int]
        gaps: list[float]
        finish: str = "length"
        error: str = ""

        @property
        def top(self) -> list[tuple[list[int], list[float]]]:
            return [([0, 1], [0.0, -gap]) for gap in self.gaps]

    wanted = Outcome([1, 2, 3, 4], [1.0, 1.0, 1e-5, 1.0])
    assert smoke.same_tokens([Outcome([1, 2, 9, 9], [1.0] * 4)], [wanted]) == 2
    with pytest.raises(AssertionError):
        smoke.same_tokens([Outcome([1, 9, 3, 4], [1.0] * 4)], [wanted])
    with pytest.raises(AssertionError, match="ties leave 0 of 2"):
        smoke.same_tokens([Outcome([1, 2], [1.0] * 2)], [Outcome([1, 2], [1e-5, 1.0])])
    with pytest.raises(AssertionError):
        smoke.same_tokens([Outcome([1], [1.0], "error", "why")], [Outcome([1], [1.0])])


REHEARSED = """
import sys
from pathlib import Path
from tests.gpu import smoke
for way in range(1, len(smoke.WAYS)):
    smoke.run_way(way, ["graphs"], Path(sys.argv[1]), rehearse=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_reserve_runs(tmp_path: Path) -> None:
    """Rehearsed in a process, as the interpreter has to be chosen before kernels are defined."""
    into = tmp_path / "smoke.jsonl"
    command = [smoke.sys.executable, "-c", REHEARSED, str(into)]
    subprocess.run(command, check=True, env=smoke._environment(rehearse=True))
    lines = smoke.read(into)
    assert [line["way"] for line in lines] == STEPS[1:]
    for line in lines:
        assert line["passed"], line.get("error")
        assert (line["graph_replays"] > 0) is (line["way"] != STEPS[1])
