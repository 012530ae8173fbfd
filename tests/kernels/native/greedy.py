"""The reference's choice at temperature 0."""

from collections.abc import Sequence

import numpy as np
import torch

from rootlace.kernels.interface import PickRows, PickTokens
from rootlace.kernels.reference import REFERENCE


def greedy_tokens(
    logits: torch.Tensor,
    masks: Sequence[np.ndarray | None],
    pick: PickTokens = REFERENCE.pick_tokens,
) -> torch.Tensor:
    """Return the best token of each row of logits [R, V], among the tokens that its mask allows."""
    count, vocab = logits.shape
    none = np.full(-(-vocab // 32), -1, np.int32)
    table = np.stack([none if mask is None else mask[: len(none)] for mask in masks])
    zeros, ones = torch.zeros(count), torch.ones(count)
    rows = PickRows(
        params={
            "temperature": zeros,
            "top_k": ones,
            "top_p": ones,
            "min_p": zeros,
        },
        seed=zeros,
        position=zeros,
        mask_table=torch.from_numpy(table),
        mask_row=torch.arange(count),
    )
    return pick(logits, rows, "greedy")
