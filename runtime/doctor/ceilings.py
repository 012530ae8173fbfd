"""The most that a machine can do: the rate of a big matrix product, the rate of reading memory.

Best of many tries: noise only slows.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from rootlace.kernels.interface import AttentionBatch
from rootlace.kernels.native.attention import NativeAttention
from rootlace.kernels.native.build import Processor, read_processor
from rootlace.kernels.native.library import Team
from rootlace.kernels.native.linear import Packer, Products
from rootlace.kernels.native.machine import Cores, read_cores
from rootlace.kernels.native.packed import Epilogue
from rootlace.kernels.weights import Dense
from rootlace.runtime.model.checkpoint.sizes import (
    expert_numbers,
    layer_numbers,
    norm_numbers,
    product_numbers,
)
from rootlace.runtime.model.families.spec import Attention, ModelSpec
from rootlace.runtime.model.kv_pool import main_memory

# Machine ------------------------------------------------------------------------------------------
#
# Facts about this machine, as reported by the system.


class Machine(msgspec.Struct, frozen=True):
    """Hardware of this machine; memory in bytes, of the control groups where they grant less."""

    processor: Processor
    system: str
    cores: Cores
    memory_total: int
    memory_available: int


def read_machine() -> Machine:
    """Ask the system."""
    memory = main_memory()
    return Machine(
        read_processor(),
        f"{platform.system()} {platform.release()}",
        read_cores(),
        memory.total,
        memory.available,
    )


# Work ---------------------------------------------------------------------------------------------
#
# Computation and reads of a model's step.


class Row(msgspec.Struct, frozen=True):
    """A request in a step: its `new` tokens are the last of `context`."""

    new: int
    context: int


class Elements(msgspec.Struct, frozen=True):
    """Bytes per number: in weights, and in the KV cache with its scales."""

    weight: int
    kv: float


class StepWork(msgspec.Struct, frozen=True):
    """Flops of products, flops of attention, and bytes read."""

    products: float
    attention: float
    read: float


def step_work(spec: ModelSpec, rows: Sequence[Row], element: Elements) -> StepWork:
    """Return the work of a step that samples a token for each row.

    A product takes two flops per weight and token, and of experts a token has those that it
    chooses; attention takes, for each token that a token attends to, four per number of a query
    head (its score, and the value that is added). A step reads all weights but the embedding (of
    which it takes a few rows) and the experts that no token chooses (as many as if all were alike),
    and each row's cached keys and values.
    """
    tokens = sum(row.new for row in rows)
    weights, in_experts = product_numbers(spec), expert_numbers(spec)
    share = spec.experts.chosen / spec.experts.count if spec.experts else 1.0
    idle = in_experts * (1.0 - share) ** tokens
    head = spec.vocab_size * spec.hidden_size
    attention = spec.attention
    query = attention.num_heads * attention.head_dim
    key_and_value = attention.cached * attention.num_kv_heads * attention.head_dim * element.kv
    attended = 0.0
    read = float((layer_numbers(spec) + norm_numbers(spec) + head - idle) * element.weight)
    for window in attention.windows:
        attended += 4.0 * query * sum(_pairs(row, window) for row in rows)
        read += key_and_value * sum(_keys(row, window) for row in rows)
    weights_of_token = weights - in_experts * (1.0 - share)
    return StepWork(2.0 * (weights_of_token * tokens + head * len(rows)), attended, read)


def _pairs(row: Row, window: int | None) -> int:
    """Count pairs of a new token and an attended token in its window: itself, or an earlier one."""
    first, last = row.context - row.new + 1, row.context
    if window is None or window >= last:
        return (first + last) * row.new // 2
    growing = max(window - first, 0)  # tokens that see less than a whole window
    return (first + first + growing - 1) * growing // 2 + (row.new - growing) * window


def _keys(row: Row, window: int | None) -> int:
    """Count the tokens whose keys and values the row reads."""
    return row.context if window is None else min(row.context, window + row.new - 1)


# Ceilings -----------------------------------------------------------------------------------------


SIDE = 2048
"""Rows and columns of the square product."""
GPU_SIDE = 8192
READ_BYTES = 256 << 20
"""Bytes of main memory read by a measurement: usually more than caches hold."""
GPU_READ_BYTES = 1 << 30
WEIGHT_OUTPUTS, WEIGHT_INPUTS = 8192, 1024
"""Shape of a weight that is read, with fewer outputs where fewer bytes are asked for."""
ATTENDED = 1024
BLOCK = 16
TRIES = 2
"""Tries, at least. The first one, which maps memory and wakes threads, does not count."""


class Ceilings(msgspec.Struct, frozen=True):
    """FLOP/s of a product, of attention; bytes/s of reading."""

    product_rate: float
    attention_rate: float
    read_bandwidth: float


def best_seconds(work: Callable[[], object], seconds: float) -> float:
    """Return the shortest of the calls that fit into `seconds`, of at least `TRIES`."""
    work()
    best, tries, end = float("inf"), 0, time.perf_counter() + seconds
    while tries < TRIES or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        tries += 1
    return best


def product_rates(
    dtype: torch.dtype, threads: int, seconds: float, library: ctypes.CDLL | None
) -> dict[str, float]:
    """FLOP/s of a square product on a CPU: "torch" (oneDNN, as a rule) and, with a `library`,
    "native". Leaves torch with that many threads."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        x, weight = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
        flops = 2.0 * SIDE**3
        rates = {"torch": flops / best_seconds(lambda: x @ weight.T, seconds)}
        if library is not None:
            packer = Packer(library, Team(library, threads), dtype)
            product, out = Products(packer, [Dense(weight)]), torch.empty_like(x)
            work = lambda: product.multiply(Epilogue.STORE, x, out)  # noqa: E731
            rates["native"] = flops / best_seconds(work, seconds)
    return rates


def read_bandwidth(threads: int, seconds: float, size: int, library: ctypes.CDLL | None) -> float:
    """Bytes/s of reading the same `size` bytes again and again: from main memory or, if they are
    few enough, from a cache. They are read by torch's sum or, where that is faster, as weights
    that a `library` multiplies by one row. Leaves torch with that many threads."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        memory = torch.ones(max(size // 4, 1))
        found = memory.nbytes / best_seconds(memory.sum, seconds)
        del memory
        if library is not None:
            found = max(found, _weight_bandwidth(threads, seconds, size, library))
    return found


def _weight_bandwidth(threads: int, seconds: float, size: int, library: ctypes.CDLL) -> float:
    dtype = torch.bfloat16
    outputs = max(min(WEIGHT_OUTPUTS, size // dtype.itemsize // WEIGHT_INPUTS), 1)
    weight = torch.zeros(outputs, WEIGHT_INPUTS, dtype=dtype)
    count = max(size // weight.nbytes, 1)
    packer = Packer(library, Team(library, threads), dtype)
    products = Products(packer, [Dense(weight)] * count)
    x, out = torch.zeros(1, WEIGHT_INPUTS, dtype=dtype), torch.empty(1, outputs, dtype=dtype)
    once = best_seconds(lambda: products.multiply(Epilogue.STORE, x, out), seconds)
    return count * weight.nbytes / once


def attention_rate(
    dtype: torch.dtype, heads: Attention, threads: int, seconds: float, library: ctypes.CDLL
) -> float:
    """FLOP/s of native attention of a prompt of `ATTENDED` tokens to itself. Each pair of tokens of
    which one sees the other counts four per number of a query head."""
    shape = (ATTENDED // BLOCK, BLOCK, heads.num_kv_heads, heads.head_dim)
    keys, values = (torch.randn(shape).to(dtype) for _ in range(2))
    batch = AttentionBatch(
        row_start=np.array([0, ATTENDED]),
        context_len=np.array([ATTENDED]),
        block_tables=np.arange(shape[0])[None],
        block_size=BLOCK,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    q = torch.randn(ATTENDED, heads.num_heads, heads.head_dim).to(dtype)
    attend = NativeAttention(library, Team(library, threads))
    plan = attend.plan(batch, None)
    with torch.inference_mode():
        once = best_seconds(lambda: attend(q, keys, values, plan), seconds)
    return 4.0 * heads.num_heads * heads.head_dim * (ATTENDED * (ATTENDED + 1) // 2) / once


def gpu_product_rate(device: torch.device, dtype: torch.dtype, seconds: float, free: int) -> float:
    """FLOP/s of torch's square product on a GPU that has `free` bytes: of smaller matrices where
    these are few."""
    side = GPU_SIDE
    while side > 1 and 4 * torch.float32.itemsize * side**2 > free // 2:
        side //= 2
    with torch.inference_mode():
        x, weight = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        return 2.0 * side**3 / _gpu_seconds(device, lambda: x @ weight.T, seconds)


def gpu_copy_bandwidth(device: torch.device, seconds: float, free: int) -> float:
    """Bytes/s of a copy on a GPU that has `free` bytes. It reads and writes as many."""
    size = max(min(GPU_READ_BYTES, free // 4), 1)
    with torch.inference_mode():
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return 2 * size / _gpu_seconds(device, lambda: target.copy_(source), seconds)


def _gpu_seconds(device: torch.device, work: Callable[[], object], seconds: float) -> float:
    def run() -> None:
        work()
        torch.cuda.synchronize(device)

    return best_seconds(run, seconds)
