"""What a step of a model computes and reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rootlace.runtime.model.checkpoint.sizes import (
    expert_numbers,
    layer_numbers,
    norm_numbers,
    product_numbers,
)
from rootlace.runtime.model.families.spec import ModelSpec


@dataclass(frozen=True)
class Row:
    """A request in a step: its `new` tokens are the last of `context`."""

    new: int
    context: int


@dataclass(frozen=True)
class Elements:
    """Bytes per number: in weights, and in the KV cache with its scales."""

    weight: int
    kv: float


@dataclass(frozen=True)
class StepWork:
    """Flops of products, flops of attention, and bytes read."""

    products: float
    attention: float
    read: float


def step_work(spec: ModelSpec, rows: Sequence[Row], element: Elements) -> StepWork:
    """The work of a step that samples a token for each row.

    A product takes two flops per weight and token, and of experts a token has those that it
    chooses; attention takes, for each token that a token
    attends to, four per number of a query head (its score, and the value that is added). A step
    reads all weights but the embedding (of which it takes a few rows) and the experts that no token
    chooses (as many as if all were alike), and each row's cached keys and values.
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
    """Pairs of a new token and a token it attends to: itself, or one before it in its window."""
    first, last = row.context - row.new + 1, row.context
    if window is None or window >= last:
        return (first + last) * row.new // 2
    growing = max(window - first, 0)  # tokens that see less than a whole window
    return (first + first + growing - 1) * growing // 2 + (row.new - growing) * window


def _keys(row: Row, window: int | None) -> int:
    """Tokens whose keys and values the row reads."""
    return row.context if window is None else min(row.context, window + row.new - 1)
