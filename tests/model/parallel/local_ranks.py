"""Ranks that are threads of one process: sums are what a loop over the parts gives."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import numpy as np
import torch
from msgspec.structs import replace

from rootlace.kernels.native.packed import FLOAT32
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import PooledRow
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.parallel.ranks import load_rank
from rootlace.runtime.model.parallel.shard import Shard
from tests.model.plans import Blocks, Row, Work, make_plan

T = TypeVar("T")
CPU, BLOCK_SIZE = torch.device("cpu"), 4
SECONDS = 60.0
"""Seconds after which a waiting rank takes the other one for failed."""


class LocalRank:
    """See `parallel.group.Group`."""

    def __init__(self, rank: int, slots: list[torch.Tensor | None], all_here: threading.Barrier):
        self._rank = rank
        self._slots = slots
        self._all_here = all_here
        self.count = len(slots)

    def _parts(self, own: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self._rank] = own
        self._all_here.wait(SECONDS)
        parts = [part.clone() for part in self._slots if part is not None]
        self._all_here.wait(SECONDS)
        return parts

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._parts(part)).sum(dim=0)

    def agree(self, blocks: int) -> int:
        return blocks

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._parts(tensor)[0]


def on_ranks(count: int, run: Callable[[int, LocalRank], T]) -> list[T]:
    """Return the results of `run(rank, ranks)` on each rank."""
    slots: list[torch.Tensor | None] = [None] * count
    all_here = threading.Barrier(count)

    def one(rank: int) -> T:
        with torch.inference_mode():
            try:
                return run(rank, LocalRank(rank, slots, all_here))
            except BaseException:
                all_here.abort()
                raise

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(one, rank) for rank in range(count)]]


def divided_logprobs(
    config: ModelConfig,
    count: int,
    token_ids: list[int],
    cut: int,
    kernels: Literal["native", "reference"] = "reference",
    adapters: tuple[str, ...] = (),
) -> torch.Tensor:
    """float64 [tokens, V] after each token, by `count` ranks in two steps, the first of which has
    `cut` tokens; all with the first of the adapters (NAME=PATH), if there are any. Slots that are
    not written are NaN."""
    blocks = -(-len(token_ids) // BLOCK_SIZE)
    executor = ExecutorConfig(threads=1, kernels=kernels, tensor_parallel=count, adapters=adapters)

    def run(rank: int, ranks: LocalRank) -> torch.Tensor:
        shard = Shard(config.spec, rank, count)
        cache = CacheConfig(BLOCK_SIZE, blocks)
        model = load_rank(ModelSetup(config, executor, cache, FLOAT32), shard, ranks)
        model.pool.fill(np.nan)
        row, found = Row(Blocks(blocks, BLOCK_SIZE), token_ids), []
        for tokens in (cut, len(token_ids) - cut):
            plan = replace(
                make_plan([Work(row, tokens)]),
                samples=[],
                pooled=[PooledRow(0, tokens)],
                adapters=np.zeros(len(adapters), np.int32),
            )
            found.append(torch.tensor(model.forward.logits(model.forward.run(plan))))
        return torch.cat(found)

    threads = torch.get_num_threads()
    try:
        logits = torch.cat(on_ranks(count, run), dim=1)
    finally:
        torch.set_num_threads(threads)
    return torch.log_softmax(logits.double(), dim=-1)
