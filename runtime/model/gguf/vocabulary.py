"""The tokens of a GGUF file: what it says of them, and which begin and end a text."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

from rootlace.runtime.model.gguf.file import GgufFile
from rootlace.wire.errors import UnsupportedModel

MODELS = ("llama", "gpt2")
"""SentencePiece's merges by score, and BPE on bytes."""

ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<｜end▁of▁sentence｜>",
    )
)
"""Tokens that end a text or a turn wherever they are: files name one of them at most. llama.cpp
takes them so too, and as special ones whatever the file says."""

BEGINNING = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")
"""Pre-tokenizers whose texts begin with a token where the file does not say."""


class Kind(IntEnum):
    """What a token is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """`kinds` and `scores` are as many as `tokens`; scores of `gpt2` mean nothing. `bos` is put
    before a text if `begins`; `ends` end it."""

    file: GgufFile
    model: str
    pre: str
    tokens: list[str]
    kinds: Sequence[int]
    scores: Sequence[float]
    bos: int | None
    eos: int | None
    unknown: int | None
    ends: tuple[int, ...]
    begins: bool
    space_prefix: bool

    @classmethod
    def read(cls, file: GgufFile) -> Vocabulary:
        """Raises `UnsupportedModel`, naming the key, for a vocabulary that is not sound or not of a
        kind that is known."""
        keys = _Keys(file)
        model = keys("model", str)
        if model not in MODELS:
            keys.refuse("model", f"{model!r} is not supported (supported: {', '.join(MODELS)})")
        pre = keys("pre", str, None)
        if pre is None and model == "gpt2":
            keys.refuse(
                "pre",
                "it is missing: an old file, of which nobody knows how it splits text; "
                "take one that was converted since",
            )
        tokens = _tokens(keys)
        kinds = keys.numbers("token_type", len(tokens), array("i", [Kind.NORMAL]) * len(tokens))
        scores = keys.numbers("scores", len(tokens), array("f", [0.0]) * len(tokens))
        kinds = [
            Kind.CONTROL if token in ENDS and kind != Kind.UNUSED else kind
            for token, kind in zip(tokens, kinds, strict=True)
        ]
        spm = model == "llama"
        default = (1, 2, 0) if spm else (None, None, None)
        names = ("bos_token_id", "eos_token_id", "unknown_token_id")
        bos, eos, unknown = (
            keys.token(name, len(tokens), value) for name, value in zip(names, default, strict=True)
        )
        named = [eos, *(keys.token(f"{name}_token_id", len(tokens)) for name in ("eot", "eom"))]
        found = [index for index, token in enumerate(tokens) if token in ENDS]
        ends = dict.fromkeys([one for one in named if one is not None] + found)
        begins = keys("add_bos_token", bool, spm or pre in BEGINNING)
        if begins and bos is None:
            keys.refuse("add_bos_token", "there is no bos_token_id")
        return cls(
            file,
            model,
            pre or "default",
            tokens,
            kinds,
            scores,
            bos,
            eos,
            unknown,
            tuple(ends),
            begins,
            keys("add_space_prefix", bool, spm),
        )

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raises `UnsupportedModel` about a key of the tokenizer."""
        _Keys(self.file).refuse(key, why)


class _Keys:
    """The keys `tokenizer.ggml.*`."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def __call__(self, key: str, kind: type, default: Any = ...) -> Any:
        found = self._file.metadata.get(f"tokenizer.ggml.{key}", default)
        if found is ...:
            self.refuse(key, "it is missing")
        if found is not default and type(found) is not kind:
            self.refuse(key, f"it is not of type {kind.__name__}")
        return found

    def numbers(self, key: str, count: int, default: Sequence[Any]) -> Sequence[Any]:
        found: Sequence[Any] = self(key, array, default)
        if len(found) != count:
            self.refuse(key, f"there are {len(found)} for {count} tokens")
        return found

    def token(self, key: str, count: int, default: int | None = None) -> int | None:
        """A token's id, None where there is none."""
        found: int | None = self(key, int, default)
        if found is not None and not 0 <= found < count:
            self.refuse(key, f"{found} is not among {count} tokens")
        return found

    def refuse(self, key: str, why: str) -> NoReturn:
        raise UnsupportedModel(f"{self._file.path}: tokenizer.ggml.{key}: {why}")


def _tokens(keys: _Keys) -> list[str]:
    found = keys("tokens", list)
    # As llama.cpp calls them: no two tokens may be the same.
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(found)]
    if not tokens or any(type(token) is not str for token in found):
        keys.refuse("tokens", "it is not a list of texts")
    if len(set(tokens)) < len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        keys.refuse("tokens", f"{twice!r} is there twice")
    return tokens
