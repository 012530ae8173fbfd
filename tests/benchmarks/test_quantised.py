"""The benchmark of quantised weights: every kind runs every case; fewer bits are read."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import llama_cpp
from benchmarks.cpu_steps import Case
from benchmarks.quantised import KINDS, Peer, Result, beside, measure, show, sources_of
from benchmarks.quantised_checkpoints import SCHEMES, make_quantised
from rootlace.kernels.reference.layers import dense
from rootlace.kernels.weights import tensors
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
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

    def milliseconds(file: Path, cases: Sequence[Case]) -> list[float]:
        return [llama_cpp.milliseconds(program, file, case, 1, ()) for case in cases]

    found = beside(results, cases, Peer({"file": tmp_path / "file.gguf"}, milliseconds))
    assert [one.peer for one in found] == [None, pytest.approx(5.0), None, pytest.approx(100.0)]


@pytest.mark.parametrize("name", SCHEMES)
def test_quantised_checkpoints_stand_for_the_weights(tmp_path: Path, name: str) -> None:
    """Within half a step, as the loader reads them."""
    cpu, config = torch.device("cpu"), configs()["llama"]
    config.update({"hidden_size": 128, "intermediate_size": 256, "head_dim": 32})
    save(config, tmp_path / "dense", dtype=torch.bfloat16)
    made = make_quantised(name, tmp_path / "dense", tmp_path / name)
    exact, found = (
        list(weights.products())
        for folder in (tmp_path / "dense", made)
        for weights in (load_weights(ModelConfig.read(folder), torch.bfloat16, cpu, None),)
    )
    most = {"w8a8": 0.5 / 127, "awq": 1.0 / 15}[name]
    for weight, stored in zip(exact, found, strict=True):
        whole, rounded = dense(weight, torch.float32).matrix, dense(stored, torch.float32).matrix
        assert (whole - rounded).abs().max() <= 1.1 * most * whole.abs().max()
    sizes = [sum(one.nbytes for weight in of for one in tensors(weight)) for of in (exact, found)]
    assert sizes[1] < sizes[0]
