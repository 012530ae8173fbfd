"""Random models to measure with: real shapes, no training. Seeded: the same weights every time.

`make_model("a", folder)` makes a checkpoint of about 15M parameters, `"b"` about 150M (both of the
Llama architecture), `"0.6B"` one of Qwen3 0.6B's shapes: bfloat16, with a byte-level BPE tokenizer
of 32,000 tokens trained on the running Python's standard library and a ChatML template, in Hugging
Face layout. Bigger models are made on
the device that they are measured on (`benchmarks/gpu/models.py`).
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODELS = Path.home() / ".cache" / "rootlace-bench"
"""Where models are kept unless told otherwise."""
VOCAB_SIZE = 32_000
CORPUS_CHARACTERS = 40_000_000
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""

FILE = Path(__file__).with_name("data") / "models.json"
CONFIGS: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
"""Each model's `config.json`: `a`, `b`, Qwen3 0.6B, Llama 3.2 1B, Llama 3.1 8B, one to try things
on."""
SHAPES = {size: CONFIGS[size] for size in ("a", "b", "0.6B")}
"""Those that are made as checkpoints."""


def make_model(size: str, out_dir: str | Path) -> Path:
    """Write the model of this size to `out_dir`, unless it is there, and return the folder.

    The folder appears only when it is complete. Raises `ValueError` for an unknown size.
    """
    if size not in SHAPES:
        raise ValueError(f"unknown size {size!r}; sizes are {', '.join(SHAPES)}")
    folder = Path(out_dir)
    if (folder / "config.json").exists():
        return folder
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(SHAPES[size], indent=2))
    # Not at the top: a client that is measured has no torch.
    from benchmarks.random_weights import save_weights

    save_weights(partial)
    _save_tokenizer(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(
            f"the standard library's text gave {tokenizer.get_vocab_size()} tokens, "
            f"not {VOCAB_SIZE}: is its source installed?"
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=8192,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _corpus() -> Iterator[str]:
    """The text of the standard library's modules, in order of their names."""
    left = CORPUS_CHARACTERS
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
