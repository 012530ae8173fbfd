"""The benchmark of quantised weights: every kind runs every case; fewer bits are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.cpu_steps import Case
from benchmarks.quantised import KINDS, Peer, Result, beside, measure, show, sources_of
from tests.model.checkpoints import configs, save
from tests.native import native_library


def test_kinds_of_weights_in_turns(tmp_path: Path) -> None:
    native_library()
    save(configs()["llama"], tmp_path)
    cases = [Case("decode", 3, 1, 20), Case("prefill", 1, 40, 40)]
    results = measure("tiny", sources_of(tmp_path, KINDS, []), cases, 1, 0.0, 1e9)
    assert [one.weights for one in results] == [*KINDS, *KINDS]
    assert [one.case for one in results] == ["decode"] * 3 + ["prefill"] * 3
    assert all(one.milliseconds > 0 for one in results)
    dense, int8, int4 = (one.gigabytes for one in results[:3])
    assert dense > 1.5 * int8 > 2 * int4 > 0
    assert results[0].least == dense * 1e3
    show(results, Console())


def test_times_of_llama_cpp_stand_beside_its_files(tmp_path: Path) -> None:
    """A stand-in says what llama.cpp's own program says."""
    program = tmp_path / "batched-bench"
    program.write_text('#!/bin/sh\necho; echo "{\\"pl\\": 3, \\"t_pp\\": 0.1, \\"t_tg\\": 0.16}"\n')
    program.chmod(0o755)
    cases = [Case("decode", 3, 1, 20), Case("prefill", 1, 40, 40)]
    results = [
        Result("tiny", case.name, kind, 2.5, 1.0, 1.0)
        for case in cases
        for kind in ("dense", "file")
    ]
    found = beside(results, cases, Peer(program, [tmp_path / "file.gguf"], 1))
    assert [one.peer for one in found] == [None, pytest.approx(5.0), None, pytest.approx(100.0)]
