"""Launch settings of a kernel on an architecture, from small committed tables.

A server tries out nothing at its start. A measurement on an architecture (`python -m benchmarks.gpu
--tune`) writes its table, such as `tuned/sm_90.json`, or a person does. An architecture without a
table takes `tuned/default.json`, whose entries fit every GPU from compute capability 8.0 on (99 KiB
of shared memory). One file:

    {
      "measured": {"gpu": "NVIDIA H200", "triton": "3.6.0", "date": "2026-11-21"} or null,
      "kernels": {
        "decode_attention": [
          {"when": {"head_dim": {"most": 64}}, "blocks": {"BLOCK_N": 128},
           "num_warps": 4, "num_stages": 3},
          {"when": {"dtype": "bf16", "fp8": true}, "blocks": {"BLOCK_N": 64},
           "num_warps": 4, "num_stages": 4},
          {"when": {}, "blocks": {"BLOCK_N": 64}, "num_warps": 4, "num_stages": 3}
        ]
      }
    }

`measured` is null for a table without a measurement. The first entry of a kernel whose conditions
all hold is taken. A condition is a value that the key must equal, or `{"most": n}`, an upper bound.
The last entry has no condition, so every case has an entry. Each kernel defines its keys (at its
call of `settings`). All entries of a kernel name the same blocks, in every table.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
import triton
import triton.language as tl

# Tuning -------------------------------------------------------------------------------------------


TABLES = Path(__file__).parent / "tuned"
DEFAULT = "default"

Key = int | str | bool


class Launch(msgspec.Struct, frozen=True):
    """Launch of a kernel: sizes of its blocks by parameter, and compile options."""

    blocks: Mapping[str, int]
    num_warps: int
    num_stages: int


@functools.cache
def settings(kernel: str, arch: int, **key: Key) -> Launch:
    """Return the launch of `kernel` on compute capability `arch` (90 for 9.0) for a case. Raises
    KeyError if no table has the kernel."""
    table = _table(arch)
    if kernel not in table:
        table = _table(0)
    for entry in table[kernel]:
        if all(_holds(key, name, wanted) for name, wanted in entry["when"].items()):
            blocks = MappingProxyType(dict(entry["blocks"]))
            return Launch(blocks, entry["num_warps"], entry["num_stages"])
    raise KeyError(f"no entry of {kernel} for {key}: its last one must have no condition")


def forget() -> None:
    """Drop the cached tables, so that the next use reads tables written since."""
    settings.cache_clear()
    _table.cache_clear()


@functools.cache
def _table(arch: int) -> dict[str, list[dict[str, Any]]]:
    path = TABLES / f"sm_{arch}.json"
    if not path.exists():
        path = TABLES / f"{DEFAULT}.json"
    kernels: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())["kernels"]
    return kernels


def _holds(key: Mapping[str, Key], name: str, wanted: Any) -> bool:
    value = key[name]
    if isinstance(wanted, dict):
        return isinstance(value, int) and value <= int(wanted["most"])
    return bool(value == wanted)


# Helpers of all kernels: matrix products, 8-bit floats, the device's architecture, padding.
#
# Triton decides at a kernel's definition whether to compile or to interpret it. `INTERPRET` holds
# that decision, for operations that the interpreter computes differently.
#
# Kernels take an fp8 cache as bytes (`as_bits`): pointers to e4m3 exist from sm_89 on only.

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)

E4M3_MAX = tl.constexpr(448.0)

TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Triton's names of the dtypes of activations."""


@triton.jit
def dot(a, b, acc):
    """Return acc + a @ b in float32: by the matrix units for 16-bit operands, exact for float32.

    The interpreter's product of bfloat16 operands is wrong (it multiplies their bit patterns).
    There operands are widened first, which changes no value.
    """
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round float32 x to `dtype`, to nearest, ties to even, as a compiled `x.to(dtype)` does.

    The interpreter truncates to bfloat16, half of a last place too low on average, and makes
    1.2e-38 of 0. So under the interpreter this function rounds the bits. A store converts too:
    round first.
    """
    if INTERPRET and dtype == tl.bfloat16:
        pattern = x.to(tl.uint32, bitcast=True)
        nearest = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        nearest = tl.where(x == x, nearest, 0x7FC0)
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def from_e4m3(bits, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Convert bytes of e4m3 (4 bits of exponent with bias 7, 3 of mantissa) to `dtype`, exactly.

    `NATIVE`: the architecture converts (`native_e4m3`). Otherwise exponent and mantissa move to
    their places in a float32 (bias 127). The result is 2^120 too small, also for subnormal numbers.
    Only 0x7f and 0xff are NaN; e4m3 has no infinity.
    """
    if NATIVE:
        # By way of float32, in two instructions: the instruction from float16 to bfloat16 takes
        # eight times as long as both.
        value = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        if dtype == tl.float16:
            return value
        return value.to(tl.float32).to(dtype)
    # A byte widened with its sign has the sign in bits 20 + 7 and above; mask 0x87f00000.
    wide = (bits.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
    value = wide.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(dtype)


@triton.jit
def to_e4m3(x):
    """Convert float32 to bytes of e4m3: to nearest, ties to even, saturated at 448; NaN stays NaN.

    Integer arithmetic makes every architecture store the same bytes. From 2^-6 on, 20 bits of
    mantissa are rounded away and the bias goes from 127 to 7. Below, numbers are multiples of 2^-9:
    adding 2^14, whose last place is 2^-9, rounds to one.
    """
    pattern = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), E4M3_MAX)
    whole = size.to(tl.int32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # the bits of 2^14
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((pattern >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def tanh(x):
    """Return tanh of float32 x, to about 1e-7 absolutely; -1 and 1 for large magnitudes."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


def as_bits(cache: torch.Tensor) -> torch.Tensor:
    """Return a KV cache as a kernel's argument: the tensor itself, or the bytes of an fp8 cache."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@functools.cache
def architecture(device: torch.device) -> int:
    """Return 10 * major + minor of the compute capability (80, 90, ...); 0 without a GPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def native_e4m3(arch: int) -> bool:
    """Return whether the architecture has an instruction that converts e4m3."""
    return arch >= 89


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of a device's multiprocessors, which sizes launches to one wave; a small
    number without a GPU."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def padded(size: int, least: int = 1) -> int:
    """Return the power of two for `size` elements: Triton's tensors have no other lengths."""
    return max(triton.next_power_of_2(size), least)
