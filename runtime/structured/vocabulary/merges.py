"""Byte pair encoding within one piece of a text: its tokens, and those it has however it goes on.

A sequence is canonical within a piece if and only if each two neighbours are: BPE(T) = t_1 … t_n if
and only if BPE(t_i t_(i+1)) = t_i t_(i+1) for all i. (Take the first merge that crosses a boundary
in T. Before it every t_i was merged by itself, in the order that the merge ranks give, which is the
order in the pair too; so the same merge happens in the pair, and the reverse.) Hence any BPE(Qy)
begins with BPE(Q), or with BPE(Q') and a token u that runs over the end of Q, where Q = Q's, u = sz
with z a beginning of y, and the last token of BPE(Q') and u are such a pair. All u that the
constraint lets follow are looked at, and what all these ways have in common is forced.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection
from functools import lru_cache
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

from rootlace.runtime.structured.vocabulary.pretokens import Following
from rootlace.runtime.structured.vocabulary.vocabulary import bytes_after

# Pairs of tokens tried for one end; beyond, it counts as unsafe.
MAX_PAIRS = 4096

Tokens = tuple[int, ...]


class Merges:
    """The merges of one tokenizer. Thread-safe.

    `neighbours` holds each two characters that stand side by side in some token, if `whole_text`:
    where no pre-tokenizer cuts the text, it can be cut between all others.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: dict[str, Any],
        token_bytes: list[bytes],
        not_merged: Collection[int],
        byte_level: bool,
        space: str,
        whole_text: bool,
    ) -> None:
        """`spec` is the JSON of `tokenizer`, `not_merged` the tokens that no merge gives. `space`
        is the character that stands for a space in the names of tokens; empty if none does."""
        self._bytes = token_bytes
        self._space = space
        self._whole = tokenizer.model
        self._merges = self._whole
        if spec["model"].get("ignore_merges"):
            merging = {**spec, "model": {**spec["model"], "ignore_merges": False}}
            self._merges = Tokenizer.from_str(json.dumps(merging)).model
        self._to_byte_level = _byte_alphabet() if byte_level else None
        self._index(spec["model"], not_merged, whole_text)
        self._bpe = lru_cache(1 << 14)(self._bpe_uncached)
        self._pairs = lru_cache(1 << 18)(self._is_pair)

    def piece(self, text: str) -> Tokens:
        """The tokens of a piece that ends where it ends."""
        data = text.encode()
        if self._whole is self._merges:
            return self._bpe(data)
        return tuple(token.id for token in self._whole.tokenize(self._symbols(data)))

    def _bpe_uncached(self, data: bytes) -> Tokens:
        """The tokens of a piece, by merging; `data` may cut characters where symbols are bytes."""
        return tuple(token.id for token in self._merges.tokenize(self._symbols(data)))

    def _symbols(self, data: bytes) -> str:
        if self._to_byte_level is not None:
            return data.decode("latin-1").translate(self._to_byte_level)
        return data.decode().replace(" ", self._space) if self._space else data.decode()

    def open_piece(self, text: str, following: Following) -> Tokens:
        """The first tokens of a piece that begins with `text` and goes on, whatever follows."""
        data = text.encode()
        tokens = self._bpe(data)
        ways: list[tuple[int, int, int | None]] = []  # tokens left, where u begins, token before
        for start in range(max(0, len(data) - self._longest + 1), len(data)):
            if self._to_byte_level is None and data[start] & 0xC0 == 0x80:
                continue
            if self._has_longer(data[start:]):
                left = self._bpe(data[:start])
                ways.append((common(tokens, left), start, left[-1] if left else None))
        for kept, start, before in sorted(ways, key=lambda way: way[0]):
            if kept >= len(tokens):
                break
            if self._can_run_over(data[start:], before, following):
                return tokens[:kept]
        return tokens

    def _can_run_over(self, begun: bytes, before: int | None, following: Following) -> bool:
        """Whether a token that begins with `begun` and goes on may stand behind `before`."""
        words = self._words
        index = bisect_left(words, begun + b"\0")
        tried = 0
        while index < len(words) and words[index].startswith(begun):
            word = words[index]
            bad = following.shortest_forbidden(word[len(begun) :])
            if bad is not None:
                index = bisect_left(words, bytes_after(word[: len(begun) + bad]), index + 1)
                continue
            if tried == MAX_PAIRS or self._pairs(before, self._ids[index]):
                return True
            tried += 1
            index += 1
        return False

    def _has_longer(self, begun: bytes) -> bool:
        index = bisect_left(self._words, begun + b"\0")
        return index < len(self._words) and self._words[index].startswith(begun)

    def _is_pair(self, before: int | None, token: int) -> bool:
        """Whether the tokenizer gives these two to their text (None: the piece begins there)."""
        if before is None or before in self._fallback:
            if self._whole is not self._merges:
                return True  # a whole piece that is a token is that token
            return self._bpe_uncached(self._bytes[token]) == (token,)
        text = self._bytes[before] + self._bytes[token]
        return self._bpe_uncached(text) == (before, token)

    def _index(self, model: dict[str, Any], not_merged: Collection[int], whole_text: bool) -> None:
        """The tokens that merging can give, in the order of their bytes."""
        vocab: dict[str, int] = model["vocab"]
        fallback = bool(model.get("byte_fallback"))
        words: list[tuple[bytes, int]] = []
        self.neighbours: set[str] = set()
        self._fallback: set[int] = set()  # single bytes of characters that no token has
        for name, token in vocab.items():
            if token in not_merged or token >= len(self._bytes) or not self._bytes[token]:
                continue
            if fallback and len(name) == 6 and name.startswith("<0x"):
                self._fallback.add(token)
                continue
            words.append((self._bytes[token], token))
            if whole_text:
                spelled = name.replace(self._space, " ") if self._space else name
                self.neighbours.update(map("".join, pairwise(spelled)))
        words.sort()
        self._words = [word for word, _ in words]
        self._ids = [token for _, token in words]
        self._longest = max(map(len, self._words), default=0)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's characters for bytes: printable ones stand for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return table


def common(left: Tokens, right: Tokens) -> int:
    """How many first tokens are the same."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
