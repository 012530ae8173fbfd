"""Products with dense and quantised weights against float64."""

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.reference.layers import (
    AT_ONCE,
    INT4,
    INT8,
    ROWS,
    dequantise,
    numbers,
    quantise,
)
from rootlace.kernels.weights import (
    CODES,
    Dense,
    Quantised,
    Scheme,
    Stacked,
    Weight,
    rows_of,
    stacked,
    tensors,
    unknown_kind,
)
from tests.kernels.quantised_cases import FORMS, make, meaning, number

RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 1, shape)).float()


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


@pytest.mark.parametrize("codes", CODES)
def test_codes_stand_for_what_their_format_says(codes: Any) -> None:
    known = [code for code in range(256) if codes != "fp8_e4m3" or code & 127 != 127]
    if CODES[codes].in_byte == 2:
        known = list(range(16))
        stored = torch.tensor(
            [[low | high << 4] for low, high in zip(known, known[::-1], strict=True)]
        )
    else:
        stored = torch.tensor([[code] for code in known])
    values = stored.to(torch.uint8).view(CODES[codes].dtype)
    found = dequantise(Quantised(Scheme(codes), values, torch.ones(len(values), 1)))
    assert found[:, 0].tolist() == [number(codes, code) for code in known]
    if found.shape[1] == 2:
        assert found[:, 1].tolist() == [number(codes, code) for code in known[::-1]]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weights_are_what_their_scheme_says(form: Any, ordered: bool) -> None:
    weight = make(form, 7, 64, ordered=ordered)
    assert np.array_equal(dequantise(weight).numpy(), meaning(weight))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_with_quantised_weights(form: Any, biased: bool) -> None:
    weight = make(form, 7, 64, bias=biased, ordered=True)
    x = normal(5, 64)
    bias = 0.0 if weight.bias is None else weight.bias.double().numpy()
    exact = x.double().numpy() @ meaning(weight).astype(np.float64).T + bias
    for out in (None, torch.empty(5, 7)):
        found = REFERENCE.linear(x, weight, out)
        np.testing.assert_allclose(found.double(), exact, rtol=1e-4, atol=1e-5 * abs(exact).max())


def test_products_of_lower_precision_are_those_of_rounded_weights() -> None:
    weight, x = make(FORMS[0], 7, 64), normal(5, 64).bfloat16()
    dense = Dense(torch.from_numpy(meaning(weight)).bfloat16())
    assert torch.equal(REFERENCE.linear(x, weight), REFERENCE.linear(x, dense))


# ------------------------------------------------------------ rounding


@pytest.mark.parametrize("scheme", [Scheme("int8"), Scheme("int8", 8)], ids=str)
def test_rounding_to_int8(scheme: Scheme) -> None:
    """No weight is off by more than half a step, and a group's largest becomes 127."""
    matrix, bias = normal(7, 24, seed=3), normal(7)
    matrix[2] = 0.0
    weight = quantise(matrix, scheme, bias)
    assert weight.bias is bias and numbers(weight).abs().max() == 127
    error = (dequantise(weight) - matrix).abs().view(7, -1, scheme.group or 24)
    assert bool((error <= weight.scales.unsqueeze(2) * 0.5001).all())
    assert bool((dequantise(weight)[2] == 0.0).all())


def outliers(rows: int, seed: int) -> torch.Tensor:
    """Return weights like trained ones: normal, a few far larger, and groups off the middle."""
    rng = np.random.default_rng(seed)
    found = rng.normal(0, 0.02, (rows, 64)) + rng.normal(0, 0.01, (rows, 1))
    far = rng.random(found.shape) < 0.02
    return torch.from_numpy(found * np.where(far, 8.0, 1.0)).float()


def squares(weight: Quantised, matrix: torch.Tensor) -> np.ndarray:
    """The error of each group in float64."""
    error = dequantise(weight).double() - matrix.double()
    return error.view(len(matrix), -1, 32).square().sum(2).numpy()


def test_int4_is_near_the_least_error_that_there_is() -> None:
    """That of a search by brute force in float64: all pairs of 60 scales and 60 offsets, and for
    the best of them what codes that stay as they are leave to a least-squares fit."""
    matrix = outliers(12, 5)
    weight = quantise(matrix, INT4)
    assert weight.scheme == INT4 and weight.scales.dtype == torch.float16
    best = []
    for group in matrix.double().view(-1, 32).numpy():
        low, span = group.min(), group.max() - group.min()
        scales = span / 15 * np.linspace(0.5, 1.05, 60)[:, None, None]
        offsets = low + span * np.linspace(-0.05, 0.45, 60)[:, None]
        codes = np.clip(np.rint((group - offsets) / scales), 0, 15)
        errors = ((codes * scales + offsets - group) ** 2).sum(2)
        at = np.unravel_index(errors.argmin(), errors.shape)
        terms = np.stack((codes[at], np.ones(32)), 1)
        fitted = terms @ np.linalg.lstsq(terms, group, rcond=None)[0]
        best.append(((fitted - group) ** 2).sum())
    found = squares(weight, matrix).flatten()
    assert found.sum() < 1.05 * sum(best)
    assert bool((found < 1.5 * np.array(best)).all())


def test_int4_is_better_than_the_whole_range_and_never_worse() -> None:
    matrix = outliers(400, 6)
    groups = matrix.double().view(400, 2, 32).numpy()
    low, span = groups.min(2, keepdims=True), np.ptp(groups, 2, keepdims=True)
    plain = np.rint((groups - low) / span * 15) / 15 * span + low
    whole, found = ((plain - groups) ** 2).sum(2), squares(quantise(matrix, INT4), matrix)
    assert found.sum() < 0.85 * whole.sum()
    assert bool((found < 1.01 * whole).all())  # scales of 16 bits


def test_int4_meets_a_grid_exactly() -> None:
    """Numbers rounded in this format stay unchanged: a file's Q4_1 keeps its values."""
    rng = np.random.default_rng(7)
    codes = torch.from_numpy(rng.integers(0, 16, (5, 2, 32))).float()
    codes[..., 0], codes[..., 1] = 0, 15
    scales, offsets = (torch.from_numpy(rng.normal(0, 0.1, (5, 2, 1))).half() for _ in range(2))
    matrix = (codes * scales.abs().float() + offsets.float()).flatten(1)
    assert torch.equal(dequantise(quantise(matrix, INT4)), matrix)


def test_int8_is_near_the_least_error_that_there_is() -> None:
    """That of a search by brute force in float64: all pairs of 60 scales about that of the whole
    range and 20 offsets within a step. The whole range alone leaves a fifth more than what is
    found, and one scale for a row several times as much."""
    matrix = outliers(60, 5)
    weight = quantise(matrix, INT8)
    assert weight.scheme == INT8 and weight.scales.dtype == torch.float16
    best, whole = 0.0, 0.0
    for group in matrix.double().view(-1, 32).numpy():
        low, span = group.min(), group.max() - group.min()
        scales = span / 255 * np.append(1.0, np.linspace(0.98, 1.07, 60))[:, None, None]
        offsets = low + scales * np.append(0.0, np.linspace(-0.5, 0.5, 20))[:, None]
        codes = np.clip(np.rint((group - offsets) / scales), 0, 255)
        errors = ((codes * scales + offsets - group) ** 2).sum(2)
        best, whole = best + errors.min(), whole + errors[0, 0]
    found = squares(weight, matrix).sum()
    assert found < 1.3 * best and found < 0.9 * whole, (found, best, whole)
    assert found < 0.3 * squares(quantise(matrix, ROWS), matrix).sum()


@pytest.mark.parametrize("steps", [15, 31, 63, 255])
def test_int8_meets_grids_of_fewer_bits(steps: int) -> None:
    """To the precision of its offsets: what a file has in 4, 5 or 6 bits keeps its values."""
    rng = np.random.default_rng(7)
    codes = torch.from_numpy(rng.integers(0, steps + 1, (5, 2, 32))).float()
    codes[..., 0], codes[..., 1] = 0, steps
    scales = torch.from_numpy(rng.uniform(0.5, 1, (5, 2, 1))).half().float() / steps
    matrix = ((codes - steps // 2) * scales).flatten(1)
    found = (dequantise(quantise(matrix, INT8)) - matrix).abs().view(5, 2, 32)
    assert bool((found < 0.15 * scales * steps / 255).all())


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
@pytest.mark.parametrize("scheme", [INT8, INT4], ids=str)
def test_groups_of_any_size(size: float, scheme: Scheme) -> None:
    """A group of one number, also of 0, is met as nearly as its offset can be. Where squares are no
    float32 the whole range is kept."""
    matrix = outliers(6, 8)
    matrix[0], matrix[1] = 0.0, 0.3
    plain, weight = quantise(matrix, scheme), quantise(matrix * size, scheme)
    assert weight.scales.dtype == (torch.float16 if size == 1.0 else torch.bfloat16)
    assert bool((dequantise(weight)[0] == 0.0).all())
    torch.testing.assert_close(dequantise(weight)[1], matrix[1] * size, rtol=2**-8, atol=0)
    sizes = squares(weight, matrix * size) / size**2
    most = 1.05 if 1e-10 < size < 1e10 else 1.25
    assert sizes[2:].sum() < most * squares(plain, matrix)[2:].sum()


@pytest.mark.parametrize("scheme", [ROWS, INT8, INT4], ids=str)
def test_large_matrices_are_rounded_like_their_parts(scheme: Scheme) -> None:
    matrix = normal(AT_ONCE // 512 + 5, 512)
    whole = quantise(matrix, scheme)
    for rows in (slice(7), slice(-7, None)):
        part = quantise(matrix[rows], scheme)
        assert torch.equal(dequantise(part), dequantise(whole)[rows])


def test_what_is_not_rounded() -> None:
    for matrix, scheme in ((normal(3, 24), Scheme("int8", 7)), (normal(3, 24), INT4)):
        with pytest.raises(ValueError, match="not whole groups"):
            quantise(matrix, scheme)
    for scheme in (Scheme("nl4", 32), Scheme("int4", 32), Scheme("int8", 16, offsets=True)):
        with pytest.raises(ValueError, match="not rounded to"):
            quantise(normal(3, 64), scheme)


# ------------------------------------------------------------ kinds, parts, refusals


def test_kinds() -> None:
    weights: list[Weight] = [Dense(normal(2, 32)), quantise(normal(2, 32), INT4)]
    assert unknown_kind(weights, REFERENCE.weights) is None
    assert unknown_kind(weights, ["dense", "int8"]) == "uint4"
    assert unknown_kind([stacked(weights)], ["dense", "int8"]) == "uint4"
    assert stacked(weights).kind == "dense and uint4"


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weights_one_behind_the_other(form: Any) -> None:
    """Weights of one scheme are joined, others stay apart; products are those of each weight."""
    first = make(form, 3, 64, bias=True)
    second = make(form, 5, 64, bias=True, seed=1)
    other = Dense(normal(2, 64), normal(2))
    weight = stacked([first, second, other])
    assert isinstance(weight, Stacked) and weight.shape == (10, 64)
    assert [part.shape[0] for part in weight.parts] == [8, 2]
    x = normal(4, 64)
    apart = torch.cat([REFERENCE.linear(x, one) for one in (first, second, other)], dim=1)
    out = torch.empty(4, 10)
    for found in (REFERENCE.linear(x, weight), REFERENCE.linear(x, weight, out), out):
        assert torch.allclose(found, apart, rtol=1e-5, atol=1e-5 * apart.abs().max())
    assert sum(tensor.nbytes for tensor in tensors(weight)) == sum(
        tensor.nbytes for one in (first, second, other) for tensor in tensors(one)
    )


def test_what_is_not_joined() -> None:
    one = make(FORMS[1], 3, 64)
    for other in (
        make(FORMS[2], 3, 64),
        make((Scheme("int8", 16), {}), 3, 64),
        make(FORMS[1], 3, 64, bias=True),
        make(FORMS[1], 3, 64, ordered=True),
    ):
        assert isinstance(stacked([one, other]), Stacked)
    ordered = make(FORMS[1], 3, 64, ordered=True)
    assert isinstance(stacked([ordered, make(FORMS[1], 3, 64, ordered=True, seed=1)]), Stacked)
    joined = stacked([ordered, ordered])
    assert np.array_equal(dequantise(joined), np.tile(meaning(ordered), (2, 1)))  # type: ignore[arg-type]
    assert stacked([Dense(normal(2, 8)), Dense(normal(3, 8))]).shape == (5, 8)
    with pytest.raises(ValueError, match="unlike inputs"):
        stacked([one, Dense(normal(3, 32))])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_in_another_order(form: Any) -> None:
    weight = make(form, 7, 64, bias=True, ordered=True)
    rows = torch.tensor([3, 0, 6])
    found = rows_of(weight, rows)
    assert np.array_equal(meaning(found), meaning(weight)[rows])  # type: ignore[arg-type]
    assert torch.equal(found.bias, weight.bias[rows])  # type: ignore[arg-type, index]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"scheme": Scheme("int3", 16, True)}, "'int3' is not among the codes"),  # type: ignore[arg-type]
    ({"scheme": Scheme("int8", 16, True)}, "int8 codes are a matrix of torch.int8"),
    ({"values": torch.zeros(32, dtype=torch.uint8)}, "int4 codes are a matrix"),
    ({"scheme": Scheme("int4", 24, True)}, "64 inputs are not whole groups of 24"),
    ({"scheme": Scheme("int4", 0, True)}, "64 inputs are not whole groups of 0"),
    ({"scheme": Scheme("int4", 16)}, "offsets are given where the scheme has them"),
    ({"offsets": None, "offset_units": None}, "offsets are given where the scheme has them"),
    ({"scales": torch.zeros(4, 7, dtype=torch.uint8)}, "scales of these codes are"),
    ({"scales": torch.zeros(7, 4)}, "scales of these codes are .* in uint8, int8, not"),
    ({"units": None}, "in float32, float16, bfloat16, not"),
    ({"offset_units": None}, "offsets of these codes are"),
    ({"units": torch.zeros(7, 3)}, r"units of \[7, 4\] scales are not"),
    ({"units": torch.zeros(7, 2).double()}, r"units of \[7, 4\] scales are not"),
    ({"bias": torch.zeros(3)}, r"a bias of shape \[3\] for 7 outputs"),
    ({"order": torch.arange(64)}, "as many numbers of int32"),
    ({"order": torch.zeros(64, dtype=torch.int32)}, "has each of them once"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[message for _, message in REFUSED])
def test_parts_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    form = (Scheme("int4", 16, True), {"scales": torch.uint8, "units": 2, "unit": torch.float16})
    weight = make(form, 7, 64)
    with pytest.raises(ValueError, match=message):
        replace(weight, **changes)


def test_units_of_offsets_without_offsets() -> None:
    with pytest.raises(ValueError, match="units of offsets, but no offsets"):
        replace(make(FORMS[0], 2, 8), offset_units=torch.zeros(2, 1))
