"""Products with weights of every form in Triton, compared with the dense weights of equal
values."""

import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.reference.layers import dequantise
from rootlace.kernels.triton import TRITON, layers
from rootlace.kernels.weights import Dense, Stacked
from tests.kernels.cases import poisoned_memory
from tests.kernels.quantised_cases import FORMS, make
from tests.kernels.quantised_cases import check_product as check

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_every_form(number: int) -> None:
    """Outputs and inputs that fill no tile, columns in an order of their own, a bias."""
    weight = make(FORMS[number], 37, 96, bias=True, ordered=number % 2 == 1)
    assert weight.bias is not None
    dtype = (torch.float32, torch.bfloat16)[number % 3 > 0]
    x = torch.randn((5, 100), generator=torch.Generator().manual_seed(1)).to(dtype)[:, 2:98]
    with poisoned_memory():
        found = TRITON.linear(x, weight)
    check(x, found, dequantise(weight), weight.bias)


def test_units_of_offsets_alone_and_more_of_them_than_of_scales() -> None:
    wide = make(FORMS[8], 9, 128)
    assert wide.units is not None and wide.offset_units is not None
    alone = replace(wide, scales=wide.scales.float() / 64, units=None)
    fewer = replace(wide, units=wide.units[:, ::2].contiguous())
    x = torch.randn((3, 128), generator=torch.Generator().manual_seed(3))
    for weight in (alone, fewer):
        check(x, TRITON.linear(x, weight), dequantise(weight), torch.zeros(9))


def test_parts_and_steps_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of a stack fills its own columns; with many rows the reference multiplies."""
    one, other = make(FORMS[5], 20, 64, bias=True), make(FORMS[0], 9, 64, bias=True)
    middle = Dense(torch.randn(7, 64), torch.randn(7))
    stacked = Stacked((one, middle, other))
    matrix = torch.cat((dequantise(one), middle.matrix, dequantise(other)))
    assert one.bias is not None and other.bias is not None and middle.bias is not None
    bias = torch.cat((one.bias, middle.bias, other.bias))
    x = torch.randn((18, 64), generator=torch.Generator().manual_seed(2))
    out = torch.full((18, 36), float("nan"))
    assert TRITON.linear(x, stacked, out) is out
    check(x, out, matrix, bias)
    monkeypatch.setattr(layers, "_multiply", None)
    check(x, TRITON.linear(x, middle), middle.matrix, middle.bias)
    many = x.repeat(4, 1)
    check(many, TRITON.linear(many, stacked), matrix, bias)
