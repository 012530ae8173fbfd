"""A tokenizer as constrained decoding sees it: the bytes of each token, and canonical tokens."""

from __future__ import annotations

import json
import re
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from rootlace.runtime.constrained.tokens import bitmask
from rootlace.runtime.constrained.tokens.byte_trie import ByteTrie
from rootlace.runtime.constrained.tokens.order import TokenOrder
from rootlace.wire.errors import InvalidConstraint


class Vocabulary:
    """Tokens of one model. Immutable; safe to share between threads.

    `size` is the model's vocabulary (logits have that many columns, more than the tokenizer has
    tokens where the model pads it). `token_bytes[i]` is what token i stands for in text: empty for
    special tokens, for those that end the sequence and for padding; they are never text.
    """

    def __init__(self, tokenizer_json: str, size: int, eos_token_ids: list[int]) -> None:
        """Raises InvalidConstraint where the tokenizer does not say what bytes its tokens are, or
        the numbers do not agree with it."""
        self.size = size
        self.tokenizer_json = tokenizer_json
        self.eos_token_ids = tuple(eos_token_ids)
        added = json.loads(tokenizer_json).get("added_tokens", [])
        special = [token for token in added if token["special"] and token["id"] < size]
        try:
            self._own = LLTokenizer(tokenizer_json, n_vocab=size, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise InvalidConstraint(
                f"no constraint can be enforced with this tokenizer: {error}"
            ) from None
        self.special_token_ids = frozenset(token["id"] for token in special) | set(eos_token_ids)
        self.special_tokens: dict[str, int] = {
            token["content"]: token["id"]
            for token in added
            if token["content"] and token["id"] in self.special_token_ids
        }
        """The special tokens that tokenizers find in text, by content."""
        self.token_bytes: list[bytes] = [self._bytes(i) for i in range(size)]
        # llguidance's tokenizer makes special tokens of text that is spelled like one.
        contents = sorted((token["content"].encode() for token in special), key=len, reverse=True)
        self._special = re.compile(b"|".join(map(re.escape, contents))) if contents else None

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, size: int | None = None, eos_token_ids: list[int] | None = None
    ) -> Vocabulary:
        """Of a transformers fast tokenizer, or a `tokenizers.Tokenizer` (then name the EOS ids).

        Raises TypeError for anything else, ValueError where it names no end of the sequence.
        """
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not (hasattr(backend, "to_str") and hasattr(backend, "get_vocab")):
            raise TypeError(
                "constraints need a fast tokenizer of transformers (or a tokenizers.Tokenizer), "
                f"not {type(tokenizer).__name__}"
            )
        if size is None:
            size = max(
                len(tokenizer) if hasattr(tokenizer, "__len__") else 0,
                1 + max(backend.get_vocab().values()),
            )
        if eos_token_ids is None:
            eos = getattr(tokenizer, "eos_token_id", None)
            if eos is None:
                raise ValueError("the tokenizer names no end-of-sequence token; give eos_token_ids")
            eos_token_ids = [eos]
        return cls(backend.to_str(), size, eos_token_ids)

    def encode(self, text: bytes) -> list[int]:
        """The canonical tokens of a text: no BOS, and special tokens are not recognised in it."""
        ids: list[int] = []
        start = 0
        for match in self._special.finditer(text) if self._special else ():
            cut = match.start() + 1  # no special token is seen in either part
            ids += self._own.tokenize_bytes(text[start:cut])
            start = cut
        return ids + self._own.tokenize_bytes(text[start:])

    @cached_property
    def llguidance(self) -> LLTokenizer:
        """The same vocabulary for llguidance's matchers; built at first use (seconds for 150k)."""
        # Matchers ask for them on the engine's thread.
        _ = self.byte_tokens, self.token_of, self.special_mask
        return LLTokenizer(
            TokenizerWrapper(_Callable(self)),
            n_vocab=self.size,
            eos_token=list(self.eos_token_ids),
        )

    @cached_property
    def trie(self) -> ByteTrie:
        """All tokens that are text; built at first use (about 0.1 s for 150k)."""
        return ByteTrie(self.token_bytes)

    @cached_property
    def order(self) -> TokenOrder:
        """The tokens sorted by their bytes; built at first use (a fraction of a second)."""
        return TokenOrder(self.token_bytes)

    @cached_property
    def without_zeros(self) -> np.ndarray:
        """int32: the packed mask of the tokens that have no zero byte."""
        return self._packed([0 not in data for data in self.token_bytes])

    @cached_property
    def special_mask(self) -> np.ndarray:
        """int32: the packed mask of the special tokens that do not end the sequence."""
        inner = self.special_token_ids.difference(self.eos_token_ids)
        return self._packed([token in inner for token in range(self.size)])

    @cached_property
    def any_mask(self) -> np.ndarray:
        """int32: the packed mask of all tokens that are text, or special ones."""
        special = self.special_token_ids
        return self._packed([bool(d) or i in special for i, d in enumerate(self.token_bytes)])

    @cached_property
    def joined(self) -> tuple[bytes, np.ndarray]:
        """The bytes of all tokens, a zero before each, and where they end."""
        ends = np.cumsum([1 + len(data) for data in self.token_bytes])
        return b"".join(b"\0" + data for data in self.token_bytes), ends

    @lru_cache(maxsize=64)  # noqa: B019 (a vocabulary lives as long as its process)
    def going_on_behind(self, text: bytes, begin: bool = False) -> tuple[int, ...]:
        """The tokens that hold a text, or `begin` with it, and have something else than white space
        behind it."""
        data, ends = self.joined
        needle = b"\0" + text if begin else text
        found, at = dict[int, None](), data.find(needle)
        while at >= 0:
            token = int(ends.searchsorted(at, "right"))
            if self.token_bytes[token].partition(text)[2].strip():
                found[token] = None
            at = data.find(needle, at + 1)
        return tuple(found)

    def _packed(self, tokens: list[bool]) -> np.ndarray:
        bits = np.zeros(bitmask.words_of(self.size) * 32, bool)
        bits[: self.size] = tokens
        return bitmask.packed(bits)

    @cached_property
    def byte_tokens(self) -> list[int]:
        """For each byte a token that is this byte, or -1."""
        tokens = [-1] * 256
        for token, data in enumerate(self.token_bytes):
            if len(data) == 1:
                tokens[data[0]] = token
        return tokens

    def bytewise(self, text: bytes) -> list[int] | None:
        """The text in tokens of one byte each; None where the vocabulary lacks one."""
        tokens = [self.byte_tokens[byte] for byte in text]
        return None if -1 in tokens else tokens

    @cached_property
    def token_of(self) -> dict[bytes, int]:
        """A token for each text that is one."""
        found = {data: token for token, data in enumerate(self.token_bytes)}
        found.pop(b"", None)
        return found

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self.special_token_ids:
            return b""
        data = self._own.decode_bytes([token_id])
        return b"" if data == b"<[%d]>" % token_id else data


class _Callable:
    """What llguidance's wrapper asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(vocabulary.special_token_ids)
        # Without names of their own llguidance's masks could not tell special tokens apart.
        self.tokens = [
            b"[%d]" % token if token in vocabulary.special_token_ids else data
            for token, data in enumerate(vocabulary.token_bytes)
        ]
        self._encode = vocabulary.encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)
