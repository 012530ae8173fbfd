"""Products with quantised weights of real shapes, against float64."""

from typing import Any

import pytest
import torch
from msgspec.structs import asdict, replace

from rootlace.kernels.interface import KernelSet
from rootlace.kernels.reference.layers import dequantise
from rootlace.kernels.weights import Quantised, Scheme
from tests.kernels.cases import poisoned_memory
from tests.kernels.quantised_cases import FORMS, check_product, make

SHAPES = [(4100, 4096), (1000, 14336)]
"""Outputs and inputs; neither number of outputs fills tiles."""
ROWS = [1, 17, 64, 200]
"""Of steps that the kernel takes, and of one for which weights are made dense."""


def moved(weight: Quantised, device: torch.device) -> Quantised:
    parts = asdict(weight).items()
    found = {name: p.to(device) for name, p in parts if isinstance(p, torch.Tensor)}
    return replace(weight, **found)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0].codes}-{form[0].group}")
def test_every_form(
    kernels: KernelSet, device: torch.device, real: bool, form: tuple[Scheme, dict[str, Any]]
) -> None:
    """With a bias; columns in order, and in one of their own."""
    for shape, ordered in zip(SHAPES if real else [(37, 96), (9, 128)], (False, True), strict=True):
        weight = moved(make(form, *shape, bias=True, ordered=ordered), device)
        matrix = dequantise(weight)
        assert weight.bias is not None
        bias = weight.bias.to(torch.bfloat16).float()
        generator = torch.Generator(device).manual_seed(1)
        for dtype in (torch.bfloat16, torch.float32):
            weight = replace(weight, bias=bias.to(dtype))
            for rows in ROWS:
                x = torch.randn((rows, shape[1]), generator=generator, device=device).to(dtype)
                with poisoned_memory():
                    found = kernels.linear(x, weight)
                check_product(x, found, matrix, bias)


@pytest.mark.parametrize("number", [0, 5])
def test_a_row_does_not_depend_on_its_company(
    kernels: KernelSet, device: torch.device, real: bool, number: int
) -> None:
    """Bit for bit, in steps that the kernel takes, whatever tile they fill."""
    if not real:
        pytest.skip("on a CPU the reference multiplies, by libraries that choose by the rows")
    weight = moved(make(FORMS[number], *SHAPES[0]), device)
    x = torch.randn((64, SHAPES[0][1]), device=device).to(torch.bfloat16)
    whole = kernels.linear(x, weight)
    for row in (0, 40):
        for count in (1, 9, 17):
            assert torch.equal(
                kernels.linear(x[row : row + count], weight), whole[row : row + count]
            )
