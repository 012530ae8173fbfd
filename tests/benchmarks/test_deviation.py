"""The deviation from float32: what is measured, against errors that are put in on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import deviation
from benchmarks.deviation import PEER, PHASES, Compared, Deviation


def test_what_is_measured() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(7, 4, generator=generator), torch.randn(7, 50, generator=generator)
    found = reference[0] + 0.25, reference[1] * 1.5
    measured = Deviation()
    for part in (slice(3), slice(3, None)):
        measured.add((reference[0][part], reference[1][part]), (found[0][part], found[1][part]))
    expected = np.exp(reference[1].numpy().astype(np.float64))
    actual = np.exp(1.5 * reference[1].numpy().astype(np.float64))
    expected /= expected.sum(1, keepdims=True)
    actual /= actual.sum(1, keepdims=True)
    result = measured.as_json()
    error = (reference[1] / 2).abs()
    assert result == {
        "positions": 7,
        "logit_mean_abs": pytest.approx(error.mean().item(), rel=1e-5),
        "logit_max_abs": pytest.approx(error.max().item(), rel=1e-5),
        "hidden_mean_abs": pytest.approx(0.25, rel=1e-5),
        "kl_mean": pytest.approx((expected * np.log(expected / actual)).sum(1).mean(), rel=1e-5),
        "same_top_token": 1.0,
    }


def test_whose_is_larger() -> None:
    def of(error: float) -> dict[str, Deviation]:
        found = Deviation()
        reference = torch.zeros(2, 3), torch.arange(6.0).view(2, 3)
        wrong = reference[1].clone()
        wrong[0, 0] += error
        found.add(reference, (reference[0] + error, wrong))
        return dict.fromkeys(PHASES, found)

    compared = Compared({PEER: of(0.1), "native bf16": of(0.08), "reference bf16": of(0.2)})
    assert deviation.no_larger(compared) == {
        "native bf16": {"prefill": True, "decode": True},
        "reference bf16": {"prefill": False, "decode": False},
    }


def test_the_embedded_model(demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "deviation.json"
    arguments = "--sizes demo --prompts 2 --length 48 --steps 3 --json"
    assert deviation.main([*arguments.split(), str(file)]) in (0, 1)
    found = json.loads(file.read_text())["results"]["demo"]
    for engine, phases in found["engines"].items():
        assert [phase["positions"] for phase in phases.values()] == [2 * 48, 2 * 3], engine
        for measured in phases.values():
            exact = engine.endswith("fp32")
            low, high = (0.0, 1e-3) if exact else (1e-6, 3.0)
            assert low <= measured["logit_max_abs"] < high, engine
            assert measured["same_top_token"] >= (1.0 if exact else 0.9), engine
    assert {PEER, "reference bf16", "reference fp32"} <= set(found["engines"])
    assert set(found["engines"]) | set(found["missing"]) >= {"native bf16", "native fp32"}
