"""Random models to measure with: real shapes, no training. Seeded: the same weights every time.

`make_model("a", folder)` makes a checkpoint of about 15M parameters, `"b"` about 150M (both of the
Llama architecture), `"gemma3"` and `"gpt_neox"` one of these families with as many (the layers of
Gemma 3 270M and of Pythia 160M), `"0.6B"` one of Qwen3 0.6B's shapes, `"moe"` one of Qwen3-MoE's
architecture with 850M parameters, of which a token has 160M, `"deepseek"` one of DeepSeek-V2's with
as many, whose attention has the sizes of V2-Lite's; in Hugging Face layout: bfloat16, with a
byte-level BPE tokenizer of made-up words and a ChatML template.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

MODELS = Path.home() / ".cache" / "rootlace-bench"
"""Where models are kept unless told otherwise."""
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

DATA = Path(__file__).with_name("data")
CONFIGS: dict[str, dict[str, Any]] = json.loads((DATA / "models.json").read_text())
"""Each model's `config.json`: `a`, `b`, two other families, Qwen3 0.6B, two mixtures of experts,
Llama 3.2 1B, Llama 3.1 8B, one to try things on."""
SIZES = ("a", "b", "gemma3", "gpt_neox", "0.6B", "moe", "deepseek")
"""Those that a CPU is measured with."""


def make_model(name: str, out_dir: str | Path, device: str = "cpu") -> Path:
    """Write a model to `out_dir`, unless it exists, and return the folder. Its weights are made on
    `device`, and differ by device.

    The folder appears only when it is complete. Raises KeyError for an unknown name.
    """
    folder = Path(out_dir)
    if (folder / "config.json").exists():
        return folder
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(CONFIGS[name], indent=2))
    (partial / "tokenizer.json").write_text(made_up_tokenizer(CONFIGS[name]["vocab_size"]))
    shutil.copyfile(DATA / "tokenizer_config.json", partial / "tokenizer_config.json")
    # Not at the top: the measured client must not load torch.
    from benchmarks.random_weights import save_weights

    save_weights(partial, device)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def make_pair(out_dir: str | Path, kept: int = 2, times: int = 3, share: float = 0.03) -> None:
    """Write `target` and `draft` to `out_dir`: the draft model is the first `kept` layers of model
    "b"; the target adds its other layers, `times` over, with a `share` of their output. So the two
    agree often, as models of one family do."""
    import torch
    from safetensors.torch import load_file, save_file

    source = make_model("b", Path(out_dir) / "b")
    stored: dict[str, torch.Tensor] = load_file(source / "model.safetensors")
    draft: dict[str, torch.Tensor] = {}
    target: dict[str, torch.Tensor] = {}
    layers = CONFIGS["b"]["num_hidden_layers"]
    for name, tensor in stored.items():
        parts = name.split(".")
        if "layers" not in parts or int(parts[2]) < kept:
            draft[name] = target[name] = tensor
            continue
        scaled = tensor * share if parts[-2] in ("o_proj", "down_proj") else tensor
        for more in range(times):
            number = int(parts[2]) + more * (layers - kept)
            target[".".join((*parts[:2], str(number), *parts[3:]))] = scaled.clone()
    for called, weights, count in (
        ("target", target, kept + times * (layers - kept)),
        ("draft", draft, kept),
    ):
        folder = Path(out_dir) / called
        folder.mkdir(exist_ok=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(source / file, folder / file)
        config = CONFIGS["b"] | {"num_hidden_layers": count}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})


def made_up_tokenizer(size: int) -> str:
    """Make a byte-level BPE `tokenizer.json` of `size` tokens, mostly words of four letters.

    A state allows about as many tokens as in a real vocabulary, on which the cost of constraints
    depends, without a corpus and without training.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
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
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return str(tokenizer.to_str())
