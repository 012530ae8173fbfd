"""`rootlace simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rootlace.cli.app import app
from rootlace.runtime.simulation.engine import all_policies
from tests.simulation.traces import write_azure, write_mooncake


def _simulate(*arguments: str | Path | int) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    rows = [(n / 10, 2000, 30, [0, n % 3 + 1, 10 + n, 100 + n]) for n in range(12)]
    return write_mooncake(tmp_path / "t.jsonl", rows)


def test_a_study(mooncake: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures, picture = tmp_path / "out.json", tmp_path / "out.svg"
    result = _simulate(
        mooncake, "--policy", "all", "--cache-tokens", "4k,0.016M", "--rate", "2",
        "--requests", "20", "--granularity", "32", "--json", figures, "--plot", picture,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in ("t.jsonl (mooncake): 20 requests", "Stated, not measured", "dfs-no-aging", "16k"):
        assert text in result.output, text
    runs = json.loads(figures.read_text())["runs"]
    policies = len(all_policies())
    assert [run["cache_tokens"] for run in runs] == [4000] * policies + [16000] * policies
    assert all(run["requests"] == 20 and run["refused"] == 0 for run in runs)
    assert picture.read_text().startswith("<?xml")


def test_replicas_behind_routers(mooncake: Path, tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    result = _simulate(
        mooncake, "--replicas", 2, "--router", "exact,turns",
        "--cache-tokens", "8k", "--json", figures,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    runs = json.loads(figures.read_text())["runs"]
    assert [(run["router"], run["replicas"]) for run in runs] == [("exact", 2), ("turns", 2)]
    assert all(f" {name} " in result.output for name in ("exact", "turns"))
    for arguments, says in (
        (["--replicas", 2, "--router", "psychic"], "there are exact, power-of-two,"),
        (["--router", "exact"], "give --replicas"),
        (["--replicas", 2, "--plot", tmp_path / "x.svg"], "not with --replicas"),
    ):
        result = _simulate(mooncake, *arguments)
        assert result.exit_code == 1 and says in result.output, result.output


def test_prefill_apart(mooncake: Path, tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    arguments = ["--replicas", 3, "--router", "exact", "--cache-tokens", "8k"]
    result = _simulate(mooncake, *arguments, "--disaggregate", "1,2", "--disaggregate-from", 1000,
                       "--link", "25:0.5", "--json", figures)  # fmt: skip
    assert result.exit_code == 0, result.output
    runs = json.loads(figures.read_text())["runs"]
    assert [run["prefill_replicas"] for run in runs] == [0, 1, 2]
    assert [run["handed"] > 0 for run in runs] == [False, True, True]
    assert "busy decode" in result.output
    for arguments, says in (
        (["--disaggregate", 1], "give --replicas"),
        (["--replicas", 2, "--disaggregate", 2], "from 1 to 1 of the --replicas"),
        (["--replicas", 2, "--disaggregate", 1, "--link", "fast"], "--link fast: write GB/s"),
    ):
        result = _simulate(mooncake, *arguments)
        assert result.exit_code == 1 and says in result.output, result.output


def test_a_disk_below_the_cache(mooncake: Path, tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    for arguments in ([], ["--replicas", 2, "--router", "turns"]):
        result = _simulate(mooncake, *arguments, "--cache-tokens", "3k", "--policy", "fcfs",
                           "--host", "3k:25", "--disk", "1M:2.5", "--json", figures)  # fmt: skip
        assert result.exit_code == 0 and "read back" in result.output, result.output
        (run,) = json.loads(figures.read_text())["runs"]
        assert 0.1 < run["read_back"] <= run["hit_rate"]
    for given, says in (("4M", "write tokens and GB/s"), ("none:1", "'none' is no size")):
        result = _simulate(mooncake, "--disk", given)
        assert result.exit_code == 1 and says in result.output, result.output


def test_policies_in_one_word(mooncake: Path, tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    result = _simulate(mooncake, "--policy", "fcfs, lpm:4", "--policy", "fcfs",
                       "--cache-tokens", "8k", "--json", figures)  # fmt: skip
    assert result.exit_code == 0, result.output
    runs = json.loads(figures.read_text())["runs"]
    assert [run["policy"] for run in runs] == ["fcfs", "lpm:4"]


def test_a_line_of_the_table_is_a_line(mooncake: Path) -> None:
    """However narrow the terminal is."""
    result = _simulate(mooncake, "--policy", "lpm", "--cache-tokens", "1k,8k")
    lines = [line.split() for line in result.output.splitlines() if line.startswith(" " * 4)]
    assert len(lines) == 2 and all(line[0] == "lpm" for line in lines), result.output
    assert "1k: 12 of 12 requests did not fit" in result.output


def test_the_other_format_and_a_cost_of_ones_own(tmp_path: Path) -> None:
    trace = write_azure(tmp_path / "t.csv", [(n, 100 + n, 5) for n in range(8)])
    cost = tmp_path / "cost.json"
    cost.write_text('{"step": 0.25, "prefill": 0, "source": "my abacus"}')
    figures = tmp_path / "out.json"
    result = _simulate(trace, "--cost", cost, "--policy", "fcfs", "--granularity", "1",
                       "--cache-tokens", "2k", "--json", figures)  # fmt: skip
    assert result.exit_code == 0 and "my abacus" in result.output, result.output
    (run,) = json.loads(figures.read_text())["runs"]
    assert run["hit_rate"] == 0 and run["tpot"]["p50"] == pytest.approx(0.25, abs=1e-4)


def test_defaults(mooncake: Path) -> None:
    result = _simulate(mooncake)
    assert result.exit_code == 0 and "fcfs" in result.output and "65.54k" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "best"], "there is no policy 'best'"),
        (["--cache-tokens", "1M,x"], "'x' is no size"),
        (["--cache-tokens", "0"], "'0' is no size"),
        (["--cost", "abacus"], "neither a file nor a known cost model"),
        (["--granularity", "100"], "must divide the trace's blocks of 512 tokens"),
        (["--json", "/nowhere/x.json"], "no such folder"),
        (["--json", "/"], "a folder"),
        (["--plot", "x.foo"], "must end with one of .svg"),
        (["--rate", "inf"], "the rate must be a positive number"),
        (["--requests", "99999999999"], "more blocks than there are ids"),
        (["--cache-tokens", "9000000G"], "not enough memory"),
    ],
)
def test_mistakes_are_said(mooncake: Path, arguments: list[str], says: str) -> None:
    result = _simulate(mooncake, *arguments)
    assert result.exit_code == 1 and says in result.output, result.output


def test_a_bad_trace_is_said(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0}\n')
    result = _simulate(bad)
    assert (
        result.exit_code == 1
        and "bad.jsonl:1: Object missing required field `input_length`" in result.output
    )
    result = _simulate(tmp_path / "none")
    assert result.exit_code == 1 and "No such file" in result.output
