"""The benchmark of quantised weights: every kind runs every case; fewer bits are read."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from benchmarks.cpu_steps import Case
from benchmarks.quantised import KINDS, measure, show
from tests.model.checkpoints import configs, save
from tests.native import native_library


def test_kinds_of_weights_in_turns(tmp_path: Path) -> None:
    native_library()
    save(configs()["llama"], tmp_path)
    cases = [Case("decode", 3, 1, 20), Case("prefill", 1, 40, 40)]
    results = measure("tiny", tmp_path, cases, 1, 0.0, 1e9)
    assert [one.weights for one in results] == [*KINDS, *KINDS]
    assert [one.case for one in results] == ["decode"] * 3 + ["prefill"] * 3
    assert all(one.milliseconds > 0 for one in results)
    dense, int8, int4 = (one.gigabytes for one in results[:3])
    assert dense > 1.5 * int8 > 2 * int4 > 0
    assert results[0].least == dense * 1e3
    show(results, Console())
