"""The benchmark of linear layers: floors by hand, and a short run of all of it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import cpu_kernels
from benchmarks.cpu_kernels import Result, Shape, with_floors
from tests.native import native_library


def result(kernel: str, rows: int, seconds: float) -> Result:
    """Of 1000 x 1000 bfloat16 weights."""
    flops, size = 2e6 * rows, 2e6
    return Result(
        "m", "s", 1000, 1000, rows, kernel, seconds, flops / seconds / 1e9, size / seconds / 1e9
    )


def test_the_floor_is_the_larger_of_reading_and_computing() -> None:
    results = [
        result("native", 1, 1e-4),  # 20 GB/s
        result("torch", 1, 2e-4),
        result("native", 1000, 2e-3),  # 1,000 GFLOP/s
        result("torch", 1000, 8e-3),
    ]
    found, ceilings = with_floors(results, bandwidth=40e9)
    assert ceilings == {"rate": 1e12, "read_bandwidth": 40e9}
    assert [one.floor for one in found] == pytest.approx([0.5, 0.25, 1.0, 0.25])
    assert [replace(one, floor=None) for one in found] == results


def test_what_a_kernel_read_is_bandwidth_too() -> None:
    found, ceilings = with_floors([result("native", 1, 1e-4)], bandwidth=1e9)
    assert ceilings["read_bandwidth"] == pytest.approx(20e9)
    assert found[0].floor == pytest.approx(1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_short_run_measures_every_shape_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    native_library()
    shapes = {"tiny": (Shape("gate_up", 64, 32), Shape("down", 32, 50))}
    monkeypatch.setattr(cpu_kernels, "SHAPES", shapes)
    monkeypatch.setattr(cpu_kernels, "ROTATED", 1 << 16)
    monkeypatch.setattr(cpu_kernels, "READ_BYTES", 1 << 16)
    path = tmp_path / "kernels.json"
    threads = torch.get_num_threads()
    arguments = f"x --threads {threads} --seconds 0.001 --rows 1 3 --models tiny --dtype {dtype}"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), "--json", str(path)])
    cpu_kernels.main()
    report = json.loads(path.read_text())
    assert report["benchmark"] == "cpu_kernels" and report["dtype"] == dtype
    found = {(one["shape"], one["rows"], one["kernel"]) for one in report["results"]}
    for shape in ("gate_up", "down"):
        for rows in (1, 3):
            assert {(shape, rows, "native"), (shape, rows, "torch")} <= found
    # The best of all has its own rate for a ceiling: 1, but for rounding.
    assert all(0 < one["floor"] <= 1 + 1e-9 for one in report["results"])
    assert all(one["seconds"] > 0 for one in report["results"])
    assert "tiny gate_up: 64 x 32" in capsys.readouterr().out
