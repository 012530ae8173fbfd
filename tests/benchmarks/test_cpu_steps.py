"""The benchmark of steps on a CPU: its plans run, and its parts add up."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from benchmarks.cpu_steps import SHOWN, Case, measure, show
from tests.model.checkpoints import configs, save
from tests.native import native_library


def test_parts_add_up(tmp_path: Path) -> None:
    native_library()
    save(configs()["llama"], tmp_path)
    cases = [Case("decode", 3, 1, 20), Case("prefill", 1, 40, 40), Case("extend", 2, 5, 30)]
    for _ in range(20):
        results = measure("tiny", tmp_path, cases, 1, 0.01, beside=True)
        # A busy machine may stop us between two parts: not every time.
        if all(sum(one.parts.values()) > 0.5 * one.milliseconds for one in results):
            break
    assert [result.case for result in results] == ["decode", "prefill", "extend"]
    for result in results:
        assert result.transformers and result.transformers > 0
        assert set(result.parts) == set(SHOWN)
        assert min(result.parts.values()) >= 0
        assert result.parts["linear"] > 0 and result.parts["attention"] > 0
        assert 0.5 < sum(result.parts.values()) / result.milliseconds < 1 + 1e-6
    show(results, Console())
