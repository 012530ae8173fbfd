"""Products with quantised weights of every code: time of a step, and time to read the codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks.gpu.setting import Findings, Setting
from benchmarks.gpu.timing import OURS, time_rates
from rootlace.kernels.interface import KernelSet
from rootlace.kernels.reference.layers import INT4, quantise
from rootlace.kernels.weights import Dense, Quantised, Scheme, tensors

SHAPE = (28672, 4096)
"""Outputs and inputs: the gate and up of an 8B model, more bytes than a cache holds in any code."""
ROWS = (1, 16, 64, 256)
"""Of steps that the kernel takes, and of one for which matrices are made dense."""


def measure(setting: Setting, findings: Findings) -> None:
    """Measure products. Bytes: codes and scales, activations and results, each once."""
    shape, device = (32, 256) if setting.smoke else SHAPE, setting.device
    for codes, make in weights_of(*shape, device).items():
        weight = make()
        for rows in setting.choose(ROWS, (1, 16), (2,)):
            x = torch.randn((rows, shape[1]), device=device).to(torch.bfloat16)
            moved = sum(part.nbytes for part in tensors(weight))
            moved += x.nbytes + rows * shape[0] * x.itemsize
            with findings.attempt(codes=codes, rows=rows, bytes=moved) as case:
                makers = {OURS: partial(product, x, weight, setting.kernels)}
                case |= time_rates(setting, makers, moved, "bytes_per_second", "copy_bandwidth")


def product(
    x: torch.Tensor, weight: Dense | Quantised, kernels: KernelSet
) -> Callable[[], torch.Tensor]:
    return lambda: kernels.linear(x, weight)


def weights_of(
    outputs: int, inputs: int, device: torch.device
) -> Mapping[str, Callable[[], Dense | Quantised]]:
    """Return weights in the forms of checkpoints and GGUF files, made on request."""

    def matrix() -> torch.Tensor:
        return torch.randn((outputs, inputs), device=device).to(torch.bfloat16)

    def filled(value: float, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((outputs, columns), value, dtype=dtype, device=device)

    def halves() -> torch.Tensor:
        size = (outputs, inputs // 2)
        return torch.randint(0, 256, size, device=device, dtype=torch.uint8)

    def nested() -> Quantised:
        size = (2, outputs, inputs // 32)
        scales, offsets = torch.randint(1, 64, size, device=device, dtype=torch.uint8)
        units = filled(0.01, inputs // 256, torch.float16)
        scheme = Scheme("uint4", 32, offsets=True)
        return Quantised(scheme, halves(), scales, offsets, units=units, offset_units=-units)

    def in_groups(codes: Scheme, dtype: torch.dtype) -> Quantised:
        return Quantised(codes, halves(), filled(0.01, inputs // (codes.group or inputs), dtype))

    def floats() -> Quantised:
        values = matrix().to(torch.float8_e4m3fn)
        return Quantised(Scheme("fp8_e4m3"), values, filled(0.01, 1, torch.float32))

    return {
        "bfloat16": lambda: Dense(matrix()),
        "int8": lambda: quantise(matrix(), Scheme("int8")),
        "int4": lambda: quantise(matrix(), INT4),
        "int4 in groups of 128": partial(in_groups, Scheme("int4", 128), torch.bfloat16),
        "uint4 with units": nested,
        "fp8_e4m3": floats,
        "e2m1": partial(in_groups, Scheme("e2m1", 32), torch.float32),
        "nl4": partial(in_groups, Scheme("nl4", 32), torch.float16),
    }
