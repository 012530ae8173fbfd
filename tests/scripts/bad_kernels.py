"""Kernels with faults that `scripts/compile_kernels.py` must find, and one without."""

import torch
import triton
import triton.language as tl

from scripts.kernel_launches import Variant

SIZE = 4096
ARRAYS = {"x_ptr": "*fp32", "out_ptr": "*fp32", "SIZE": "constexpr"}


@triton.jit
def good_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, tl.load(x_ptr + index) + 1.0)


@triton.jit
def spilling_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    """Holds 384 numbers per thread across a sum over all of them."""
    index = tl.arange(0, SIZE)
    x = tl.load(x_ptr + index)
    y = tl.load(x_ptr + SIZE + index)
    z = tl.load(x_ptr + 2 * SIZE + index)
    total = tl.sum(x * y + z, 0)
    tl.store(out_ptr + index, x * total + y * z)


@triton.jit
def misspelled_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, tl.load(x_ptr + indx))  # noqa: F821


@triton.jit
def product_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    """A product in exact float32, which the matrix units do not do."""
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + place)
    tl.store(out_ptr + place, tl.dot(x, x, input_precision="ieee"))


@triton.jit
def greedy_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    """Operands that wait in shared memory: more of them than there is."""
    row = tl.arange(0, 64)[:, None] * SIZE
    column = tl.arange(0, 64)[None, :]
    acc = tl.zeros([64, 64], tl.float32)
    for start in tl.range(0, SIZE, 64, num_stages=20):
        x = tl.load(x_ptr + row + start + column).to(tl.bfloat16)
        y = tl.load(x_ptr + SIZE * 64 + row + start + column).to(tl.bfloat16)
        acc = tl.dot(x, y, acc)
    tl.store(out_ptr + tl.arange(0, 64)[:, None] * 64 + column, acc)


@triton.jit
def forgotten_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, tl.load(x_ptr + index))


def launch(x: torch.Tensor, out: torch.Tensor) -> None:
    """Only the forgotten kernel is launched without a variant."""
    good_kernel[(1,)](x, out, SIZE=256)
    forgotten_kernel[(1,)](x, out, SIZE=256)


def variants(arch: int) -> list[Variant]:
    return [
        Variant("fine", good_kernel, ARRAYS, {"SIZE": 256}, ("x_ptr", "out_ptr")),
        Variant("spills", spilling_kernel, ARRAYS, {"SIZE": SIZE}, num_warps=1),
        Variant("does not compile", misspelled_kernel, ARRAYS, {"SIZE": SIZE}),
        Variant("no units", product_kernel, ARRAYS, {"SIZE": 32}, matrix_units=True),
        Variant("shared memory", greedy_kernel, ARRAYS, {"SIZE": 4096}, ("x_ptr",), num_warps=4),
    ]
