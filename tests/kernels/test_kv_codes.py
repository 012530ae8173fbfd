"""Keys and values as integers: what is stored, byte by byte, and how far off it is in float64."""

import struct

import pytest
import torch

from rootlace.kernels.interface import ALIGNMENT, slot_bytes
from rootlace.kernels.reference.kv_cache import (
    dequantise,
    mixed,
    quantise,
)
from tests.kernels.pointwise_cases import mixing


def bfloat16(low: int, high: int) -> float:
    return float(struct.unpack("<f", bytes((0, 0, low, high)))[0])


def group_of(number: int, bits: int, dim: int) -> int:
    """Return the group of a head's number: with 4 bits, 16 neighbours and the 16 numbers D / 2
    further."""
    return 0 if bits == 8 else number % (dim // 2) // 16


def read_by_hand(row: list[int], bits: int, heads: int, dim: int) -> list[list[tuple[float, ...]]]:
    """(code, scale, offset) of each number of each head, from a slot's bytes."""
    width, groups = dim * bits // 8, group_of(dim // 2 - 1, bits, dim) + 1
    found = []
    for head in range(heads):
        codes = row[head * width : (head + 1) * width]
        if bits == 4:
            codes = [byte % 16 for byte in codes] + [byte // 16 for byte in codes]
        at = -(-heads * width // 4) * 4 + 4 * head * groups
        words = [row[at + 4 * group : at + 4 * group + 4] for group in range(groups)]
        pairs = [(bfloat16(*word[:2]), bfloat16(*word[2:])) for word in words]
        found.append(
            [(float(code), *pairs[group_of(i, bits, dim)]) for i, code in enumerate(codes)]
        )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("bits", "heads", "dim"),
    [(8, 3, 6), (8, 1, 64), (4, 3, 10), (4, 2, 32), (4, 2, 64), (4, 1, 80), (4, 1, 256)],
)
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
    words = 4 if bits == 8 else 4 * -(-dim // 32)
    assert stored.shape[1] - heads * (dim * bits // 8 + words) < ALIGNMENT + 4
    read = dequantise(stored, bits, heads, dim, torch.float32)
    for row, numbers, exact in zip(
        stored.tolist(), read.tolist(), x.double().tolist(), strict=True
    ):
        parts = zip(read_by_hand(row, bits, heads, dim), numbers, exact, strict=True)
        for by_hand, found, wanted in parts:
            own = [group_of(i, bits, dim) for i in range(dim)]
            for i, (code, scale, offset) in enumerate(by_hand):
                number, value = found[i], wanted[i]
                group = [other for at, other in zip(own, wanted, strict=True) if at == own[i]]
                low, spread = min(group), max(group) - min(group)
                # Only the sum is rounded, to float32.
                assert number == pytest.approx(code * scale + offset, rel=2**-23, abs=0)
                last_place = 2**-22 * (abs(value) + abs(low))
                assert abs(number - value) <= scale / 2 * (1 + 1e-5) + last_place
                assert offset <= low and low - offset <= abs(low) / 128
                assert scale * (2**bits - 1) <= (spread + abs(low) / 128) * (1 + 2**-6)
    narrow = dequantise(stored, bits, heads, dim, torch.bfloat16)
    assert torch.equal(narrow, read.to(torch.bfloat16))


@pytest.mark.parametrize("dim", [2, 10, 64, 80, 256])
def test_mixed_queries_and_keys_have_the_same_products(dim: int) -> None:
    q, k = torch.randn((2, 7, 3, dim), generator=torch.Generator().manual_seed(dim))
    both = [mixed(part).double() for part in (q, k)]
    matrix = mixing(dim, torch.device("cpu"))
    for found, part in zip(both, (q, k), strict=True):
        torch.testing.assert_close(found, part.double() @ matrix, rtol=0, atol=2e-6)
    products = (q.double() * k.double()).sum(2)
    torch.testing.assert_close((both[0] * both[1]).sum(2), products, rtol=0, atol=1e-4)
    assert torch.equal(mixed(q.bfloat16()), mixed(q.bfloat16().float()).bfloat16())


def test_a_channel_that_is_large_costs_little() -> None:
    """Of keys, in all tokens: the error of products is far less than without mixing, and than with
    one scale for a head it was."""
    q, k = torch.randn((2, 200, 1, 128), generator=torch.Generator().manual_seed(0))
    k[..., 20] += 40.0
    k[..., 101] -= 25.0

    def error(queries: torch.Tensor, keys: torch.Tensor) -> float:
        read = dequantise(quantise(keys, 4), 4, 1, 128, torch.float32)
        exact = queries.double() @ keys.double().transpose(1, 2)
        return float((queries.double() @ read.double().transpose(1, 2) - exact).square().mean())

    whole = (k.amax(2) - k.amin(2)).square().mean() / 15**2 / 12 * 128  # steps of a whole head
    assert error(mixed(q), mixed(k)) < 0.5 * error(q, k) < 0.5 * float(whole)


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
