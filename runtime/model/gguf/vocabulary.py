"""The tokens of a GGUF file: what it says of them, and which begin and end a text."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn, Protocol

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
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|tool_response>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<｜end▁of▁sentence｜>",
    )
)
"""Tokens that end a text or a turn wherever they are: files name one of them at most. llama.cpp
takes them so too, and as special ones whatever the file says."""

_FILLING_ENDS = frozenset(
    (
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<fim-repo>", "<REPO>", "<|repo_name|>", "<reponame>"),
        "<|file_sep|>",
    )
)
"""Tokens that follow what a model of code has filled in: padding, another repository or file.
Prompts have them, too, so they are special only where the file says so."""

_CLOSING_TAG = "</s>"
"""It ends a text where it is a special token; elsewhere it is a tag of HTML. (llama.cpp lets it end
the texts of all models but Gemma 4 and PLaMo.)"""

BEGINNING = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")
"""Pre-tokenizers whose texts begin with a token where the file does not say."""


_MARKER = re.compile(r"<(?!0x)[^<>\s]+>|\[[A-Z_/]+\]")
"""What markers of turns and tools look like."""


class Kind(IntEnum):
    """What a token is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class TokensFile(Protocol):
    """What a vocabulary is read from: a GGUF file, or another one that has the same keys."""

    @property
    def path(self) -> Path: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Vocabulary:
    """`kinds` and `scores` are as many as `tokens`; scores of `gpt2` mean nothing. `bos` is put
    before a text if `begins`; `ends` end it. `remarks` are for whoever serves the file."""

    file: TokensFile
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
    remarks: tuple[str, ...] = ()

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
        spm = model == "llama"
        default = (1, 2, 0) if spm else (None, None, None)
        names = ("bos_token_id", "eos_token_id", "unknown_token_id")
        bos, eos, unknown = (
            keys.token(name, len(tokens), value) for name, value in zip(names, default, strict=True)
        )
        others = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        named = [eos, *(keys.token(f"{name}_token_id", len(tokens)) for name in others)]
        ends = _ends(tokens, kinds, [index for index in named if index is not None])
        kinds = [
            Kind.CONTROL if kind != Kind.UNUSED and token in ENDS and index in ends else kind
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        ]
        if "tokenizer.ggml.token_type" not in file.metadata:
            keys.remarks += _markers(file, tokens, kinds)
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
            ends,
            begins,
            keys("add_space_prefix", bool, spm),
            tuple(keys.remarks),
        )

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raises `UnsupportedModel` about a key of the tokenizer."""
        _Keys(self.file).refuse(key, why)


class _Keys:
    """The keys `tokenizer.ggml.*`."""

    def __init__(self, file: TokensFile) -> None:
        self._file = file
        self.remarks: list[str] = []

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
        """A token's id, None where there is none. One that is not among the tokens, such as the
        2^32 - 1 that converters made of -1, is none, as in llama.cpp."""
        found: int | None = self(key, int, default)
        if found is not None and not 0 <= found < count:
            self.remarks.append(
                f"tokenizer.ggml.{key} {found} is passed over: it is not among {count} tokens"
            )
            found = default if default is not None and default < count else None
        return found

    def refuse(self, key: str, why: str) -> NoReturn:
        raise UnsupportedModel(f"{self._file.path}: tokenizer.ggml.{key}: {why}")


def _markers(file: TokensFile, tokens: list[str], kinds: Sequence[int]) -> list[str]:
    """What becomes of the markers, if there are any, of a file that does not say which of its
    tokens are special."""
    marks = [
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == Kind.NORMAL and _MARKER.fullmatch(token)
    ]
    template = str(file.metadata.get("tokenizer.chat_template", ""))
    marks = [token for token in marks if token in template] or marks
    shown = f"{', '.join(marks[:4])}{' ...' if marks[4:] else ''}"
    told = (
        "tokenizer.ggml.token_type is missing: no token is known to be special but those that end "
        f"a text by their names. Markers ({len(marks)}: {shown}) are read as text, cut into other "
        "tokens than the model was trained with: chats may go wrong. Take a file that was "
        "converted since"
    )
    return [told] if marks else []


def _ends(tokens: list[str], kinds: Sequence[int], named: list[int]) -> tuple[int, ...]:
    """The tokens that end a text: those that the file names, and those known by their names."""
    found = [
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if token in ENDS
        or token in _FILLING_ENDS
        or (token == _CLOSING_TAG and kind == Kind.CONTROL)
    ]
    ends = dict.fromkeys(named + found)
    names = {tokens[index] for index in ends}
    dropped = set()
    if not names.isdisjoint(("<|call|>", "<|calls|>")) and (
        not names.isdisjoint(("<|return|>", "<|flush|>"))
    ):
        dropped.add("<|end|>")  # in Harmony it ends a message, which others may follow
    if "<|tool_response>" in names:
        dropped.add(_CLOSING_TAG)
    return tuple(index for index in ends if tokens[index] not in dropped)


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
