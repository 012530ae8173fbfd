"""The whole runtime on random weights: what a client of it measures."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import rootlace as rl
from benchmarks.random_models import make_model


@contextmanager
def started(name: str, device: torch.device, rows: int, **options: Any) -> Iterator[rl.Engine]:
    """An engine for the model `name` of which `rows` requests run at a time, without prefixes being
    reused. Its checkpoint is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="rootlace-model-") as folder:
        model = make_model(name, Path(folder) / name, str(device))
        torch.cuda.empty_cache()  # what follows is measured in another process
        with rl.Engine(
            model_path=str(model),
            device=str(device),
            max_running=rows,
            max_step_tokens=8192,
            kv_memory_bytes=4 << 30 if device.type == "cuda" else 64 << 20,
            cache=False,
            **options,
        ) as engine:
            yield engine


def decode_rate(
    engine: rl.Engine, prompts: Sequence[Sequence[int]], new: int, params: Mapping[str, Any]
) -> float:
    """Tokens per second, of `new` for each prompt, from when all of them had their first one until
    all were done, on the gateway's clock: what the client does is left out."""
    given = [
        {**params, "max_new_tokens": new, "ignore_eos": True, "seed": seed}
        for seed in range(len(prompts))
    ]
    replies = engine.generate(input_ids=[list(prompt) for prompt in prompts], sampling_params=given)
    told = [reply["meta_info"] for reply in replies]
    first = max(one["time_to_first_token"] for one in told)
    tokens = sum(one["completion_tokens"] - 1 for one in told)
    return tokens / (max(one["e2e_latency"] for one in told) - first)
