"""The benchmark of kernels on a CPU: cases by brute force, floors by hand, a short run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cpu_kernels
from benchmarks.cpu_kernels import Case, Work, attention, block_tables, measure
from rootlace.kernels.native.handles import Team
from rootlace.runtime.doctor import ceilings
from rootlace.runtime.doctor.ceilings import Heads
from tests.native import native_library

CASES = (
    Case("decode", 3, 1, 37),
    Case("decode shared", 4, 1, 40, 32, 2),
    Case("extend", 2, 5, 21),
    Case("extend shared", 4, 5, 21, 16, 4),
)


@pytest.mark.parametrize("case", CASES)
def test_a_case_counts_what_is_computed_and_read(case: Case) -> None:
    seen = sum(
        position + 1
        for _ in range(case.rows)
        for position in range(case.context - case.new, case.context)
    )
    assert case.pairs == seen
    slots = {
        int(table[position // 16]) * 16 + position % 16
        for table in block_tables(case)
        for position in range(case.context)
    }
    assert case.distinct == len(slots)


@pytest.mark.parametrize("case", CASES)
def test_both_kernels_compute_the_same(case: Case) -> None:
    library = native_library()
    work = attention(case, Heads(4, 2, 16), torch.float32, Team(library, 1), library)
    native, reference = (kernel() for kernel in work.kernels.values())
    assert isinstance(native, torch.Tensor) and isinstance(reference, torch.Tensor)
    torch.testing.assert_close(native, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rate", "bandwidth", "floor"), [(1e9, 1e12, 3.0), (1e12, 1e6, 5.0)])
def test_the_floor_is_the_larger_of_reading_and_computing(
    rate: float, bandwidth: float, floor: float
) -> None:
    (found,) = measure(Work("w", 2, 3e9, 5e6, {"native": lambda: None}), 0.001, rate, bandwidth)
    assert found.floor * found.seconds == pytest.approx(floor)
    assert found.gflops * found.seconds == pytest.approx(3)
    assert found.gbs * found.seconds == pytest.approx(5e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_short_run_measures_everything_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    native_library()
    layers = {"gate_up": (64, 32), "down": (32, 50)}
    monkeypatch.setattr(cpu_kernels, "layers_of", lambda model: layers)
    monkeypatch.setattr(cpu_kernels, "CASES", CASES)
    for name in ("ROTATED", "CACHED_BYTES", "READ_BYTES"):
        monkeypatch.setattr(cpu_kernels, name, 1 << 16)
    monkeypatch.setattr(ceilings, "SIDE", 64)
    path = tmp_path / "kernels.json"
    threads = torch.get_num_threads()
    arguments = f"x --threads {threads} --seconds 0.001 --rows 1 3 --sizes a --heads 4 2 16"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), "--dtype", dtype, "--json", str(path)])
    cpu_kernels.main()
    report = json.loads(path.read_text())
    assert report["benchmark"] == "cpu_kernels" and report["dtype"] == dtype
    names = ("gate_up 64 x 32, 1 rows", "gate_up 64 x 32, 3 rows")
    names += ("down 32 x 50, 1 rows", "down 32 x 50, 3 rows")
    found = {(one["name"], one["kernel"]) for one in report["products_a"]}
    assert found == {(name, kernel) for name in names for kernel in ("native", "torch")}
    found = {(one["name"], one["kernel"]) for one in report["attention"]}
    assert found == {(case.name, kernel) for case in CASES for kernel in ("native", "reference")}
    results = report["products_a"] + report["attention"]
    assert all(one["seconds"] > 0 and one["floor"] > 0 for one in results)
    printed = capsys.readouterr().out
    assert "down 32 x 50, 3 rows" in printed and "decode shared" in printed
