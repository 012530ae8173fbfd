"""Gated activations of the MLP in one pass, 3 * I elements per token: `reference/layers.py`.

Computed in float32 and rounded where the reference rounds: the activation, then the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rootlace.kernels.triton.numerics import TYPE_NAMES, architecture, round_to
from rootlace.kernels.triton.tuning import settings
from rootlace.kernels.triton.variants import Variant


@triton.jit
def silu(gate):
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def gelu_tanh(gate):
    """gate / 2 * (1 + tanh(z)) = gate / (1 + exp(-2 z)), z = sqrt(2 / pi) (gate + 0.044715 gate^3).

    Where the exponential overflows, the quotient is the limit, zero.
    """
    double_z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-double_z))


@triton.jit
def gated_kernel(gate_up_ptr, out_ptr, width, stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = gate_up_ptr + row * stride + column
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + width, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = round_to(gelu_tanh(wide) if GELU else silu(wide), gate.dtype)
    product = round_to(activated.to(tl.float32) * up.to(tl.float32), gate.dtype)
    tl.store(out_ptr + row * width + column, product, mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]."""
    return _gated(gate_up, gelu=False)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]. The approximation by tanh, as Gemma has it."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), device=gate_up.device, dtype=gate_up.dtype)
    if out.numel():
        launch = settings("gated", architecture(gate_up.device))
        block = launch.blocks["BLOCK"]
        gated_kernel[(tokens, triton.cdiv(width, block))](
            gate_up,
            out,
            width,
            gate_up.stride(0),
            GELU=gelu,
            BLOCK=block,
            num_warps=launch.num_warps,
        )
    return out


def variants(arch: int) -> list[Variant]:
    """Both activations; widths that are multiples of 16 are read in vectors, others are not."""
    launch = settings("gated", arch)
    arrays, sizes = ("gate_up_ptr", "out_ptr"), ("width", "stride")
    return [
        Variant(
            f"{'gelu' if gelu else 'silu'}, {TYPE_NAMES[dtype]}{'' if even else ', odd width'}",
            gated_kernel,
            {
                **dict.fromkeys(arrays, f"*{TYPE_NAMES[dtype]}"),
                **dict.fromkeys(sizes, "i32"),
                "GELU": "constexpr",
                "BLOCK": "constexpr",
            },
            {"GELU": gelu, "BLOCK": launch.blocks["BLOCK"]},
            (*arrays, *sizes) if even else arrays,
            num_warps=launch.num_warps,
        )
        for dtype, gelu, even in (
            (torch.bfloat16, False, True),
            (torch.bfloat16, True, True),
            (torch.float32, False, True),
            (torch.bfloat16, False, False),
        )
    ]
