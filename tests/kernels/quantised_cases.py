"""Quantised weights of every form, made up, and what they stand for, told independently."""

import math
from typing import Any

import numpy as np
import torch

from rootlace.kernels.weights import Quantised, Scheme

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16

FORMS: list[tuple[Scheme, dict[str, Any]]] = [
    (Scheme("int8"), {}),
    (Scheme("int8", 16), {"scales": BFLOAT16}),
    (Scheme("int8", 8, offsets=True), {"scales": FLOAT16, "offsets": FLOAT32}),
    (Scheme("int8", 16), {"scales": torch.int8, "units": 2, "unit": FLOAT16}),
    (Scheme("int4"), {}),
    (Scheme("int4", 32), {"scales": FLOAT16}),
    (Scheme("int4", 32, offsets=True), {"scales": FLOAT32, "offsets": FLOAT32}),
    (Scheme("int4", 32, offsets=True), {"scales": BFLOAT16, "offsets": BFLOAT16}),
    (Scheme("int4", 16, offsets=True), {"scales": torch.uint8, "units": 2, "unit": FLOAT16}),
    (Scheme("uint4", 32, offsets=True), {"scales": FLOAT16, "offsets": FLOAT16}),
    (Scheme("uint4", 32, offsets=True), {"scales": torch.uint8, "units": 8, "unit": FLOAT16}),
    (Scheme("fp8_e4m3"), {}),
    (Scheme("fp8_e4m3", 32), {"scales": BFLOAT16}),
    (Scheme("e2m1", 32), {"scales": FLOAT32}),
    (Scheme("nl4", 32), {"scales": FLOAT16}),
    (Scheme("int8", 16), {"scales": torch.int8, "units": 16, "unit": FLOAT32, "least": -32}),
    (Scheme("int8", 32, offsets=True), {"scales": FLOAT16, "offsets": FLOAT16, "least": 0}),
    (Scheme("int8", 32), {"scales": FLOAT32, "least": -100}),
]
"""A scheme, and the types of its scales; `units`: how many groups share one,
or as many of them as the groups can be divided into; `least`: codes are no more than 63 above."""


def make(
    form: tuple[Scheme, dict[str, Any]],
    outputs: int,
    inputs: int,
    *,
    bias: bool = False,
    ordered: bool = False,
    seed: int = 0,
) -> Quantised:
    """Any codes but NaN. Scales have either sign, and sizes that are far apart."""
    scheme, types = form
    generator = torch.Generator().manual_seed(seed)
    groups = inputs // (scheme.group or inputs)
    halved = scheme.codes in ("int4", "uint4", "e2m1", "nl4")
    shape = (outputs, inputs // 2 if halved else inputs)
    values = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    if "least" in types:
        values = ((values & 63).int() + types["least"]).to(torch.int8)
    elif scheme.codes == "int8":
        values = values.view(torch.int8)
    elif scheme.codes == "fp8_e4m3":
        values[(values & 127) == 127] = 3
        values = values.view(torch.float8_e4m3fn)

    def floats(columns: int, dtype: torch.dtype) -> torch.Tensor:
        numbers = torch.randn(outputs, columns, generator=generator)
        return (numbers * torch.exp(torch.randn(outputs, columns, generator=generator))).to(dtype)

    def scales(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        if dtype.is_floating_point:
            return {"scales": floats(groups, dtype)}
        least = -128 if dtype == torch.int8 else 0
        shape = (outputs, groups)
        integers = torch.randint(least, least + 256, shape, generator=generator).to(dtype)
        units = floats(groups // math.gcd(groups, types["units"]), types["unit"])
        return {"scales": integers, "units": units}

    parts = scales(types.get("scales", FLOAT32))
    if scheme.offsets:
        found = scales(types.get("offsets", types.get("scales", FLOAT32)))
        parts["offsets"] = found["scales"]
        if "units" in found:
            parts["offset_units"] = found["units"]
    if bias:
        parts["bias"] = torch.randn(outputs, generator=generator)
    if ordered:
        parts["order"] = torch.randperm(inputs, generator=generator).int()
    return Quantised(scheme, values, **parts)


ROUNDED = {FLOAT32: (0.0, 1e-5), BFLOAT16: (2**-8, 2e-4)}
"""How far a product may be off: of its own size, and of what it is a sum of."""


def check_product(
    x: torch.Tensor, found: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor
) -> None:
    """x W^T + bias against float64; W is rounded to the activations' type, and not they to its."""
    wide, weight = x.double(), matrix.to(x.dtype).double()
    exact = wide @ weight.t() + bias.double()
    size = wide.abs() @ weight.abs().t() + bias.double().abs()
    own, of_size = ROUNDED[x.dtype]
    assert found.dtype == x.dtype
    assert ((found.double() - exact).abs() <= own * exact.abs() + of_size * size).all()


def integers_are_multiplied(instructions: str, weight: Quantised, dtype: torch.dtype) -> bool:
    """Whether native kernels multiply activations of `dtype` by a weight's codes as they are."""
    set_of_instructions = instructions.removesuffix("-twin")
    if dtype != BFLOAT16 or weight.kind == "fp8_e4m3":
        return False
    return set_of_instructions in ("avx512-bf16", "avx512", "avx2") or (
        one_scale(weight) and set_of_instructions not in ("generic", "neon")
    )


def one_scale(weight: Quantised) -> bool:
    """Whether they are integers of eight bits with one scale for an output."""
    whole = weight.group == weight.shape[1] and weight.offsets is None
    return weight.kind == "int8" and whole


def integer_product(
    x: torch.Tensor, weight: Quantised, grouped: bool | None = None
) -> torch.Tensor:
    """That product, float32, as src/byte_rows.h has it or, if `grouped` (None: unless there is
    `one_scale`), src/group_products.h: sums are exact, and what is rounded is rounded in its
    order."""
    most = torch.tensor(127.0 * 256 + 127)
    largest = x.float().abs().amax(1, keepdim=True)
    steps = torch.where(largest > 0, most / largest, 0)
    numbers = torch.round(x.float() * steps).double()
    high = ((numbers + 128) / 256).floor()
    codes = numbers_of(weight).double().T
    scales = of_groups(weight.scales, weight.units)
    if grouped is None:
        grouped = not one_scale(weight)
    if not grouped:
        sums = [(part @ codes).float() for part in (high, numbers - 256 * high)]
        return (sums[0] * 256 + sums[1]) * (largest / most) * scales.T
    y = torch.zeros(len(x), len(weight.values))

    def add(sums: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """y + sums * factors, rounded once."""
        return (y.double() + sums.float().double() * factors.double()).float()

    for group, inputs in enumerate(torch.arange(x.shape[1]).split(weight.group)):
        for some in inputs.split(512):
            y = add(numbers[:, some] @ codes[some], scales[:, group])
        if weight.offsets is not None:
            offsets = of_groups(weight.offsets, weight.offset_units)
            y = add(numbers[:, inputs].sum(1, keepdim=True), offsets[:, group])
    return y * (largest / most)


def of_groups(scales: torch.Tensor, units: torch.Tensor | None) -> torch.Tensor:
    """float32 [outputs, groups]."""
    if units is None:
        return scales.float()
    return scales * units.float().repeat_interleave(scales.shape[1] // units.shape[1], 1)


def numbers_of(weight: Quantised) -> torch.Tensor:
    """What codes stand for, without their scales, float32 [outputs, inputs]."""
    stored = weight.values.view(torch.uint8)
    if stored.shape != weight.shape:
        stored = torch.stack((stored & 15, stored >> 4), -1).flatten(1)
    table = [number(weight.kind, code) for code in range(int(stored.max()) + 1)]
    return torch.tensor(table)[stored.long()]


def number(codes: str, code: int) -> float:
    """What a code stands for, by its format's definition."""
    if codes == "int8":
        return code - 256 if code > 127 else code
    if codes == "int4":
        return code - 16 if code > 7 else code
    if codes == "uint4":
        return code
    if codes == "nl4":  # kvalues_iq4nl of ggml-common.h
        return (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)[code]
    exponent_bits, bias = (4, 7) if codes == "fp8_e4m3" else (2, 1)
    mantissa_bits = 3 if codes == "fp8_e4m3" else 1
    width = exponent_bits + mantissa_bits
    sign = -1.0 if code >> width else 1.0
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias)
    return sign * (1 + mantissa) * 2.0 ** (exponent - bias)


def meaning(weight: Quantised) -> np.ndarray:
    """W, float32 [outputs, inputs], number by number."""
    outputs, inputs = weight.shape
    stored = weight.values.view(torch.uint8).numpy()
    scales, units = _numbers(weight.scales), _numbers(weight.units)
    offsets, offset_units = _numbers(weight.offsets), _numbers(weight.offset_units)
    found = np.empty((outputs, inputs), np.float32)
    for o, i in np.ndindex(outputs, inputs):
        code = int(stored[o, i * stored.shape[1] // inputs])
        if stored.shape[1] < inputs:
            code = code >> 4 * (i % 2) & 15
        group = i // weight.group
        value = np.float32(number(weight.kind, code)) * _scale(scales, units, o, group)
        if offsets is not None:
            value = value + _scale(offsets, offset_units, o, group)
        found[o, i if weight.order is None else int(weight.order[i])] = value
    return found


def _numbers(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.float().numpy()


def _scale(
    scales: np.ndarray | None, units: np.ndarray | None, output: int, group: int
) -> np.float32:
    assert scales is not None
    found = np.float32(scales[output, group])
    if units is None:
        return found
    return found * np.float32(units[output, group * units.shape[1] // scales.shape[1]])
