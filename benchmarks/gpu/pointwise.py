"""The bandwidth of the kernels that only move memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.setting import Report, Setting
from benchmarks.gpu.timing import Clock
from rootlace.kernels import KernelSet
from rootlace.kernels.interface import Choice, KVScales, LogitEdits, PickRows

BLOCK_SIZE = 16
FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """Of the 8B shape, or small."""

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
    """`call(kernels)` is timed; `moved` are the fewest bytes it reads and writes."""

    name: str
    size: str
    moved: int
    call: Callable[[KernelSet], object]


def measure(setting: Setting, report: Report) -> None:
    """Share of the copy bandwidth, per kernel and size; small sizes are bound by their launch."""
    sizes = SMOKE if setting.smoke else Sizes()
    clock = Clock(setting.device)
    for case in report.progress(list(cases(sizes, setting.device)), "pointwise"):
        with report.attempt(kernel=case.name, size=case.size):
            calls = {"rootlace": partial(case.call, setting.kernels)}
            timing = clock.compare(calls, setting.repeats(50), capture=setting.on_gpu)["rootlace"]
            rate = case.moved / timing.median
            found = {
                **timing.as_json(),
                "bytes_per_second": rate,
                "share": setting.share(rate, "copy_bandwidth"),
            }
            what = {"kernel": case.name, "size": case.size, "bytes": case.moved}
            report.add({**what, "kernels": {"rootlace": found}})


def cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Tensors are made when a case is reached; each holds only its own."""
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
    yield Case(
        "add_rms_norm",
        size,
        4 * x.nbytes,
        lambda k: k.add_rms_norm(x, residual, weight, 1e-5),
    )
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
    k_cache, v_cache = torch.zeros(
        (2, blocks, BLOCK_SIZE, kv_heads, dim),
        dtype=torch.uint8 if dtype == FP8 else dtype,
        device=device,
    ).view(dtype if dtype != FP8 else FP8)
    slots = torch.randperm(blocks * BLOCK_SIZE, device=device)[:tokens]
    norm = _normal(device, dim)
    scales = None
    if dtype == FP8:
        scales = KVScales(*(torch.full((kv_heads,), 0.02, device=device) for _ in range(2)))

    def call(kernels: KernelSet) -> object:
        return kernels.rope_and_write(
            qkv,
            cos,
            sin,
            k_cache,
            v_cache,
            slots,
            q_norm=norm,
            k_norm=norm,
            eps=1e-6,
            scales=scales,
        )

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
    words = -(-vocab // 32)
    masks = torch.randint(-(2**31), 2**31 - 1, (256, words), device=device, dtype=torch.int64)
    masks = masks.to(torch.int32)
    mask_row = torch.randint(0, 256, (rows,), device=device, dtype=torch.int32)
    empty = LogitEdits()
    edits = dataclasses.replace(
        empty,
        mask_table=masks,
        mask_row=mask_row,
        seen_start=torch.arange(rows + 1, device=device, dtype=torch.int32) * 32,
        seen_token=torch.stack(
            [torch.randperm(vocab, device=device)[:32].sort().values for _ in range(rows)]
        )
        .to(torch.int32)
        .view(-1),
        seen_count=torch.ones(rows * 32, device=device, dtype=torch.int32),
        repetition_penalty=torch.full((rows,), 1.1, device=device),
        frequency_penalty=torch.full((rows,), 0.1, device=device, dtype=torch.float64),
        presence_penalty=torch.full((rows,), 0.1, device=device, dtype=torch.float64),
    )
    moved = raw.nbytes + logits.nbytes
    yield Case("edit_logits, mask and penalties", size, moved, lambda k: k.edit_logits(raw, edits))
    neutral = PickRows(
        temperature=torch.ones(rows, device=device, dtype=torch.float64),
        top_k=torch.full((rows,), vocab, device=device, dtype=torch.int32),
        top_p=torch.ones(rows, device=device, dtype=torch.float64),
        min_p=torch.zeros(rows, device=device, dtype=torch.float64),
        seed=torch.arange(rows, device=device),
        position=torch.arange(rows, device=device),
    )
    masked = dataclasses.replace(neutral, mask_table=masks, mask_row=mask_row)
    cut = dataclasses.replace(
        neutral,
        top_k=torch.full_like(neutral.top_k, 50),
        top_p=torch.full_like(neutral.top_p, 0.9),
    )
    nucleus = dataclasses.replace(neutral, top_p=torch.full_like(neutral.top_p, 0.9))
    greedy = dataclasses.replace(neutral, temperature=torch.zeros_like(neutral.temperature))
    yield _pick_case("greedy", raw, greedy, "greedy")
    yield _pick_case("temperature 1", raw, neutral, "random")
    yield _pick_case("temperature 1, mask", raw, masked, "random")
    yield _pick_case("top-k 50, top-p 0.9", raw, cut, "cut")
    yield _pick_case("top-p 0.9", raw, nucleus, "cut")
    tokens = torch.randint(0, vocab, (rows,), device=device, dtype=torch.int32)
    yield Case("token_logprobs", size, raw.nbytes, lambda k: k.token_logprobs(raw, tokens))


def _pick_case(name: str, logits: torch.Tensor, rows: PickRows, choice: Choice) -> Case:
    return Case(
        f"pick_tokens, {name}",
        f"{len(logits)} rows",
        logits.nbytes,
        lambda k: k.pick_tokens(logits, rows, choice),
    )
