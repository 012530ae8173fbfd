"""The whole runtime on random weights: what a client of it measures."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import rootlace as rl
from benchmarks.random_models import CONFIGS
from benchmarks.random_weights import save_weights


@contextmanager
def started(name: str, device: torch.device, rows: int, **options: Any) -> Iterator[rl.Engine]:
    """An engine for the model `name` of which `rows` requests run at a time, without prefixes being
    reused. Its checkpoint is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="rootlace-model-") as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(CONFIGS[name]))
        (path / "tokenizer.json").write_text(synthetic_tokenizer(CONFIGS[name]["vocab_size"]))
        save_weights(path, device)
        torch.cuda.empty_cache()  # what follows is measured in another process
        with rl.Engine(
            model_path=folder,
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


def synthetic_tokenizer(size: int) -> str:
    """A byte-level BPE `tokenizer.json` of `size` tokens, most of them words of four small letters.

    Token 0 begins a text, token 1 ends it. What constraints cost depends on how many tokens a state
    allows; that is like a real vocabulary's, without a corpus and without training.
    """
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters = "abcdefghijklmnopqrstuvwxyz"
    # A space is a beginning.
    merges = [(left, right) for left in [*letters, "Ġ"] for right in letters]
    merges = merges[: size - len(words)]
    pairs = ["".join(merge) for merge in merges]
    tails = [pair for pair in pairs if pair[0] != "Ġ"]
    for chosen in np.random.default_rng(0).permutation(len(pairs) * len(tails)).tolist():
        if len(words) + len(merges) == size:
            break
        merges.append((pairs[chosen // len(tails)], tails[chosen % len(tails)]))
    words += ["".join(merge) for merge in merges]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return str(tokenizer.to_str())
