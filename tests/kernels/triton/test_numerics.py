"""8-bit floats for every byte and every tie, and products of matrices, interpreted."""

import pytest
import torch
import triton
import triton.language as tl

from rootlace.kernels.triton.launching import (
    as_bits,
    dot,
    from_e4m3,
    native_e4m3,
    padded,
    round_to,
    tanh,
    to_e4m3,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = torch.float8_e4m3fn
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")


@triton.jit
def decode_kernel(bits_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    bits = tl.load(bits_ptr + index)
    tl.store(out_ptr + index, from_e4m3(bits, out_ptr.dtype.element_ty, False))


@triton.jit
def encode_kernel(x_ptr, bits_ptr, count, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    x = tl.load(x_ptr + index, mask=index < count, other=0.0)
    tl.store(bits_ptr + index, to_e4m3(x), mask=index < count)


@triton.jit
def round_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    x = tl.load(x_ptr + index)
    tl.store(out_ptr + index, round_to(x, out_ptr.dtype.element_ty))


@triton.jit
def tanh_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, tanh(tl.load(x_ptr + index)))


@triton.jit
def dot_kernel(a_ptr, b_ptr, acc_ptr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = dot(tl.load(a_ptr + place), tl.load(b_ptr + place), tl.load(acc_ptr + place))
    tl.store(acc_ptr + place, product)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_byte_is_read_exactly(dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    found = torch.full((256,), 7.0, dtype=dtype, device=DEVICE)
    decode_kernel[(1,)](bits, found, SIZE=256)
    expected = bits.view(FP8).to(dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found[128].item() == 0
    assert torch.signbit(found[128])


def test_values_are_written_to_nearest() -> None:
    """All values of e4m3, all ties between neighbours and the numbers beside the ties."""
    values = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    ties = (values[1:] + values[:-1]) / 2
    above = torch.nextafter(ties, torch.tensor(1e9))
    below = torch.nextafter(ties, torch.tensor(0.0))
    far = torch.tensor([449.0, 464.0, 1e30, float("inf"), float("nan"), 1e-40, 2.0**-10, 1e-3])
    positive = torch.cat((values, ties, above, below, far))
    random = torch.randn(500, generator=torch.Generator().manual_seed(0)).mul_(5).exp_()
    x = torch.cat((positive, -positive, random)).to(DEVICE)
    found = torch.zeros(len(x), dtype=torch.uint8, device=DEVICE)
    encode_kernel[(1,)](x, found, len(x), SIZE=padded(len(x)))
    expected = x.clamp(-448, 448).to(FP8)
    number = ~x.isnan()
    assert torch.equal(found[number], expected.view(torch.uint8)[number])
    assert found.view(FP8).float()[~number].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_to(dtype: torch.dtype) -> None:
    """Ties to even; a carry into the exponent; what is not finite."""
    x = torch.randn(512, generator=torch.Generator().manual_seed(0))
    special = [1.99999, 255.9, 1.00390625, 1.01171875, 3.4e38, torch.inf, torch.nan, -0.0, 0.0]
    x[: len(special)] = torch.tensor(special)
    found = torch.zeros(512, dtype=dtype, device=DEVICE)
    round_kernel[(1,)](x.to(DEVICE), found, SIZE=512)
    torch.testing.assert_close(found.cpu(), x.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_tanh() -> None:
    x = torch.cat((torch.linspace(-20, 20, 252), torch.tensor([-1e30, 1e30, 1e-6, 0.0])))
    x = x.to(DEVICE)
    found = torch.full_like(x, float("nan"))
    tanh_kernel[(1,)](x, found, SIZE=256)
    torch.testing.assert_close(found.double(), x.double().tanh(), rtol=0, atol=3e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dot(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).to(dtype).to(DEVICE) for _ in range(2))
    acc = torch.randn(16, 16, generator=generator).to(DEVICE)
    expected = acc.double() + a.double() @ b.double()
    dot_kernel[(1,)](a, b, acc, SIZE=16)
    torch.testing.assert_close(acc.double(), expected, rtol=2e-6, atol=2e-6)


def test_host_side() -> None:
    assert [padded(size) for size in (1, 2, 3, 80, 128)] == [1, 2, 4, 128, 128]
    assert padded(3, 16) == 16
    assert [arch for arch in (80, 86, 89, 90, 100) if native_e4m3(arch)] == [89, 90, 100]
    plain = torch.zeros(4, dtype=torch.bfloat16)
    assert as_bits(plain) is plain
    assert as_bits(plain.to(FP8)).dtype == torch.uint8
