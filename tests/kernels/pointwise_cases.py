"""Checks of the kernels around attention, for any device and any set of kernels.

Run on small shapes by Triton's interpreter and on real ones by a GPU (`tests/kernels/triton`,
`tests/gpu`). Each compares with the formula in float64 and with the reference; outputs are made in
poisoned memory, inputs must stay as they were.
"""

from functools import partial

import msgspec
import torch

from rootlace.kernels.interface import KernelSet, KVCodes, KVScales, slot_bytes
from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.reference.kv_cache import dequantise
from tests.kernels.cases import FP8, poisoned_memory

EXACT = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative and absolute distance from float64: a few roundings."""
LAST_PLACE = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Relative distance of two results that were rounded differently once."""


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def within_view(values: torch.Tensor) -> torch.Tensor:
    """The same values [..., H] as a view into a wider tensor full of NaN."""
    *front, width = values.shape
    wide = values.new_full((*front, width + 24), float("nan"))
    wide[..., 8 : 8 + width] = values
    return wide[..., 8 : 8 + width]


def close(found: torch.Tensor, exact: torch.Tensor, reference: torch.Tensor) -> None:
    """`found` is right to its dtype's precision, and the reference but for a last place."""
    assert found.dtype == reference.dtype
    assert found.shape == reference.shape
    tolerance = EXACT[found.dtype]
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
    last = 2 * LAST_PLACE[found.dtype]
    torch.testing.assert_close(found, reference, rtol=last, atol=last)


def rms_norm_exactly(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def check_rms_norm(
    kernels: KernelSet, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    eps = 1e-5
    x = within_view(normal(*shape, dtype=dtype, device=device) * 3)
    weight = normal(shape[-1], dtype=dtype, device=device, seed=1)
    kept = x.clone()
    with poisoned_memory():
        out = kernels.rms_norm(x, weight, eps)
    close(out, rms_norm_exactly(x, weight, eps), REFERENCE.rms_norm(x, weight, eps))
    assert torch.equal(x, kept)


def check_add_rms_norm(
    kernels: KernelSet, device: torch.device, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """The sum is the reference's bit for bit, so that residual streams agree."""
    eps = 1e-5
    x = within_view(normal(*shape, dtype=dtype, device=device))
    residual = normal(*shape, dtype=dtype, device=device, seed=1) * 2
    weight = normal(shape[-1], dtype=dtype, device=device, seed=2)
    kept = x.clone(), residual.clone()
    with poisoned_memory():
        out, total = kernels.add_rms_norm(x, residual, weight, eps)
    expected, expected_total = REFERENCE.add_rms_norm(x, residual, weight, eps)
    assert torch.equal(total, expected_total)
    close(out, rms_norm_exactly(total, weight, eps), expected)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def check_gated(
    kernels: KernelSet, device: torch.device, tokens: int, width: int, dtype: torch.dtype
) -> None:
    gate_up = normal(tokens, 2 * width, dtype=dtype, device=device) * 3
    if tokens:
        far = torch.tensor([0.0, -0.0, 30.0, -30.0, 1000.0, -1000.0, -88.0, 9.0])
        gate_up[0, : min(8, width)] = far[: min(8, width)].to(gate_up)
    gate_up = within_view(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = {
        "silu_mul": torch.nn.functional.silu(gate) * up,
        "gelu_mul": torch.nn.functional.gelu(gate, approximate="tanh") * up,
    }
    for name, expected in exact.items():
        with poisoned_memory():
            found = getattr(kernels, name)(gate_up)
        close(found, expected, getattr(REFERENCE, name)(gate_up))


def check_embedding(
    kernels: KernelSet, device: torch.device, shape: tuple[int, int], tokens: int
) -> None:
    weight = within_view(normal(*shape, dtype=torch.bfloat16, device=device))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape[0], (tokens,), generator=generator).to(device)
    for kind in (torch.int64, torch.int32):
        with poisoned_memory():
            found = kernels.embedding(weight, ids.to(kind))
        assert torch.equal(found, weight[ids])


def check_copy_slots(
    kernels: KernelSet,
    device: torch.device,
    shape: tuple[int, int, int, int, int],
    copies: int,
    dtype: torch.dtype,
) -> None:
    """Cache [L, B, S, N, D]: the copies arrive, everything else stays, NaN included."""
    slots = shape[1] * shape[2]
    # Not negative, so that they are bytes, too.
    cache = (normal(*shape, dtype=torch.float32, device=device).abs() * 40).to(dtype)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randperm(slots, generator=generator)[: 2 * copies].to(device)
    source, target = chosen[:copies], chosen[copies:]
    bits = cache.view(torch.uint8)
    expected = bits.clone().flatten(1, 2)
    expected[:, target] = expected[:, source]
    kernels.copy_slots(cache, source, target)
    assert torch.equal(bits.flatten(1, 2), expected)


class RopeCase(msgspec.Struct, frozen=True):
    """Input of rotation and writing: `duplicates` tokens are also written to a second slot."""

    tokens: int = 5
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    dtype: torch.dtype = torch.bfloat16
    norm: bool = False
    fp8: bool = False
    bits: int = 0
    duplicates: int = 0
    block_size: int = 16


def mixing(dim: int, device: torch.device) -> torch.Tensor:
    """The matrix by which queries and keys are mixed for integers, from its definition:
    entries of Hadamard's are -1 where the places have an odd number of binary digits in common."""
    half = dim // 2
    width = next(1 << power for power in range(10, -1, -1) if half % (1 << power) == 0)
    matrix = torch.zeros((dim, dim), dtype=torch.float64)
    for i in range(dim):
        for j in range(dim):
            if i % half // width == j % half // width:
                digits = (i % half % width) & (j % half % width)
                odd = digits.bit_count() + (i >= half and j >= half)
                matrix[i, j] = (-1) ** odd / (2 * width) ** 0.5
    return matrix.to(device)


def check_rope_and_write(kernels: KernelSet, device: torch.device, case: RopeCase) -> None:
    """Queries and stored keys and values; every other byte of the cache stays."""
    q_heads, kv_heads = case.heads
    dim, count, dtype = case.head_dim, case.tokens, case.dtype
    fused = within_view(
        normal(count, (q_heads + 2 * kv_heads) * dim, dtype=dtype, device=device) * 2
    )
    qkv = fused.view(count, q_heads + 2 * kv_heads, dim)
    kept = qkv.clone()
    angle = normal(count, dim // 2, dtype=torch.float64, device=device, seed=1) * 3
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    norms = {
        "q_norm": normal(dim, dtype=dtype, device=device, seed=2),
        "k_norm": normal(dim, dtype=dtype, device=device, seed=3),
    }
    options = {**norms, "eps": 1e-6} if case.norm else {}
    if case.fp8:
        # The smallest scale lets keys and values saturate.
        scale = torch.linspace(0.002, 0.05, kv_heads, device=device)
        options["scales"] = KVScales(k=scale, v=scale.flip(0) * 0.7)  # type: ignore[assignment]

    if case.bits:
        options["scales"] = KVCodes(case.bits, kv_heads)  # type: ignore[assignment]

    generator = torch.Generator().manual_seed(4)
    writes = count + case.duplicates
    blocks = -(-writes // case.block_size) + 2
    slots = torch.randperm(blocks * case.block_size, generator=generator)[:writes].to(device)
    tokens = None
    if case.duplicates:
        again = torch.randint(0, count, (case.duplicates,), generator=generator)
        tokens = torch.cat((torch.arange(count), again)).to(device)

    row = (kv_heads, dim)
    if case.bits:
        row = (1, slot_bytes(case.bits, *row))
    shape = (2, blocks, case.block_size, *row)
    poison = torch.full(shape, float("nan"), device=device).to(FP8 if case.fp8 else dtype)
    if case.bits:
        # What nobody reads of a slot is 0 in the reference.
        poison = torch.zeros(shape, dtype=torch.uint8, device=device)
    cache, expected = poison.clone(), poison.clone()
    with poisoned_memory():
        q = kernels.rope_and_write(qkv, cos, sin, cache[0], cache[1], slots, tokens, **options)
    expected_q = REFERENCE.rope_and_write(
        qkv, cos, sin, expected[0], expected[1], slots, tokens, **options
    )
    assert torch.equal(qkv, kept)

    parts = qkv.split((q_heads, kv_heads, kv_heads), dim=1)
    exact = []
    for part, norm in zip(parts[:2], norms.values(), strict=True):
        wide = rms_norm_exactly(part, norm, 1e-6) if case.norm else part.double()
        pairs = torch.complex(*wide.chunk(2, dim=-1))
        turned = pairs * torch.complex(cos.double(), sin.double()).unsqueeze(1)
        wide = torch.cat((turned.real, turned.imag), dim=-1)
        exact.append(wide @ mixing(dim, device) if case.bits else wide)
    close(q, exact[0], expected_q)

    written = torch.zeros(blocks * case.block_size, dtype=torch.bool, device=device)
    written[slots] = True
    flat, flat_expected, flat_poison = (
        tensor.view(2, -1, *row) for tensor in (cache, expected, poison)
    )
    untouched = flat.view(torch.uint8)[:, ~written]
    assert torch.equal(untouched, flat_poison.view(torch.uint8)[:, ~written])
    if not case.norm and (dtype != torch.float32 or device.type == "cpu"):
        # Without a sum there is no order of summation: the same bits, but for fused float32.
        assert torch.equal(q, expected_q)
        assert torch.equal(
            flat.view(torch.uint8)[:, written], flat_expected.view(torch.uint8)[:, written]
        )
    source = torch.arange(count, device=device) if tokens is None else tokens
    if case.bits:
        parts_of = partial(dequantise, bits=case.bits, heads=kv_heads, dim=dim, dtype=dtype)
        found, wanted = (parts_of(one[0, slots, 0]) for one in (flat, flat_expected))
        # A key that is rounded otherwise may get another code.
        step = (exact[1].max() - exact[1].min()) / 2**case.bits
        assert (found.double() - wanted.double()).abs().max() <= 1.1 * step
        assert torch.equal(flat[1, slots], flat_expected[1, slots])
    elif case.fp8:
        _check_stored(flat, options["scales"], slots, (exact[1][source], parts[2][source]), dtype)  # type: ignore[arg-type]
    else:
        close(flat[0, slots], exact[1][source], flat_expected[0, slots])
        assert torch.equal(flat[1, slots], parts[2][source])


def _check_stored(
    cache: torch.Tensor,
    scales: KVScales,
    slots: torch.Tensor,
    exact: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Check that the value read back, code * scale, is within half a step of e4m3 (3 bits)."""
    for stored, scale, values in zip(cache, (scales.k, scales.v), exact, strict=True):
        unit = scale.double().unsqueeze(1)
        code = stored[slots].double()
        ratio = (values.double() / unit).clamp(-448, 448)
        step = torch.maximum(ratio.abs() * 2.0**-4, torch.full_like(ratio, 2.0**-10))
        rounding = EXACT[dtype] * (ratio.abs() + 1 / unit)
        assert ((code - ratio).abs() <= step + rounding).all()
