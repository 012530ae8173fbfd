"""Bandwidth of kernels that only move memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from benchmarks.gpu.paged import BF16, BLOCK_SIZE, FP8
from benchmarks.gpu.setting import Findings, Setting
from benchmarks.gpu.timing import OURS, time_rates
from rootlace.kernels.interface import Choice, KernelSet, KVScales, LogitEdits, PickRows
from rootlace.runtime.model.sampler import PENALTIES


@dataclass(frozen=True)
class Sizes:
    """Sizes of the 8B shape, or small ones."""

    tokens: tuple[int, ...] = (64, 8192)
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    rows: int = 64
    blocks: int = 4096


SMOKE = Sizes((3,), 64, 96, 4, 2, 16, 300, 3, 8)


@dataclass(frozen=True)
class Case:
    """`call(kernels)` is timed; `moved` is the least bytes it reads and writes."""

    name: str
    size: str
    moved: int
    call: Callable[[KernelSet], object]


def measure(setting: Setting, findings: Findings) -> None:
    """Measure the share of the copy bandwidth, by kernel and size; launches bound small sizes."""
    sizes = SMOKE if setting.smoke else Sizes()
    for work in cases(sizes, setting.device):
        with findings.attempt(kernel=work.name, size=work.size, bytes=work.moved) as case:
            makers = {OURS: partial(partial, work.call, setting.kernels)}
            case |= time_rates(setting, makers, work.moved, "bytes_per_second", "copy_bandwidth")


def cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield cases; each makes its tensors when it is reached, and holds only its own."""
    for tokens in sizes.tokens:
        yield from _layer_cases(sizes, tokens, device)
    yield from _row_cases(sizes, device)


def _normal(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _layer_cases(sizes: Sizes, tokens: int, device: torch.device) -> Iterator[Case]:
    size = f"{tokens} tokens"
    x, residual = _normal(device, tokens, sizes.hidden), _normal(device, tokens, sizes.hidden)
    weight = _normal(device, sizes.hidden)
    yield Case("rms_norm", size, 2 * x.nbytes, lambda k: k.rms_norm(x, weight, 1e-5))
    call = lambda k: k.add_rms_norm(x, residual, weight, 1e-5)  # noqa: E731
    yield Case("add_rms_norm", size, 4 * x.nbytes, call)
    gate_up = _normal(device, tokens, 2 * sizes.inner)
    moved = gate_up.nbytes * 3 // 2
    yield Case("silu_mul", size, moved, lambda k: k.silu_mul(gate_up))
    yield Case("gelu_mul", size, moved, lambda k: k.gelu_mul(gate_up))
    table = _normal(device, sizes.vocab, sizes.hidden)
    ids = torch.randint(0, sizes.vocab, (tokens,), device=device)
    yield Case("embedding", size, 2 * x.nbytes, lambda k: k.embedding(table, ids))
    for dtype in (BF16, FP8):
        yield _rope_case(sizes, tokens, dtype, device)


def _rope_case(sizes: Sizes, tokens: int, dtype: torch.dtype, device: torch.device) -> Case:
    heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.head_dim
    qkv = _normal(device, tokens, heads + 2 * kv_heads, dim)
    angle = torch.rand((tokens, dim // 2), device=device) * 6.28
    cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
    blocks = max(sizes.blocks, -(-tokens // BLOCK_SIZE))
    cache_shape = (2, blocks, BLOCK_SIZE, kv_heads, dim)
    caches = torch.zeros(cache_shape, dtype=dtype, device=device)
    slots = torch.randperm(blocks * BLOCK_SIZE, device=device)[:tokens]
    norm = _normal(device, dim)
    scale = torch.full((kv_heads,), 0.02, device=device)
    scales = KVScales(scale, scale) if dtype == FP8 else None

    def call(kernels: KernelSet) -> object:
        rows = (qkv, cos, sin, caches[0], caches[1], slots)
        return kernels.rope_and_write(*rows, q_norm=norm, k_norm=norm, eps=1e-6, scales=scales)

    written = tokens * (heads * dim * 2 + 2 * kv_heads * dim * dtype.itemsize)
    name = f"rope_and_write, {'fp8' if dtype == FP8 else 'bf16'} cache"
    return Case(name, f"{tokens} tokens", qkv.nbytes + cos.nbytes + sin.nbytes + written, call)


def _row_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    rows, vocab = sizes.rows, sizes.vocab
    size = f"{rows} rows"
    token_bytes = sizes.kv_heads * sizes.head_dim * 2
    cache = _normal(device, 8, sizes.blocks // 2, BLOCK_SIZE, sizes.kv_heads, sizes.head_dim)
    slots = torch.randperm(sizes.blocks // 2 * BLOCK_SIZE, device=device)
    half = len(slots) // 2
    yield Case(
        "copy_slots",
        f"{half} slots, 8 caches",
        2 * 8 * half * token_bytes,
        lambda k: k.copy_slots(cache, slots[:half], slots[half : 2 * half]),
    )
    logits = _normal(device, rows, vocab, dtype=torch.float32) * 4
    raw = logits.to(BF16)

    def per_row(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        whole = torch.randint(low, high, shape, device=device, dtype=torch.int64)
        return whole.to(torch.int32)

    masks = drawn(-(2**31), 2**31 - 1, 256, -(-vocab // 32))
    masked = {"mask_table": masks, "mask_row": drawn(0, 256, rows)}
    seen = [torch.randperm(vocab, device=device)[:32].sort().values for _ in range(rows)]
    edits = LogitEdits(
        **masked,
        seen_start=torch.arange(rows + 1, device=device, dtype=torch.int32) * 32,
        seen_token=torch.cat(seen).to(torch.int32),
        seen_count=torch.ones(rows * 32, device=device, dtype=torch.int32),
        penalties={p.name: per_row(p.default + 0.1) for p in PENALTIES},
    )
    moved = raw.nbytes + logits.nbytes
    yield Case("edit_logits, mask and penalties", size, moved, lambda k: k.edit_logits(raw, edits))
    neutral = PickRows(
        params={
            "temperature": per_row(1.0),
            "top_k": per_row(vocab, torch.int32),
            "top_p": per_row(1.0),
            "min_p": per_row(0.0),
        },
        seed=torch.arange(rows, device=device),
        position=torch.arange(rows, device=device),
    )
    changes: dict[str, tuple[Choice, dict[str, Any]]] = {
        "greedy": ("greedy", {"params": {**neutral.params, "temperature": per_row(0.0)}}),
        "temperature 1": ("random", {}),
        "temperature 1, mask": ("random", masked),
        "top-k 50, top-p 0.9": (
            "cut",
            {
                "params": {
                    **neutral.params,
                    "top_k": per_row(50, torch.int32),
                    "top_p": per_row(0.9),
                }
            },
        ),
        "top-p 0.9": ("cut", {"params": {**neutral.params, "top_p": per_row(0.9)}}),
    }
    for name, (choice, change) in changes.items():
        pick = msgspec.structs.replace(neutral, **change)
        yield Case(f"pick_tokens, {name}", size, raw.nbytes, _picks(raw, pick, choice))
    tokens = drawn(0, vocab, rows)
    yield Case("token_logprobs", size, raw.nbytes, lambda k: k.token_logprobs(raw, tokens))


def _picks(logits: torch.Tensor, rows: PickRows, choice: Choice) -> Callable[[KernelSet], object]:
    return lambda kernels: kernels.pick_tokens(logits, rows, choice)
