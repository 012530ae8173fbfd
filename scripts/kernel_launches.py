"""Triton kernels that serving launches, recorded from real calls without running.

`CALLS` are calls of kernel sets with the shapes of models, on tensors without memory:

    call(TRITON) -> kernel[grid](*arguments, NAME=constant) -> Launch -> Variant, to be compiled
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime.jit import KernelInterface

import rootlace.kernels.triton as kernels
from rootlace.kernels.codes import Codes
from rootlace.kernels.interface import (
    AttentionBatch,
    AutomatonTables,
    Choice,
    KVCodes,
    KVScales,
    KVScaling,
    LogitEdits,
    PickRows,
    slot_bytes,
)
from rootlace.kernels.triton import TRITON
from rootlace.kernels.triton.launching import TYPE_NAMES
from rootlace.kernels.triton.layers import WIDEST_NORM
from rootlace.kernels.triton.logits import PENALTIES
from rootlace.kernels.triton.pick_tokens import sizes
from rootlace.kernels.weights import CODES, Quantised, Scheme

META = torch.device("meta")
NAMES = {
    **TYPE_NAMES,
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""Triton's names of element types."""
MATRIX_UNITS = ("decode_kernel", "tree_kernel", "_extend_kernel", "quantised_linear_kernel")
"""Kernels that must use the matrix units, but for float32."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel, as `triton.compile` wants it.

    `types` has the types of the kernel's parameters ("*bf16", "fp32"); `constants` gives the
    compile-time ones; `divisible` names pointers and integers that are multiples of 16. Element i
    of a tuple has the name "parameter.i".
    `fp_fusion`: products and sums may be one operation, rounded once. `matrix_units`: its PTX must
    use them.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True
    matrix_units: bool = False

    @property
    def kinds(self) -> dict[str, str]:
        """Return the type of each parameter, or element of a tuple, or "constexpr"."""
        return {**self.types, **dict.fromkeys(self.constants, "constexpr")}

    @property
    def signature(self) -> dict[str, str | tuple[str, ...]]:
        """Return every parameter of the kernel in order, with its type or its elements' types."""
        kinds = self.kinds
        return {
            name: kinds.get(name)
            or tuple(kinds[f"{name}.{at}"] for at in range(len(kinds)) if f"{name}.{at}" in kinds)
            for name in self.kernel.arg_names
        }

    def place(self, name: str) -> tuple[int, ...]:
        """Return Triton's path of a parameter, or of an element of a tuple."""
        parameter, *element = name.split(".")
        return self.kernel.arg_names.index(parameter), *map(int, element)


@dataclass(frozen=True)
class Launch:
    """A kernel, the module that launched it, its arguments by name, and its options."""

    kernel: Any
    module: str
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """Return the arguments, with each element of a tuple under a separate name."""
        found: dict[str, Any] = {}
        for name, value in self.arguments.items():
            elements = isinstance(value, tuple)
            found |= (
                {f"{name}.{at}": one for at, one in enumerate(value)} if elements else {name: value}
            )
        return found

    def variant(self, name: str) -> Variant:
        """Return the specialisation that Triton compiles for this launch."""
        types: dict[str, str] = {}
        constants: dict[str, Any] = {}
        divisible = []
        given = getattr(self.kernel, "kwargs", None) or vars(self.kernel)  # interpreted or not
        as_any = given.get("do_not_specialize") or ()
        unaligned = (*as_any, *(given.get("do_not_specialize_on_alignment") or ()))
        parameters = inspect.signature(self.kernel.fn).parameters
        for key, value in self.values.items():
            constant = "constexpr" in str(parameters[key.partition(".")[0]].annotation)
            one = type(value) is int and value == 1 and key not in as_any
            if constant or value is None or one:
                constants[key] = value
            elif isinstance(value, torch.Tensor):
                types[key] = f"*{NAMES[value.dtype]}"
            else:
                large = isinstance(value, int) and value >= 1 << 31
                types[key] = "fp32" if isinstance(value, float) else "i64" if large else "i32"
            sixteens = isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)
            if key in types and sixteens and key not in unaligned:
                divisible.append(key)
        exact = "*fp32" in (types.get("q"), types.get("x"))
        return Variant(
            name,
            self.kernel,
            types,
            constants,
            tuple(divisible),
            self.options.get("num_warps", 4),
            self.options.get("num_stages", 3),
            self.options.get("enable_fp_fusion", True),
            self.kernel.fn.__name__ in MATRIX_UNITS and not exact,
        )


def modules() -> list[Any]:
    """Return the modules of Triton kernels."""
    entries = pkgutil.iter_modules(kernels.__path__)
    return [importlib.import_module(f"{kernels.__name__}.{entry.name}") for entry in entries]


@contextmanager
def written_down(arch: int) -> Iterator[list[Launch]]:
    """Within the block kernels launch as on compute capability `arch`, and do not run."""
    found: list[Launch] = []

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size >= 1 for size in grid)
        assert all(size <= 65535 for size in grid[1:])
        module = sys._getframe(1).f_globals["__name__"]

        def launch(*args: Any, **named: Any) -> None:
            parameters = list(inspect.signature(kernel.fn).parameters)
            arguments = dict(zip(parameters, args, strict=False))
            arguments |= {name: value for name, value in named.items() if name in parameters}
            assert set(arguments) == set(parameters)
            options = {name: value for name, value in named.items() if name not in parameters}
            found.append(Launch(kernel, module, arguments, options))

        return launch

    with ExitStack() as stack:
        stack.enter_context(patch.object(KernelInterface, "__getitem__", launcher))
        for module in modules():
            if hasattr(module, "architecture"):
                stack.enter_context(patch.object(module, "architecture", lambda device: arch))
        yield found


@functools.cache
def variants(arch: int) -> dict[str, list[Variant]]:
    """Return the launches of `CALLS`, each specialisation once, by the module that launches it."""
    found: dict[str, list[Variant]] = {}
    known: set[tuple[Any, ...]] = set()
    for name, call in CALLS:
        with written_down(arch) as launches:
            call()
        for launch in launches:
            beside = found.setdefault(launch.module, [])
            same = sum(
                each.kernel is launch.kernel and each.name.startswith(name) for each in beside
            )
            variant = launch.variant(f"{name} ({same + 1})" if same else name)
            what = (
                launch.kernel.fn,
                *variant.signature.values(),
                *variant.constants.items(),
                variant.divisible,
            )
            if what not in known:
                known.add(what)
                beside.append(variant)
    return found


# Calls --------------------------------------------------------------------------------------------


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def cache_of(
    stored: str, slots: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, KVScaling | None]:
    """Make keys or values of a layer, "plain" ones in `dtype`, and the way to read them."""
    slot = (kv_heads, head_dim)
    if stored == "plain":
        return tensor(slots, block_size, *slot, dtype=dtype), None
    if stored == "fp8":
        scale = tensor(kv_heads, dtype=FP32)
        return tensor(slots, block_size, *slot, dtype=torch.float8_e4m3fn), KVScales(scale, scale)
    codes = KVCodes(int(stored.removeprefix("int")), kv_heads)
    size = slot_bytes(codes.bits, *slot)
    return tensor(slots, block_size, 1, size, dtype=torch.uint8), codes


def attend(
    lengths: tuple[int, ...],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    stored: str,
    window: int | None = None,
    capped: bool = False,
    wants: bool = False,
    block_size: int = 16,
) -> None:
    """Attend rows with so many new tokens; `heads`: query heads of a group, key heads, head size;
    `wants`: with log-sum-exps."""
    group, kv_heads, head_dim = heads
    rows, width = len(lengths), -(-6400 // block_size)
    batch = AttentionBatch(
        row_start=np.cumsum([0, *lengths]).astype(np.int32),
        context_len=np.array([5000 + new for new in lengths], np.int32),
        block_tables=np.arange(rows * width, dtype=np.int32).reshape(rows, width),
        block_size=block_size,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=META,
    )
    plan = TRITON.plan_attention(batch, window, rows if {*lengths} == {1} else None)
    bound = plan.bind([torch.from_numpy(array).to(META) for array in plan.arrays])
    q = tensor(sum(lengths), group * kv_heads, head_dim, dtype=dtype)
    cache, scales = cache_of(stored, rows * width, block_size, kv_heads, head_dim, dtype)
    cap = 50.0 if capped else 0.0
    TRITON.paged_attention(q, cache, cache, bound, soft_cap=cap, scales=scales, want_lse=wants)


def write(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    stored: str = "plain",
    norm: bool = False,
    tokens: bool = False,
) -> None:
    """Rotate and cache; `tokens`: some are written to several slots."""
    q_heads, kv_heads, head_dim = heads
    qkv = tensor(5, q_heads + 2 * kv_heads, head_dim, dtype=dtype)
    angles = tensor(5, head_dim // 2, dtype=dtype)
    cache, scales = cache_of(stored, 100, 16, kv_heads, head_dim, dtype)
    slots = tensor(5, dtype=torch.int64)
    weight = tensor(head_dim, dtype=dtype) if norm else None
    TRITON.rope_and_write(
        qkv, angles, angles, cache, cache, slots, slots if tokens else None,
        q_norm=weight, k_norm=weight, eps=1e-5, scales=scales,
    )  # fmt: skip


def norms(dtype: torch.dtype, width: int) -> None:
    x, weight = tensor(4, width, dtype=dtype), tensor(width, dtype=dtype)
    TRITON.rms_norm(x, weight, 1e-5)
    TRITON.add_rms_norm(x, x, weight, 1e-5)


def gated(dtype: torch.dtype, gelu: bool, width: int) -> None:
    multiply = TRITON.gelu_mul if gelu else TRITON.silu_mul
    multiply(tensor(4, 2 * width, dtype=dtype))


def feed() -> None:
    ids = tensor(5, dtype=torch.int64)
    TRITON.feed_tokens(ids, ids, tensor(5, dtype=torch.int32))


def copy(dtype: torch.dtype) -> None:
    """Copy in a cache whose layers have more than 2^31 numbers."""
    slots = tensor(5, dtype=torch.int64)
    TRITON.copy_slots(tensor(2, 1 << 18, 16, 8, 128, dtype=dtype), slots, slots)


ROWS = 5


def edit(dtype: torch.dtype, kinds: str) -> None:
    """Edit logits; `kinds`: of "b"iases and bans, "m"asks, "p"enalties."""
    numbers, real = tensor(ROWS, dtype=torch.int32), tensor(ROWS, dtype=torch.float64)
    start = tensor(ROWS + 1, dtype=torch.int32)
    biases = {"bias_start": start, "bias_token": numbers, "bias": tensor(ROWS, dtype=FP32)}
    masks = {"mask_table": tensor(100, 4001, dtype=torch.int32), "mask_row": numbers}
    seen = {"seen_start": start, "seen_token": numbers, "seen_count": numbers}
    edits = LogitEdits(
        **(biases if "b" in kinds else {}),
        **(masks if "m" in kinds else {}),
        **(seen if "p" in kinds else {}),
        penalties=dict.fromkeys(PENALTIES, real) if "p" in kinds else {},
    )
    TRITON.edit_logits(tensor(ROWS, 128256, dtype=dtype), edits)


def logprobs(dtype: torch.dtype) -> None:
    TRITON.token_logprobs(tensor(ROWS, 128256, dtype=dtype), tensor(ROWS, dtype=torch.int32))


def pick(choice: Choice, dtype: torch.dtype, masked: bool, tiles: int) -> None:
    numbers, real = tensor(ROWS, dtype=torch.int32), tensor(ROWS, dtype=torch.float64)
    large = tensor(ROWS, dtype=torch.int64)
    params = {"temperature": real, "top_k": numbers, "top_p": real, "min_p": real}
    table = tensor(100, 4001, dtype=torch.int32) if masked else None
    rows = PickRows(params, large, large, table, numbers if masked else None)
    TRITON.pick_tokens(tensor(ROWS, tiles * sizes(0).tile, dtype=dtype), rows, choice)


def step_automata() -> None:
    numbers = tensor(ROWS, dtype=torch.int32)
    classes, table = tensor(3, 128257, dtype=torch.int32), tensor(100, 4001, dtype=torch.int32)
    tables = AutomatonTables(numbers, numbers, numbers, numbers, classes, table)
    TRITON.step_automata(numbers, numbers, numbers, numbers, tables)


def multiply(
    codes: Codes,
    group: int,
    scales: torch.dtype,
    offsets: torch.dtype | None,
    units: torch.dtype | None,
    rows: int,
) -> None:
    """Multiply with 4096 inputs and outputs; `units`: of scales and of offsets."""
    code = CODES[codes]
    weight = Quantised(
        Scheme(codes, group, offsets is not None),
        tensor(4096, 4096 // code.in_byte, dtype=code.dtype),
        tensor(4096, 4096 // group, dtype=scales),
        None if offsets is None else tensor(4096, 4096 // group, dtype=offsets),
        units=None if units is None else tensor(4096, 16, dtype=units),
        offset_units=None if units is None else tensor(4096, 16, dtype=units),
    )
    TRITON.linear(tensor(rows, 4096), weight)


DECODING: list[tuple[int, int, int, torch.dtype, str, int | None, bool, bool, int, int]] = [
    # group, KV heads, D, dtype, stored, window, capped, log-sum-exp, block size, rows
    (4, 8, 64, BF16, "plain", None, False, False, 16, 32),
    (1, 32, 64, BF16, "plain", None, False, False, 16, 1),
    (4, 8, 128, BF16, "plain", None, False, False, 16, 32),
    (4, 8, 128, BF16, "plain", None, False, False, 16, 16),
    (4, 8, 128, BF16, "plain", None, False, False, 16, 8),
    (4, 8, 128, BF16, "plain", None, False, False, 64, 32),
    (4, 8, 128, BF16, "plain", None, False, False, 1, 1),
    (4, 8, 128, BF16, "plain", None, False, True, 16, 1),
    (4, 8, 128, BF16, "plain", 4096, False, False, 16, 32),
    (8, 8, 128, BF16, "plain", None, False, False, 16, 1),
    (8, 8, 128, FP16, "plain", None, False, False, 16, 16),
    (7, 4, 128, FP16, "plain", None, False, False, 16, 1),
    (1, 32, 128, BF16, "plain", None, False, False, 16, 16),
    (32, 1, 128, BF16, "plain", None, False, False, 16, 1),
    (4, 8, 64, BF16, "fp8", None, False, False, 16, 32),
    (4, 8, 128, BF16, "fp8", None, False, False, 16, 32),
    (4, 8, 128, BF16, "fp8", None, False, False, 16, 8),
    (8, 8, 128, BF16, "fp8", None, False, False, 16, 1),
    (4, 8, 64, BF16, "int8", None, False, False, 16, 32),
    (4, 8, 128, BF16, "int8", None, False, False, 16, 32),
    (4, 8, 64, BF16, "int4", None, False, False, 16, 1),
    (4, 8, 128, BF16, "int4", None, False, False, 16, 32),
    (4, 8, 128, BF16, "int4", None, False, False, 16, 8),
    (2, 8, 256, BF16, "int4", None, True, False, 16, 1),
    (2, 8, 256, BF16, "plain", 4096, True, False, 16, 32),
    (2, 8, 256, BF16, "plain", None, True, False, 16, 16),
    (2, 8, 256, BF16, "fp8", 4096, True, False, 16, 32),
    (4, 8, 80, BF16, "plain", None, False, False, 16, 32),
    (4, 8, 80, FP16, "plain", None, False, True, 16, 1),
    (4, 8, 128, FP32, "plain", None, False, False, 16, 8),
]
"""Steps of one new token a row: from two rows on, with the kernel of shared nodes."""
EXTENDING: list[tuple[torch.dtype, str, int, int, int | None, bool]] = [
    # dtype, stored, D, group, window, capped
    (BF16, "plain", 64, 4, None, False),
    (BF16, "plain", 128, 1, None, False),
    (BF16, "plain", 128, 4, None, False),
    (BF16, "plain", 128, 7, 4096, False),
    (BF16, "plain", 128, 4, 4096, True),
    (BF16, "plain", 80, 8, None, False),
    (BF16, "plain", 256, 2, 4096, True),
    (FP16, "plain", 128, 4, None, False),
    (FP32, "plain", 32, 3, None, False),
    (FP32, "plain", 128, 4, None, False),
    (BF16, "fp8", 64, 4, None, False),
    (BF16, "fp8", 128, 4, None, False),
    (BF16, "fp8", 128, 4, 4096, True),
    (BF16, "fp8", 256, 2, 4096, True),
    (BF16, "int8", 64, 4, None, False),
    (BF16, "int8", 128, 4, None, False),
    (BF16, "int4", 64, 4, None, False),
    (BF16, "int4", 128, 4, None, False),
    (BF16, "int4", 128, 4, 4096, True),
]
PRODUCTS: list[tuple[Codes, int, torch.dtype, torch.dtype | None, torch.dtype | None, int]] = [
    # codes, group, scales, offsets, units of both, rows
    ("int8", 4096, FP32, None, None, 16),
    ("int8", 32, FP16, None, None, 64),
    ("int8", 32, FP16, FP16, None, 16),
    ("int4", 128, BF16, None, None, 16),
    ("int4", 128, BF16, None, None, 64),
    ("uint4", 32, FP16, FP16, None, 16),
    ("uint4", 32, torch.uint8, torch.uint8, FP16, 16),
    ("fp8_e4m3", 4096, FP32, None, None, 16),
    ("e2m1", 32, FP32, None, None, 16),
    ("nl4", 32, FP16, None, None, 64),
]
PICKED = [
    (BF16, False, 31),
    (BF16, True, 31),
    (BF16, True, 63),
    (FP32, False, 31),
    (FP32, False, 63),
]
"""dtype, masked, tiles, which are padded to 32 and 64."""
CHOICES: tuple[Choice, ...] = ("greedy", "random", "cut")


def _calls() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype, width in (
        *((BF16, 2048), (BF16, 4096), (BF16, 5120), (FP16, 4096)),
        *((BF16, WIDEST_NORM), (FP32, 16384)),
    ):
        yield f"{NAMES[dtype]}, {width} columns", partial(norms, dtype, width)
    yield "i64", feed
    for dtype in (BF16, FP32):
        ids, weight = tensor(5, dtype=torch.int64), tensor(1000, 2048, dtype=dtype)
        yield NAMES[dtype], partial(TRITON.embedding, weight, ids)
    yield "bf16", partial(copy, BF16)
    yield "fp8", partial(copy, torch.float8_e4m3fn)
    for dtype, gelu, width in (
        *((BF16, False, 8192), (BF16, True, 8192), (FP32, False, 8192), (BF16, False, 8191)),
    ):
        kind = f"{'gelu' if gelu else 'silu'}, {NAMES[dtype]}, {width} wide"
        yield kind, partial(gated, dtype, gelu, width)
    llama = (32, 8, 128)
    yield "Llama-1B", partial(write, BF16, (32, 8, 64))
    yield "Llama-8B", partial(write, BF16, llama)
    yield "Llama-8B, duplicates", partial(write, BF16, llama, tokens=True)
    for stored in ("fp8", "int8", "int4"):
        yield f"Llama-8B, {stored}", partial(write, BF16, llama, stored)
    yield "Qwen3-8B", partial(write, BF16, llama, norm=True)
    yield "norm, fp8, duplicates", partial(write, BF16, (16, 8, 256), "fp8", True, True)
    yield "heads of 80", partial(write, FP16, (32, 32, 80))
    yield "float32", partial(write, FP32, llama, norm=True)
    for group, kv_heads, dim, dtype, stored, window, capped, wants, block, rows in DECODING:
        about = f"group of {group}, heads of {dim}, {stored}, blocks of {block}, {rows} rows"
        options = ", window" * bool(window) + ", capped" * capped + ", log-sum-exp" * wants
        heads = (group, kv_heads, dim)
        call = partial(attend, (1,) * rows, heads, dtype, stored, window, capped, wants, block)
        yield f"{NAMES[dtype]}, {about}{options}", call
    for dtype, stored, dim, group, window, capped in EXTENDING:
        about = f"group of {group}, heads of {dim}, {stored}{', window' * bool(window)}"
        name = f"{NAMES[dtype]}, {about}{', capped' * capped}"
        call = partial(attend, (700, 3), (group, 8, dim), dtype, stored, window, capped)
        yield name, call
        if (dtype, dim, group, window) == (BF16, 128, 4, None):
            yield f"{name}, log-sum-exp", partial(call, wants=True)
    for dtype, kinds in (
        *((BF16, "mbp"), (FP32, "mbp"), (BF16, "bp")),
        *((BF16, "b"), (BF16, "p"), (BF16, "m")),
    ):
        parts = {"m": "mask", "b": "biases", "p": "penalties"}
        yield ", ".join([NAMES[dtype], *map(parts.__getitem__, kinds)]), partial(edit, dtype, kinds)
    for dtype in (BF16, FP32):
        yield NAMES[dtype], partial(logprobs, dtype)
    for choice, (dtype, masked, tiles) in product(CHOICES, PICKED):
        name = f"{choice}, {NAMES[dtype]}, {'masked, ' * masked}{tiles} tiles"
        yield name, partial(pick, choice, dtype, masked, tiles)
    yield "automata", step_automata
    for codes, group, scales, offsets, units, rows in PRODUCTS:
        kind = f"{codes} in groups of {group} by {NAMES[scales]}, {rows} rows"
        about = f"{kind}{', offsets' * bool(offsets)}{', units' * bool(units)}"
        yield about, partial(multiply, codes, group, scales, offsets, units, rows)


CALLS = list(_calls())
