"""Products with dense and quantised weights against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rootlace.kernels import Dense, Quantised, Scheme
from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.reference.linear import dequantise, quantise
from rootlace.kernels.weights import unknown_kind

SCHEMES = [Scheme(8), Scheme(8, 8), Scheme(4), Scheme(4, 8)]
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 1, shape)).float()


def integers(weight: Quantised) -> np.ndarray:
    """The integers of a weight, number by number."""
    values = weight.values.numpy()
    if weight.scheme.bits == 8:
        return values.astype(np.int64)
    found = np.zeros((values.shape[0], 2 * values.shape[1]), np.int64)
    for row, column in np.ndindex(*found.shape):
        half = (int(values[row, column // 2]) >> 4 * (column % 2)) & 15
        found[row, column] = half - 16 if half > 7 else half
    return found


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("biased", [False, True])
def test_dense(dtype: torch.dtype, biased: bool) -> None:
    x, matrix = normal(5, 24).to(dtype), normal(7, 24, seed=1).to(dtype)
    bias = normal(7, seed=2).to(dtype) if biased else None
    exact = x.double() @ matrix.double().t() + (0.0 if bias is None else bias.double())
    out = torch.empty(5, 7, dtype=dtype)
    for found in (
        REFERENCE.linear(x, Dense(matrix, bias)),
        REFERENCE.linear(x, Dense(matrix, bias), out),
    ):
        assert found.dtype == dtype
        assert torch.allclose(found.double(), exact, rtol=RELATIVE[dtype], atol=RELATIVE[dtype])
    assert torch.equal(out, REFERENCE.linear(x, Dense(matrix, bias), torch.empty_like(out)))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("biased", [False, True])
def test_quantised(scheme: Scheme, biased: bool) -> None:
    x, matrix = normal(5, 24), normal(7, 24, seed=1)
    bias = normal(7, seed=2) if biased else None
    weight = quantise(matrix, scheme, bias)
    scales = weight.scales.double().numpy().repeat(24 // weight.scales.shape[1], axis=1)
    meant = integers(weight) * scales
    exact = x.double().numpy() @ meant.T + (0.0 if bias is None else bias.double().numpy())
    for out in (None, torch.empty(5, 7)):
        found = REFERENCE.linear(x, weight, out)
        np.testing.assert_allclose(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rounding(scheme: Scheme) -> None:
    """No weight is off by more than half a step, and a group's largest is met."""
    matrix = normal(7, 24, seed=3)
    matrix[2] = 0.0
    weight = quantise(matrix, scheme)
    assert np.abs(integers(weight)).max() == scheme.largest
    group = 24 // weight.scales.shape[1]
    assert group == (scheme.group or 24)
    error = (dequantise(weight) - matrix).abs().view(7, -1, group)
    assert bool((error <= weight.scales.unsqueeze(2) * 0.5001).all())
    assert bool((dequantise(weight)[2] == 0.0).all())


def test_groups_that_do_not_fit() -> None:
    for matrix, scheme in ((normal(3, 24), Scheme(8, 7)), (normal(3, 7), Scheme(4))):
        with pytest.raises(ValueError, match="not whole groups"):
            quantise(matrix, scheme)


def test_kinds() -> None:
    weights = [Dense(normal(2, 4)), quantise(normal(2, 4), Scheme(4))]
    assert unknown_kind(weights, REFERENCE.weights) is None
    assert unknown_kind(weights, ["dense", "int8"]) == "int4"
