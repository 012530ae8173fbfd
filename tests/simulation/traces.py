"""Small traces for tests."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rootlace.runtime.simulation.trace import Trace

Row = tuple[float, int, int, list[int]]
"""Seconds, prompt tokens, output tokens, ids of blocks."""


def write_mooncake(path: Path, rows: Sequence[Row]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(names, (1000 * at, *rest), strict=True))) for at, *rest in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_azure(path: Path, rows: Sequence[tuple[float, int, int]]) -> Path:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for at, prompt, output in rows:
        lines.append(f"2023-11-16 18:{int(at // 60):02}:{at % 60:010.7f},{prompt},{output}")
    path.write_text("\n".join(lines) + "\n")
    return path


def token_trace(prompts: Sequence[Sequence[int]], outputs: int = 1, gap: float = 0.0) -> Trace:
    """Make prompts token by token: blocks of one token, numbered by the prefix that they end."""
    known: dict[tuple[int, ...], int] = {}
    blocks = [
        known.setdefault(tuple(prompt[: end + 1]), len(known))
        for prompt in prompts
        for end in range(len(prompt))
    ]
    lengths = [len(prompt) for prompt in prompts]
    return Trace(
        name="tokens",
        format="tokens",
        arrivals=gap * np.arange(len(prompts), dtype=np.float64),
        prompt_tokens=np.array(lengths, np.int64),
        output_tokens=np.full(len(prompts), outputs, np.int64),
        blocks=np.array(blocks, np.int64),
        starts=np.cumsum([0, *lengths]),
        block_tokens=1,
    )
