"""The benchmark of attention: what a case is by brute force, and a short run of all of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import cpu_attention
from benchmarks.cpu_attention import Case, Heads, Step, measure
from rootlace.runtime.doctor import ceilings
from tests.native import native_library

CASES = (
    Case("decode", 3, 1, 37),
    Case("decode shared", 4, 1, 40, 32, 2),
    Case("extend", 2, 5, 21),
    Case("extend shared", 4, 5, 21, 16, 4),
)


@pytest.mark.parametrize("case", CASES)
def test_a_case_counts_what_is_computed_and_read(case: Case) -> None:
    step = Step(case, Heads(4, 2, 16), torch.float32, 16)
    seen = sum(
        position + 1
        for _ in range(case.rows)
        for position in range(case.context - case.new, case.context)
    )
    assert case.pairs == seen
    slots = {
        int(table[position // 16]) * 16 + position % 16
        for table in step.batch.block_tables
        for position in range(case.context)
    }
    assert case.distinct == len(slots)
    assert step.layer_bytes == 2 * len(slots) * 2 * 16 * 4


def test_kernels_that_differ_are_refused() -> None:
    step = Step(CASES[0], Heads(4, 2, 16), torch.float32, 16)
    right = step.reference()
    assert set(measure(step, {"native": right}, 0.001)) == {"native"}
    with pytest.raises(ValueError, match="wrong and native differ"):
        measure(step, {"native": right, "wrong": lambda: 1.01 * right()}, 0.001)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_short_run_measures_every_case_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    native_library()
    monkeypatch.setattr(cpu_attention, "CASES", CASES)
    monkeypatch.setattr(cpu_attention, "CACHED_BYTES", 1 << 16)
    monkeypatch.setattr(cpu_attention, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(ceilings, "SIDE", 64)
    path = tmp_path / "attention.json"
    threads = torch.get_num_threads()
    arguments = f"x --threads {threads} --seconds 0.001 --heads 4 2 16 --dtype {dtype}"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), "--json", str(path)])
    cpu_attention.main()
    report = json.loads(path.read_text())
    assert report["benchmark"] == "cpu_attention" and report["dtype"] == dtype
    found = {(one["case"], one["kernel"]) for one in report["results"]}
    kernels = ("native", "reference")
    assert found == {(case.name, kernel) for case in CASES for kernel in kernels}
    assert all(one["seconds"] > 0 and one["floor"] > 0 for one in report["results"])
    assert "decode shared" in capsys.readouterr().out
    assert np.isfinite(report["rate"])
