"""The whole command with a peer that is none, and what is made of rows."""

import importlib.util
import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ceilings
from benchmarks.peers import __main__ as peers
from benchmarks.peers import known_peers, report, turns
from benchmarks.peers.measure import Row
from benchmarks.peers.report import PROGRAMS, RAW, Results

BASE = Row(
    engine=RAW,
    model="b",
    workload="W1",
    seed=0,
    repetition=0,
    scale=1.0,
    wall_s=2.0,
    ttft_mean_s=0.5,
    requests=64,
    prompt_tokens=67_840,
    output_tokens=1024,
    cached_tokens=63_000,
    foreign_cores=0.0,
)


def row(**changes: Any) -> Row:
    return replace(BASE, **changes)


ROWS = [
    row(),
    row(repetition=1, wall_s=4.0),
    row(repetition=2, wall_s=3.0),
    row(engine=PROGRAMS, wall_s=1.8),
    row(engine=PROGRAMS, repetition=1, wall_s=4.4),
    row(engine=PROGRAMS, repetition=2, wall_s=3.0),
    row(engine="vllm", wall_s=9.0, ttft_mean_s=0.4, cached_tokens=56_448),
    row(engine="vllm", repetition=1, wall_s=100.0, foreign_cores=0.5),
    row(engine="slow", wall_s=5.0, requests=16, scale=0.25, ttft_mean_s=0.1, cached_tokens=None),
]
FLOORS = {"b": {"W1": {"floor_s": 2.0, "arithmetic_s": 2.5}}}


def test_ratios() -> None:
    results = Results(ROWS, FLOORS)
    assert results.cell("b", "W1", RAW).wall == 3.0
    assert results.cell("b", "W1", "vllm").wall == 9.0  # the loud one does not count
    assert results.cell("b", "W1", "slow").wall == 20.0  # a quarter of the requests
    assert results.ratios() == {"b": {"W1": 3.0}}
    assert results.ttft_ratios() == {"b": {"W1": pytest.approx(0.8)}}
    assert results.programs_over_raw() == {"b": {"W1": 1.0}}
    assert results.over_floor() == {"b": {"W1": 1.5}}
    assert results.over_floor("arithmetic_s") == {"b": {"W1": 1.2}}
    met = {target["what"]: target["met"] for target in results.targets()}
    assert met == {"speed": True, "ttft": False, "programs": True, "floor": True}
    assert "  ttft b W1: 0.80, not >= 1" in list(results.summary())
    assert [remark[0] for remark in results.remarks()] == ["~", "!"]


def test_a_loud_row_counts_where_there_is_no_other() -> None:
    results = Results([row(foreign_cores=0.5), row(engine="vllm", wall_s=4.0)], {})
    assert results.ratios() == {"b": {"W1": 2.0}}
    assert results.cell("b", "W1", RAW).loud and not results.cell("b", "W1", "vllm").loud


def test_without_a_peer_nothing_is_claimed() -> None:
    results = Results([row()], {})
    assert results.ratios() == {"b": {}}
    assert all(target["met"] is None for target in results.targets())


def test_tables() -> None:
    from rich.console import Console

    printed = io.StringIO()
    console = Console(width=100, file=printed)
    results = Results(ROWS, FLOORS)
    for table in results.tables("b"):
        console.print(table)
    text = printed.getvalue()
    for cell in ("3.00", "~20.00", "9.00", "3.00x", "1.50x", "1.20x", "500", "400", "0.80x"):
        assert cell in text


# ---------------------------------------------------------------- the command


def command(models: Path, *more: str) -> list[str]:
    return [
        "--models", str(models), "--sizes", "a", "--scale", "0.05",
        "--threads", "1", "--repetitions", "2", "--seed", "11", "--dtype", "float32",
        "--peer-python", f"vllm={sys.executable}", *more,
    ]  # fmt: skip


@pytest.fixture
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"gemm_rate": 1e12, "read_bandwidth": 1e11}
    monkeypatch.setattr(peers, "measure_apart", lambda *_: found)


@pytest.mark.usefixtures("quick_ceilings", "drivers")
def test_the_whole_command(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LOUD", math.inf)  # all rows count, whatever else runs here
    file, picture = tmp_path / "peers.json", tmp_path / "peers.svg"
    more = ["--workloads", "W2", "W4", "--json", str(file)]
    can_draw = importlib.util.find_spec("matplotlib") is not None
    more += ["--plot", str(picture)] if can_draw else []
    assert peers.main(command(models, *more)) == 0
    found = json.loads(file.read_text())
    assert len(found["rows"]) == 2 * 2 * 3
    assert {(r["engine"], r["seed"]) for r in found["rows"]} == {
        (engine, seed) for engine in ("vllm", RAW, PROGRAMS) for seed in (11, 12)
    }
    for key in ("ratios", "ttft_ratios", "dsl_over_raw", "floors", "over_floor"):
        assert set(found[key]["a"]) == {"W2", "W4"}, key
    assert found["dsl_same_tokens"] == {"a": {"W2": 1.0, "W4": 1.0}}
    raw = [r["wall_s"] for r in found["rows"] if (r["engine"], r["workload"]) == (RAW, "W2")]
    theirs = [r["wall_s"] for r in found["rows"] if (r["engine"], r["workload"]) == ("vllm", "W2")]
    assert found["ratios"]["a"]["W2"] == pytest.approx(sum(theirs) / sum(raw))
    assert found["peers"]["a"]["vllm"]["engine"] == "echo"
    assert "outputs" not in found["rows"][0] and found["machine"]["cores"]
    assert str(tmp_path) not in file.read_text()
    assert found["options"]["seed"] == 11 and found["options"]["workloads"] == ["W2", "W4"]
    if can_draw:
        assert picture.read_text().lstrip().startswith("<?xml")


@pytest.mark.usefixtures("quick_ceilings", "drivers", "running")
def test_slow_ones_do_a_part_and_repeat_nothing(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = replace(known_peers.KNOWN_PEERS["vllm"], scale={"W2": 0.0, "W4": 0.5})
    monkeypatch.setitem(known_peers.KNOWN_PEERS, "vllm", slow)
    monkeypatch.setattr(turns, "PATIENCE", 0.0)
    file = tmp_path / "peers.json"
    more = "--workloads W2 W4 --scale 0.125 --json"
    assert peers.main([*command(models), *more.split(), str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    done = [(r["engine"], r["workload"], r["repetition"], r["requests"]) for r in rows]
    assert sorted(done) == [
        (RAW, "W2", 0, 4),
        (RAW, "W4", 0, 4),
        (PROGRAMS, "W2", 0, 4),
        (PROGRAMS, "W4", 0, 4),
        ("vllm", "W4", 0, 2),
    ]


@pytest.mark.usefixtures("quick_ceilings", "drivers", "running")
def test_a_peer_that_fails_is_left_out(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TROUBLE", "raise")
    file = tmp_path / "peers.json"
    arguments = command(models, "--workloads", "W4", "--json", str(file))
    assert peers.main([*arguments, "--url", "nobody=http://127.0.0.1:9"]) == 0
    found = json.loads(file.read_text())
    assert "out of luck" in found["peers"]["a"]["vllm"]["error"]
    assert "no model" in found["peers"]["a"]["nobody"]["error"]
    assert {r["engine"] for r in found["rows"]} == {RAW, PROGRAMS}
    assert found["ratios"] == {"a": {}}
    assert "out of luck" in capsys.readouterr().out


def test_ceilings_in_a_process_of_their_own() -> None:
    found = ceilings.measure_apart(1, "float32", 0.01)
    assert found["gemm_rate"] > 0 and found["read_bandwidth"] > 0
    assert found["gemm_rate"] == max(found["gemm_rates"].values())


# ---------------------------------------------------------------- options


def test_options() -> None:
    found = peers.parse_arguments(["--quick", "--url", "x=http://host:1/v1?a=b"])
    assert (found.sizes, found.repetitions, found.scale) == (["a"], 1, 0.125)
    assert found.url == {"x": "http://host:1/v1?a=b"}
    for wrong in ("who=/bin/sh", "vllm=/no/such/python", "vllm"):
        with pytest.raises(SystemExit):
            peers.parse_arguments(["--peer-python", wrong])
