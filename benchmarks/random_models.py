"""Random checkpoints to measure with: real shapes, no training.

`make_model("a", folder)` makes about 15M parameters, `"b"` about 150M: Llama architecture,
bfloat16, with a byte-level BPE tokenizer of 32,000 tokens trained on the running Python's standard
library and a ChatML template, in Hugging Face layout. Seeded: the same weights every time.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODELS = Path.home() / ".cache" / "rootlace-bench"
"""Where models are kept unless told otherwise."""
VOCAB_SIZE = 32_000
SEED = 20_240_607
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

SHAPES: dict[str, dict[str, Any]] = {
    "a": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "b": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


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
    _save_weights(size, partial)
    _save_tokenizer(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _save_weights(size: str, folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **SHAPES[size],
    )
    generator = torch.Generator().manual_seed(SEED)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif "embed" in name or "lm_head" in name:
                parameter.normal_(0.0, 0.05, generator=generator)
            else:
                # Keeps activations at unit scale, so that logits are not flat.
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)


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
