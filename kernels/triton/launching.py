"""How a kernel is launched on an architecture: looked up in a small committed table.

Nothing is tried out when a server starts. `tuned/sm_90.json` and its like are written by a
measurement on that architecture (`python -m benchmarks.gpu --tune`) or by hand; an architecture
without a table takes `tuned/default.json`, whose entries fit every GPU from compute capability 8.0
on (99 KiB of shared memory). One file:

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

`measured` is null for a table nobody has measured yet. A kernel's entries are tried in order, and
the first whose conditions all hold is taken: a condition is a value that the key must equal, or
`{"most": n}`, an upper bound. The last entry has no condition, so that there always is an answer.
The keys are the kernel's own (they stand where it calls `settings`); all entries of a kernel name
the same blocks, in every table.
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
    """The launch of `kernel` on compute capability `arch` (90 for 9.0) for a case.

    Raises KeyError if the kernel is in no table.
    """
    table = _table(arch)
    if kernel not in table:
        table = _table(0)
    for entry in table[kernel]:
        if all(_holds(key, name, wanted) for name, wanted in entry["when"].items()):
            blocks = MappingProxyType(dict(entry["blocks"]))
            return Launch(blocks, entry["num_warps"], entry["num_stages"])
    raise KeyError(f"no entry of {kernel} for {key}: its last one must have no condition")


def forget() -> None:
    """Read the tables again at their next use, as one was written while kernels run."""
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


# What every kernel shares: matrix products, 8-bit floats, the device's architecture, padding.
#
# Triton decides where a kernel is *defined* whether it is compiled or interpreted; `INTERPRET` is
# that decision, for what the interpreter computes differently.
#
# An fp8 cache reaches kernels as bytes (`as_bits`): a pointer to e4m3 exists from sm_89 on only.

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)

E4M3_MAX = tl.constexpr(448.0)

TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Triton's names of the types of activations."""


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32: the matrix units for 16-bit operands, exact products for float32.

    The interpreter's product of bfloat16 operands is wrong (it multiplies their bit patterns), so
    there operands are widened first, which changes no value.
    """
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 x in `dtype`, to nearest, ties to even: what `x.to(dtype)` is when compiled.

    The interpreter truncates to bfloat16, half of a last place too low on average, and makes
    1.2e-38 of 0; so there the bits are rounded here. (A store converts too: round before it.)
    """
    if INTERPRET and dtype == tl.bfloat16:
        pattern = x.to(tl.uint32, bitcast=True)
        nearest = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        nearest = tl.where(x == x, nearest, 0x7FC0)
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def from_e4m3(bits, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes of e4m3 (4 bits of exponent with bias 7, 3 of mantissa) as `dtype`, exactly.

    `NATIVE`: the architecture converts (`native_e4m3`). Otherwise exponent and mantissa are moved
    to their places in a float32 (with bias 127), which is 2^120 too small: also where it is
    subnormal. Only 0x7f and 0xff are not numbers; there is no infinity.
    """
    if NATIVE:
        # By way of float32, in two instructions: the one from float16 to bfloat16 takes eight times
        # as long as both.
        value = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        if dtype == tl.float16:
            return value
        return value.to(tl.float32).to(dtype)
    # Widened with its sign, a byte has it in bits 20 + 7 and above; the mask is 0x87f00000.
    wide = (bits.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
    value = wide.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(dtype)


@triton.jit
def to_e4m3(x):
    """float32 as bytes of e4m3: to nearest, ties to even, saturated at 448; NaN stays NaN.

    By integer arithmetic on every architecture, so that all of them store the same bytes. From
    2^-6 on, 20 bits of mantissa are rounded away and the bias goes from 127 to 7. Below, numbers
    are multiples of 2^-9: adding 2^14, whose last place that is, rounds to one.
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
    """float32, to about 1e-7 absolutely; -1 and 1 far out."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


def as_bits(cache: torch.Tensor) -> torch.Tensor:
    """Return a KV cache as a kernel's argument: the tensor itself, or the bytes of an fp8 one."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@functools.cache
def architecture(device: torch.device) -> int:
    """10 * major + minor of the compute capability (80, 90, ...); 0 where there is no GPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def native_e4m3(arch: int) -> bool:
    """Whether an architecture converts e4m3 by itself."""
    return arch >= 89


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of a device's multiprocessors, for kernels with as many programs as can run
    at once; a small number without a GPU."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def padded(size: int, least: int = 1) -> int:
    """The power of two that holds `size` elements: Triton's tensors have no other lengths."""
    return max(triton.next_power_of_2(size), least)
