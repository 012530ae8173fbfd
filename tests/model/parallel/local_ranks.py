"""Ranks that are threads of one process: sums are what a loop over the parts gives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch

from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.decoder.step_input import StepInputBuilder
from rootlace.runtime.model.decoder.torch_decoder import Decoder
from rootlace.runtime.model.kv import pool as kv_pool
from rootlace.runtime.model.parallel.shard import Shard
from tests.model.plans import Blocks, Row, Work, make_plan

T = TypeVar("T")
CPU, BLOCK_SIZE = torch.device("cpu"), 4
SECONDS = 60.0
"""A rank that waits so long waits for one that failed."""


class LocalRank:
    """See `decoder.interface.Ranks`."""

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

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._parts(tensor)[0]


def on_ranks(count: int, run: Callable[[int, LocalRank], T]) -> list[T]:
    """What `run(rank, ranks)` returns on each rank."""
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
    config: ModelConfig, count: int, token_ids: list[int], cut: int
) -> torch.Tensor:
    """float64 [tokens, V] after each token, by `count` ranks in two steps, the first of which has
    `cut` tokens. Slots that are not written are NaN."""

    def run(rank: int, ranks: LocalRank) -> torch.Tensor:
        shard = Shard(config.spec, rank, count)
        own = replace(config, spec=shard.own)
        weights = load_weights(config, torch.float32, CPU, shard=shard).resident()
        decoder = Decoder(own.spec, weights, REFERENCE, ranks=ranks)
        rotary = RotaryEmbedding(own, None, CPU, torch.float32)
        inputs = StepInputBuilder(own.spec, REFERENCE, rotary, BLOCK_SIZE, torch.float32, CPU)
        blocks = -(-len(token_ids) // BLOCK_SIZE)
        cache = kv_pool.allocate(own, blocks, BLOCK_SIZE, CPU, torch.float32).fill_(torch.nan)
        row, found = Row(Blocks(blocks, BLOCK_SIZE), token_ids), []
        for tokens in (cut, None):
            step = replace(inputs.build(make_plan([Work(row, tokens)])), wanted=None)
            found.append(decoder.logits(decoder.forward(step, cache)))
        return torch.cat(found)

    logits = torch.cat(on_ranks(count, run), dim=1)
    return torch.log_softmax(logits.double(), dim=-1)
