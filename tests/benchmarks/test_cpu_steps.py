"""The benchmark of steps on a CPU: its plans run, and its parts add up."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from benchmarks.cpu_steps import SHOWN, Case, Kernels, measure, show
from tests.model.checkpoints import configs, save
from tests.native import skip_without


@pytest.mark.parametrize("kernels", get_args(Kernels))
def test_parts_add_up(kernels: Kernels, tmp_path: Path) -> None:
    skip_without(kernels)
    save(configs()["llama"], tmp_path)
    cases = [Case("decode", 3, 1, 20), Case("prefill", 1, 40, 40), Case("extend", 2, 5, 30)]
    arguments = argparse.Namespace(threads=1, seconds=0.01)
    for _ in range(20):
        results = measure("tiny", tmp_path, kernels, cases, arguments)
        # A busy machine may stop us between two parts: not every time.
        if all(sum(one.parts.values()) > 0.5 * one.milliseconds for one in results):
            break
    assert [result.case for result in results] == ["decode", "prefill", "extend"]
    for result in results:
        assert set(result.parts) == set(SHOWN)
        assert min(result.parts.values()) >= 0
        assert result.parts["linear"] > 0 and result.parts["attention"] > 0
        assert 0.5 < sum(result.parts.values()) / result.milliseconds < 1 + 1e-6
    show(results, Console())
