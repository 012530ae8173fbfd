"""Keys and values as integers: what is stored, byte by byte, and how far off it is in float64."""

from __future__ import annotations

import struct

import pytest
import torch

from rootlace.kernels.reference.kv_cache import ALIGNMENT, dequantise, quantise, slot_bytes


def bfloat16(low: int, high: int) -> float:
    return float(struct.unpack("<f", bytes((0, 0, low, high)))[0])


def read_by_hand(row: list[int], bits: int, heads: int, dim: int) -> list[list[tuple[float, ...]]]:
    """(code, scale, offset) of each number of each head, from a slot's bytes."""
    width = dim * bits // 8
    found = []
    for head in range(heads):
        codes = row[head * width : (head + 1) * width]
        if bits == 4:
            codes = [byte % 16 for byte in codes] + [byte // 16 for byte in codes]
        at = -(-heads * width // 4) * 4 + 4 * head
        pair = bfloat16(*row[at : at + 2]), bfloat16(*row[at + 2 : at + 4])
        found.append([(float(code), *pair) for code in codes])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "heads", "dim"), [(8, 3, 6), (8, 1, 64), (4, 3, 10), (4, 2, 32)])
def test_numbers_are_within_half_a_step(
    bits: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn((40, heads, dim), generator=generator)
    x *= 10.0 ** torch.randint(-25, 25, (40, heads, 1), generator=generator)
    x[1] += 100.0  # offsets count
    x[2] -= 1000.0
    x[3] = -7.3  # one number, which is not one of bfloat16
    x[4] = 0.0
    x = x.to(dtype)
    stored = quantise(x, bits)
    assert stored.shape == (40, slot_bytes(bits, heads, dim))
    assert stored.shape[1] % ALIGNMENT == 0
    assert stored.shape[1] - heads * (dim * bits // 8 + 4) < ALIGNMENT + 4
    read = dequantise(stored, bits, heads, dim, torch.float32)
    for row, numbers, exact in zip(
        stored.tolist(), read.tolist(), x.double().tolist(), strict=True
    ):
        parts = zip(read_by_hand(row, bits, heads, dim), numbers, exact, strict=True)
        for by_hand, found, wanted in parts:
            low, spread = min(wanted), max(wanted) - min(wanted)
            for (code, scale, offset), number, value in zip(by_hand, found, wanted, strict=True):
                # Only the sum is rounded, to float32.
                assert number == pytest.approx(code * scale + offset, rel=2**-23, abs=0)
                last_place = 2**-22 * (abs(value) + abs(low))
                assert abs(number - value) <= scale / 2 * (1 + 1e-5) + last_place
                assert offset <= low and low - offset <= abs(low) / 128
                assert scale * (2**bits - 1) <= (spread + abs(low) / 128) * (1 + 2**-6)
    narrow = dequantise(stored, bits, heads, dim, torch.bfloat16)
    assert torch.equal(narrow, read.to(torch.bfloat16))


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_not_finite_stays_in_its_head(bits: int) -> None:
    x = torch.randn((3, 2, 8), generator=torch.Generator().manual_seed(0))
    whole = dequantise(quantise(x, bits), bits, 2, 8, torch.float32)
    for row, strange in enumerate((float("nan"), float("inf"), -float("inf"))):
        x[row, 1, 3] = strange
    read = dequantise(quantise(x, bits), bits, 2, 8, torch.float32)
    assert torch.equal(read[:, 0], whole[:, 0])
    assert read[:, 1].isnan().all()


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_whose_difference_is_no_float32(bits: int) -> None:
    x = torch.tensor([[[3e38, -3e38, 1.0, 0.0], [1e38, -1e38, 1.0, 0.0]]])
    read = dequantise(quantise(x, bits), bits, 2, 4, torch.float32)
    assert read[0, 0].isnan().all() and read[0, 1].isfinite().all()
