"""A random model with an English vocabulary.

The models of `benchmarks.random_models` have made-up words. English takes about one token per one
and a half characters with these, so prompts would have three times the usual tokens.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.programs.texts import Texts
from benchmarks.random_models import SPECIAL_TOKENS

WORDS = 10_000
"""Of the vocabulary are learnt; what a model has beyond them stands for nothing that is written."""


def with_vocabulary(model: Path, texts: Texts, folder: Path) -> Path:
    """Make the model with another tokenizer in `folder`; its weights are a link to the model's.

    The folder is the same every time, so that vLLM uses its compiled files again.
    """
    folder.mkdir(exist_ok=True)
    for path in model.iterdir():
        copy = folder / path.name
        if path.suffix == ".safetensors":
            copy.unlink(missing_ok=True)
            copy.symlink_to(path.resolve())
        elif path.name != "tokenizer.json":
            shutil.copyfile(path, copy)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    (folder / "tokenizer.json").write_text(_learnt(texts, size))
    return folder


def _learnt(texts: Texts, size: int) -> str:
    """Train a byte-level BPE `tokenizer.json`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(WORDS, size),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_strings(msgspec.to_builtins(dataclasses.asdict(texts))), trainer)
    found = json.loads(tokenizer.to_str())
    vocabulary = found["model"]["vocab"]
    vocabulary |= {f"<unused {place}>": place for place in range(len(vocabulary), size)}
    return json.dumps(found)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)
