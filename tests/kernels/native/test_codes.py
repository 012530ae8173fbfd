"""Products with quantised weights in C++: bit by bit those with the numbers that they stand for, or
those of integers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.arrays import numpy_dtype
from rootlace.kernels.native.linear import Epilogue, Packer, Products, prepared
from rootlace.kernels.reference.layers import dequantise
from rootlace.kernels.weights import (
    Dense,
    Quantised,
    Scheme,
    Stacked,
    Weight,
    parts_of,
    stacked,
    tensors,
)
from tests.kernels.native.layouts import PackedLinear
from tests.kernels.native.test_linear import Machine, multiplied, poisoned, random
from tests.kernels.native.test_linear import machine as machine  # the fixture
from tests.kernels.quantised_cases import (
    FORMS,
    integer_product,
    make,
    numbers_of,
    of_groups,
    one_scale,
)

DTYPES = (torch.float32, torch.bfloat16)

NATIVE = [form for form in FORMS if form[0].group != 8]
ROWS = (*range(1, 10), 33, 130)


def dense(weight: Quantised, dtype: torch.dtype) -> Dense:
    return Dense(dequantise(weight).to(dtype), weight.bias)


def exact_parts(weight: Quantised) -> tuple[torch.Tensor, torch.Tensor]:
    """What codes stand for, float64 [outputs, inputs]: codes times scales, and offsets."""
    spread = weight.shape[1] // weight.scales.shape[1]
    scales = of_groups(weight.scales, weight.units).double().repeat_interleave(spread, 1)
    offsets = torch.zeros_like(scales)
    if weight.offsets is not None:
        offsets = of_groups(weight.offsets, weight.offset_units).double()
        offsets = offsets.repeat_interleave(spread, 1)
    return numbers_of(weight).double() * scales, offsets


def assert_same(
    machine: Machine,
    weight: Weight,
    numbers: Dense,
    dtype: torch.dtype,
    gated: bool = False,
    counts: Sequence[int] = ROWS,
) -> None:
    codes = machine.packed_weight(weight, dtype, gated)
    if machine.multiplies_integers(weight, dtype):
        assert_integers(codes, weight, gated, counts)
        return
    plain = machine.packed_weight(numbers, dtype, gated)
    for epilogue in (Epilogue.SILU_MUL,) if gated else (Epilogue.STORE, Epilogue.ADD):
        for rows in counts:
            x = random(rows, weight.shape[1], dtype=dtype, seed=rows)
            found, expected = multiplied(codes, epilogue, x), multiplied(plain, epilogue, x)
            # Codes of zero with a negative scale are zeros of the other sign, which add up alike.
            assert torch.equal(found, expected), (epilogue, rows)


def assert_integers(
    packed: PackedLinear, weight: Weight, gated: bool, counts: Sequence[int]
) -> None:
    """Whatever set of instructions multiplies: the same bits."""
    parts = [part for part in parts_of(weight) if isinstance(part, Quantised)]
    grouped = not all(map(one_scale, parts))
    for rows in counts:
        x = random(rows, weight.shape[1], dtype=torch.bfloat16, seed=rows)
        products = [integer_product(x, part, grouped) for part in parts]
        for product, part in zip(products, parts, strict=True):
            if part.bias is not None:
                product += part.bias
        y = torch.cat(products, 1)
        if gated:
            gate, values = y.double().chunk(2, -1)
            found = multiplied(packed, Epilogue.SILU_MUL, x).double()
            expected = torch.nn.functional.silu(gate) * values
            torch.testing.assert_close(found, expected, rtol=2**-8, atol=1e-20)
            continue
        assert torch.equal(multiplied(packed, Epilogue.FLOAT32, x), y), rows
        assert torch.equal(multiplied(packed, Epilogue.STORE, x), y.bfloat16()), rows
        residual = poisoned(packed, Epilogue.ADD, rows)
        assert torch.equal(multiplied(packed, Epilogue.ADD, x), residual + y), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", NATIVE, ids=str)
def test_products_are_those_of_what_codes_stand_for(
    machine: Machine, form: Any, dtype: torch.dtype
) -> None:
    """Part of a panel, whole ones, several; a stretch of inputs, several."""
    for outputs, inputs, counts in ((5, 32, ROWS), (50, 64, ROWS), (130, 1088, (1, 6, 9, 33))):
        weight = make(form, outputs, inputs, bias=True)
        assert_same(machine, weight, dense(weight, dtype), dtype, counts=counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", ["int8", "int4", "fp8_e4m3"])
def test_one_group_of_any_number_of_inputs(
    machine: Machine, codes: Any, dtype: torch.dtype
) -> None:
    for inputs in (2, 18, 33, 700):
        if inputs % 2 == 0 or codes != "int4":
            weight = make((Scheme(codes), {}), 50, inputs)
            assert_same(machine, weight, dense(weight, dtype), dtype)


def test_groups_and_units_that_end_within_a_tile(machine: Machine) -> None:
    units = {"scales": torch.int8, "units": 3, "unit": torch.float16}
    for form in ((Scheme("uint4", 48), {}), (Scheme("nl4", 16), units)):
        weight = make(form, 50, 144)
        assert_same(machine, weight, dense(weight, torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [NATIVE[0], NATIVE[3], NATIVE[6]], ids=str)
def test_gates_and_what_they_gate(machine: Machine, form: Any, dtype: torch.dtype) -> None:
    for inner, inputs in ((20, 32), (100, 96)):
        weight = make(form, 2 * inner, inputs, bias=True)
        assert_same(machine, weight, dense(weight, dtype), dtype, gated=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_another_scheme_than_what_they_gate(machine: Machine, dtype: torch.dtype) -> None:
    parts = [make(FORMS[0], 50, 64, bias=True), make(NATIVE[4], 50, 64, seed=1)]
    weight = stacked(parts)
    assert isinstance(weight, Stacked)
    matrix = torch.cat([dequantise(part).to(dtype) for part in parts])
    bias = torch.cat([parts[0].bias, torch.zeros(50)])  # type: ignore[list-item]
    assert_same(machine, weight, Dense(matrix, bias), dtype, gated=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_in_another_order(machine: Machine, dtype: torch.dtype) -> None:
    """Sums run over the columns as they are stored."""
    weight = make(NATIVE[4], 50, 64, ordered=True)
    assert weight.order is not None
    packed = machine.packed_weight(weight, dtype)
    plain = machine.packed_weight(replace(weight, order=None), dtype)
    for rows in ROWS:
        x = random(rows, 64, dtype=dtype, seed=rows)
        expected = multiplied(plain, Epilogue.STORE, x[:, weight.order.long()].contiguous())
        assert torch.equal(multiplied(packed, Epilogue.STORE, x), expected)


def test_columns_in_another_order_after_some_in_theirs(machine: Machine) -> None:
    """In one call, in which either may come first."""
    weights = [make(NATIVE[4], 50, 64, ordered=ordered) for ordered in (False, True)]
    packer = Packer(machine.library, machine.teams[2], torch.float32)
    x = random(3, 64)
    for some in (weights, weights[::-1]):
        together, alone = torch.zeros(3, 50), torch.zeros(3, 50)
        Products(packer, some).multiply(Epilogue.ADD, x, together)
        for weight in some:
            machine.packed_weight(weight, torch.float32).multiply(Epilogue.ADD, x, alone)
        assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "types, bits",
    [
        ({"scales": torch.float16, "offsets": torch.float16}, 5.0),
        ({"scales": torch.uint8, "units": 8, "unit": torch.float16}, 4.625),
    ],
    ids=["Q4_1", "Q4_K"],
)
def test_codes_without_sign_as_files_have_them(
    machine: Machine, types: Any, bits: float, dtype: torch.dtype
) -> None:
    """Several units of eight groups; a gate. Nothing grows when it is packed."""
    weight = make((Scheme("uint4", 32, offsets=True), types), 192, 1280)
    assert sum(tensor.nbytes for tensor in tensors(prepared(weight))) * 8 / (192 * 1280) == bits
    assert_same(machine, weight, dense(weight, dtype), dtype)
    assert_same(machine, weight, dense(weight, dtype), dtype, gated=True)


@pytest.mark.parametrize("form", [NATIVE[0], NATIVE[4], NATIVE[9]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_same_bits_in_any_company_and_on_any_number_of_threads(
    machine: Machine, dtype: torch.dtype, form: Any
) -> None:
    """Few rows are made integers by each thread, many by all together."""
    weight = make(form, 130, 544)
    x = random(203, 544, dtype=dtype, seed=5)
    whole = multiplied(machine.packed_weight(weight, dtype), Epilogue.STORE, x)
    for threads in machine.teams:
        packed = machine.packed_weight(weight, dtype, threads=threads)
        begin = 0
        for count in (1, 2, 7, 8, 13, 30, 65, 77):
            part = multiplied(packed, Epilogue.STORE, x[begin : begin + count])
            assert torch.equal(part, whole[begin : begin + count]), (threads, begin)
            begin += count


def test_integers_are_no_coarser_than_bfloat16(machine: Machine) -> None:
    """The rounding of activations as byte_rows.h bounds it, in the worst rows: a number far above
    the others, or as many as there may be."""
    weight = make(FORMS[0], 20, 16384)
    if not machine.multiplies_integers(weight, torch.bfloat16):
        pytest.skip("this set of instructions multiplies the numbers that codes stand for")
    x = random(4, 16384, dtype=torch.bfloat16, seed=3)
    x[1, 5] = 300.0
    x[2, 7:] *= 2.0**-14
    x[3] = 255 * x[3].sign()
    matrix = weight.values.double() * weight.scales.double()
    out = multiplied(machine.packed_weight(weight, torch.bfloat16), Epilogue.FLOAT32, x)
    error = (out.double() - x.double() @ matrix.T).abs()
    length = x.double().norm(dim=1, keepdim=True) * matrix.norm(dim=1)
    largest = x.double().abs().amax(1, keepdim=True)
    bound = 16384**0.5 * largest / 65278 * matrix.norm(dim=1)
    assert (error <= bound + 2.0**-23 * length).all()
    assert (bound <= 2.0**-8.99 * length).all()


@pytest.mark.parametrize("form", [form for form in NATIVE if form[0].codes != "fp8_e4m3"], ids=str)
def test_integers_in_groups_are_as_near_as_their_rounding_says(machine: Machine, form: Any) -> None:
    """Against float64. A number is rounded by half a step at most, a step being the row's largest
    magnitude / 32,639; what follows in float32, two additions for each group of at most 512 inputs
    and a few factors, by 2^-24 of all terms each."""
    for outputs, inputs in ((1, 32), (49, 64), (100, 1056)):
        weight = make(form, outputs, inputs, seed=inputs)
        if not machine.multiplies_integers(weight, torch.bfloat16):
            pytest.skip("this set of instructions multiplies the numbers that codes stand for")
        packed = machine.packed_weight(weight, torch.bfloat16)
        codes, offsets = exact_parts(weight)
        matrix = codes + offsets
        for rows in (*range(1, 10), 33):
            x = random(rows, inputs, dtype=torch.bfloat16, seed=rows)
            found = multiplied(packed, Epilogue.FLOAT32, x).double()
            step = x.double().abs().amax(1, keepdim=True) / 32639
            rounded = step / 2 * matrix.abs().sum(1)
            terms = (x.double().abs() + step) @ (codes.abs() + offsets.abs()).T
            steps = 2 * (inputs // min(weight.group, 512) + 1) + 6
            assert (
                (found - x.double() @ matrix.T).abs() <= rounded + steps * 2.0**-24 * terms
            ).all()


@pytest.mark.parametrize("group", [16, 64, 512, None], ids=str)
@pytest.mark.parametrize("codes", ["int8", "int4", "uint4", "nl4"])
def test_sums_of_the_largest_integers_do_not_overflow(
    machine: Machine, codes: Any, group: int | None
) -> None:
    """All activations of a row have its largest magnitude; codes are the least or the largest."""
    weight = make((Scheme(codes, group, offsets=True), {}), 51, 2048)
    least, most = {"int8": (128, 127), "int4": (8, 7)}.get(codes, (0, 15))
    bytes_of = (
        [least, most]
        if codes == "int8"
        else [i | j << 4 for i in (least, most) for j in (least, most)]
    )
    extremes = torch.tensor(bytes_of, dtype=torch.uint8).view(weight.values.dtype)
    generator = torch.Generator().manual_seed(0)
    values = extremes[torch.randint(len(extremes), weight.values.shape, generator=generator)]
    values[::3], values[1::3] = extremes[0], extremes[-1]
    weight = replace(weight, values=values)
    if not machine.multiplies_integers(weight, torch.bfloat16):
        pytest.skip("this set of instructions multiplies the numbers that codes stand for")
    packed = machine.packed_weight(weight, torch.bfloat16)
    x = torch.full((9, 2048), 255.0, dtype=torch.bfloat16)
    x[1::3] *= -1
    x[2::3, ::2] *= -1
    for rows in ([0], [1], [2], [*range(9)]):
        found = multiplied(packed, Epilogue.FLOAT32, x[rows])
        assert torch.equal(found, integer_product(x[rows], weight))


@pytest.mark.parametrize("form", [NATIVE[0], NATIVE[9]], ids=str)
def test_rows_of_integers_that_are_nothing_or_no_numbers(machine: Machine, form: Any) -> None:
    """They spoil no others. Below 2^-100 a row counts as zero."""
    weight = make(form, 50, 96)
    packed = machine.packed_weight(weight, torch.bfloat16)
    x = random(7, 96, dtype=torch.bfloat16, seed=3)
    want = multiplied(packed, Epilogue.FLOAT32, x)
    x[1], x[3, 9], x[4, 69], x[5] = 0, torch.nan, -torch.inf, x[5] * 2.0**-120
    found = multiplied(packed, Epilogue.FLOAT32, x)
    assert torch.equal(found[::2][[0, 1, 3]], want[::2][[0, 1, 3]])
    assert not found[1].any() and found[5].abs().max() < 1e-30
    assert found[3].isnan().all() and not found[4].isfinite().any()


def test_memory_is_that_of_codes_and_scales(machine: Machine) -> None:
    """Where panels are whole."""
    for form in NATIVE:
        weight = make(form, 480, 512)
        parts = (weight.values, weight.scales, weight.offsets, weight.units, weight.offset_units)
        sizes = [part.nbytes for part in parts if part is not None]
        if "least" in form[1] and machine.multiplies_integers(weight, torch.bfloat16):
            sizes[0] = sizes[0] * 6 // 8
        assert len(machine.packed_weight(weight, torch.bfloat16).packed) == sum(sizes)


def test_subnormal_scales_and_codes(machine: Machine) -> None:
    """Half-precision scales of GGUF files are often below the normal range."""
    codes = torch.arange(127, dtype=torch.uint8).repeat(16, 1)
    codes = torch.cat([codes, codes | 128, torch.zeros(16, 2, dtype=torch.uint8)], dim=1)
    scales = torch.tensor([2.0**-24 * (i * i + 1) for i in range(16)]).half()[:, None]
    weight = Quantised(Scheme("fp8_e4m3"), codes.view(torch.float8_e4m3fn), scales)
    packed = machine.packed_weight(weight, torch.float32)
    found = multiplied(packed, Epilogue.STORE, torch.eye(256))
    assert torch.equal(found.T, dequantise(weight))


def test_what_has_no_kernels(machine: Machine) -> None:
    def refuse(message: str, weight: Weight, gated: bool = False) -> None:
        with pytest.raises(ValueError, match=message):
            machine.packed_weight(weight, torch.float32, gated)

    refuse("groups are not of whole 16 inputs, but of 8", make(FORMS[2], 4, 32))
    weight = make(FORMS[0], 4, 32)
    scales = weight.scales.clone()
    scales[1] = torch.inf
    refuse("not finite", Quantised(weight.scheme, weight.values, scales))
    codes = torch.full((4, 32), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    refuse("not finite", Quantised(Scheme("fp8_e4m3"), codes, weight.scales))
    other = Dense(random(4, 32))
    refuse("some of what is packed together is dense", stacked([other, weight]), True)
    refuse("some of what is packed together is dense", stacked([weight, other]))
    ordered = make(FORMS[1], 4, 32, ordered=True)
    refuse("parts of unlike schemes", Stacked((weight, ordered)))
    refuse("parts of unlike schemes", Stacked((weight, make(FORMS[1], 2, 32))), True)
    refuse("unlike orders of columns", Stacked((weight, ordered)), True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [form for form in NATIVE if form[0].codes != "fp8_e4m3"])
def test_rows_are_the_numbers_that_codes_stand_for(
    machine: Machine, form: tuple[Scheme, dict[str, Any]], dtype: torch.dtype
) -> None:
    for outputs, inputs in ((1, 32), (7, 64), (100, 320)):
        weight = make(form, outputs, inputs, seed=outputs)
        packed = Packer(machine.library, machine.teams[2], dtype).pack(weight)
        asked = np.random.default_rng(outputs).integers(0, outputs, 9).astype(np.int32)
        found = packed.rows(machine.library, numpy_dtype(dtype), asked)
        assert np.array_equal(found, dequantise(weight).float().numpy()[asked])
