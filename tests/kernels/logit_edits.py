"""Biases, bans, masks and penalties of random rows."""

import math

import numpy as np
import torch
from msgspec.structs import replace

from rootlace.kernels.interface import LogitEdits
from rootlace.runtime.model.sampler import PENALTIES


def lists(lengths: list[int], vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (start, tokens) of rows with these numbers of different tokens, in order."""
    random = np.random.default_rng(seed)
    tokens = [np.sort(random.permutation(vocab)[:length]) for length in lengths]
    start = np.concatenate([[0], np.cumsum(lengths)])
    return (
        torch.from_numpy(start.astype(np.int32)),
        torch.from_numpy(np.concatenate(tokens).astype(np.int32)),
    )


def neutral_penalties(count: int) -> dict[str, torch.Tensor]:
    """All that there are, of `count` rows."""
    return {p.name: torch.full((count,), p.default, dtype=torch.float64) for p in PENALTIES}


def edits_of(count: int, vocab: int, kinds: str, seed: int = 0) -> LogitEdits:
    """`kinds`: of "b"iases and bans, "m"asks, "p"enalties."""
    random = np.random.default_rng(seed)
    edits = LogitEdits()
    sizes = [0, 1, vocab, vocab // 2, 3, 40]

    def some() -> list[int]:
        return [min(int(n), vocab) for n in random.choice(sizes, count)]

    if "b" in kinds:
        start, token = lists(some(), vocab, seed + 1)
        bias = random.normal(0, 5, len(token)).astype(np.float32)
        bias[random.random(len(token)) < 0.3] = -math.inf
        edits = replace(edits, bias_start=start, bias_token=token, bias=torch.from_numpy(bias))
    if "m" in kinds:
        words = -(-vocab // 32) - seed % 2
        table = random.integers(-(2**31), 2**31, (4, max(words, 1)))
        rows = random.integers(-1, 4, count)
        edits = replace(
            edits,
            mask_table=torch.from_numpy(table.astype(np.int32)),
            mask_row=torch.from_numpy(rows.astype(np.int32)),
        )
    if "p" in kinds:
        start, token = lists(some(), vocab, seed + 2)
        counts = random.integers(0, 4, len(token)).astype(np.int32)
        edits = replace(
            edits,
            seen_start=start,
            seen_token=token,
            seen_count=torch.from_numpy(counts),
            penalties={
                **neutral_penalties(count),
                "repetition_penalty": torch.from_numpy(random.choice([1.0, 1.3, 0.6], count)),
                "frequency_penalty": torch.from_numpy(random.choice([0.0, 0.7, -1.1], count)),
                "presence_penalty": torch.from_numpy(random.choice([0.0, 0.4], count)),
            },
        )
    return edits
