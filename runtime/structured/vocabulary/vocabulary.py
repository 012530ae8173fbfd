"""A tokenizer for constrained decoding: the bytes of each token, and canonical tokens."""

from __future__ import annotations

import json
import sys
import unicodedata
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rootlace.wire.errors import InvalidConstraint

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers.models import BPE

# Order --------------------------------------------------------------------------------------------
#
# The tokens of a vocabulary in the order of their bytes, to find tokens by a prefix.


class TokenOrder:
    """Order of tokens by their bytes. Immutable; safe to share between threads. Tokens without
    bytes are left out.

    `tokens` int32: the tokens by their bytes, those of the same bytes by their numbers; `texts`:
    these bytes.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        # One sort of all tokens, or one array of a list of all, would block other threads.
        parts: dict[bytes, list[int]] = {}
        for token, data in enumerate(token_bytes):
            parts.setdefault(data[:2], []).append(token)
        parts.pop(b"", None)
        order = (
            i for key in sorted(parts) for i in sorted(parts[key], key=token_bytes.__getitem__)
        )
        self.tokens = np.fromiter(order, np.int32)
        self.texts = [token_bytes[token] for token in self.tokens.tolist()]

    def beginning_with(self, prefix: bytes) -> np.ndarray:
        """Return the tokens whose bytes begin with `prefix`, int32."""
        start = bisect_left(self.texts, prefix)
        return self.tokens[start : bisect_left(self.texts, bytes_after(prefix), start)]


def bytes_after(prefix: bytes) -> bytes:
    """Return the least bytes above all bytes that begin with `prefix` (of at most a token's
    length)."""
    prefix = prefix.rstrip(b"\xff")
    return prefix[:-1] + bytes((prefix[-1] + 1,)) if prefix else b"\xff" * 256


# Byte trie ----------------------------------------------------------------------------------------
#
# The vocabulary as a trie over bytes, in flat arrays: what automata are walked against.
#
# Nodes are numbered level by level (the root is 0), each level by parent, then byte. So the
# children of a node are a run of nodes, and one level of a walk is a few operations on whole
# arrays.


class ByteTrie:
    """Trie of the tokens' bytes. Immutable; safe to share between threads. Tokens without bytes are
    left out.

    With N nodes and tokens of V ids:
    `levels`: the first node of each level, and N at the end;
    `byte` uint8 [N]: the byte that leads to each node (the root: 0);
    `above` int64 [N]: the parent of each node, as an index into its own level (the root: 0);
    `children` int32 [N + 1]: the children of n are the nodes `children[n] : children[n + 1]`;
    `node` int64 [32 * ceil(V / 32)]: the node where each token ends; N for a token without bytes.
    """

    def __init__(self, order: TokenOrder, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        end = self._build(order.texts)
        self.node = np.full(-(-self.vocab_size // 32) * 32, self.num_nodes, np.int64)
        self.node[order.tokens] = end

    @property
    def num_nodes(self) -> int:
        return len(self.byte)

    def _build(self, texts: list[bytes]) -> np.ndarray:
        """Build the levels from sorted texts, which split where their next bytes differ. Returns
        the node where each text ends."""
        lengths = np.array([len(text) for text in texts], np.int32)
        data = np.frombuffer(b"".join(texts), np.uint8)
        at = np.cumsum(lengths, dtype=np.int64) - lengths
        node = np.zeros(len(texts), np.int64)  # position of each text
        alive = np.arange(len(texts))
        bytes_, above = [np.zeros(1, np.uint8)], [np.zeros(1, np.int64)]
        self.levels = [0, 1]
        depth = 0
        while len(alive):
            byte, parent = data[at[alive] + depth], node[alive]
            fresh = np.ones(len(alive), bool)
            fresh[1:] = (parent[1:] != parent[:-1]) | (byte[1:] != byte[:-1])
            where = np.flatnonzero(fresh)
            node[alive] = np.cumsum(fresh) + (self.levels[-1] - 1)
            bytes_.append(byte[where])
            above.append(parent[where] - self.levels[-2])
            self.levels.append(self.levels[-1] + len(where))
            depth += 1
            alive = alive[lengths[alive] > depth]
        self.byte, self.above = np.concatenate(bytes_), np.concatenate(above)
        parents = self.above[1:] + np.repeat(self.levels[:-2], np.diff(self.levels[1:]))
        counts = np.bincount(parents.astype(np.int64), minlength=len(self.byte))
        self.children = np.ones(len(self.byte) + 1, np.int32)
        self.children[1:] += np.cumsum(counts, dtype=np.int32)
        return node


# Characters ---------------------------------------------------------------------------------------
#
# Characters that can affect the text before them: by class, by first byte, under NFC.


# One or more characters of every general category beyond ASCII. Scripts without case are told
# apart because some tokenizers name their blocks.
SAMPLES = (
    "Д", "д", "ſ", "ǅ", "ʰ", "中", "あ", "ア", "한", "ا", "ก", "\u0301", "\u0903", "\u20dd",
    "٣", "Ⅷ", "²", "‿", "—", "（", "）", "«", "»", "’", "。", "…", "±", "€", "´", "☃", "😀",
    "\u00a0", "\u3000", "\u2028", "\u2029", "\u0085", "\u200b", "\ue000", "\u0378",
)  # fmt: skip


@cache
def categories_by_first_byte() -> dict[int, frozenset[str]]:
    """Map a UTF-8 lead byte (0xC2 to 0xF4) to the general categories of its characters. Characters
    of four bytes count as any category."""
    found: dict[int, set[str]] = {}
    for code in range(0x80, 0x10000):
        if not 0xD800 <= code < 0xE000:
            found.setdefault(_first_byte(code), set()).add(unicodedata.category(chr(code)))
    every = set().union(*found.values())
    found.update(dict.fromkeys(range(0xF0, 0xF5), every))
    return {byte: frozenset(categories) for byte, categories in found.items()}


@cache
def first_bytes_of(category: str) -> tuple[int, ...]:
    """Return the lead bytes of this general category by `categories_by_first_byte`, ascending."""
    found = categories_by_first_byte()
    return tuple(sorted(byte for byte, categories in found.items() if category in categories))


def _first_byte(code: int) -> int:
    """Return the first byte of the UTF-8 of a code point from 0x80 to 0xFFFF."""
    return 0xC0 | code >> 6 if code < 0x800 else 0xE0 | code >> 12


class Composition:
    """Characters that NFC may change where two texts meet (Unicode Standard Annex 15).

    A continuation may change characters of `takes`. Characters of `joins` may change the text
    before them. All other characters are boundaries of normalization.
    """

    def __init__(self) -> None:
        takes: set[str] = set()
        joins: set[str] = set()
        for code in range(0xC0, sys.maxunicode + 1):
            character = chr(code)
            if unicodedata.combining(character):
                takes.add(character)
                joins.add(character)
            parts = unicodedata.decomposition(character)
            if parts and not parts.startswith("<"):
                points = [chr(int(part, 16)) for part in parts.split()]
                takes.add(character)
                takes.add(points[0])
                joins.update(points[1:])
        for code in range(0x1100, 0x1200):  # Hangul, composed by arithmetic
            (takes if code < 0x1160 else joins).add(chr(code))
        takes.update(map(chr, range(0xAC00, 0xD7A4, 28)))
        self.takes = frozenset(takes)
        self.joins = frozenset(joins)
        self.join_prefixes = sorted({join.encode()[:2] for join in joins})

    def changes(self, text: str) -> int:
        """Return the length of the longest prefix of `text` that NFC leaves unchanged with every
        rest; len(text) for normalized text."""
        if unicodedata.is_normalized("NFC", text):
            return len(text)
        end = 0
        start = 0
        for position in range(1, len(text) + 1):
            if position == len(text) or text[position] not in self.joins:
                if not unicodedata.is_normalized("NFC", text[start:position]):
                    return end
                start = end = position
        return end


@cache
def composition() -> Composition:
    return Composition()


# Bitmask ------------------------------------------------------------------------------------------
#
# Packed masks: int32 words, bit i of word w is token 32w + i.


def words_of(vocab_size: int) -> int:
    """Return the number of int32 words in a mask over the vocabulary."""
    return -(-vocab_size // 32)


def writable(out: Any, vocab_size: int) -> np.ndarray:
    """Return `out`, a caller's mask to fill, as an array; a torch tensor on the CPU as an array
    over its memory.

    Raises TypeError for any other type. Raises ValueError unless `out` is a contiguous, writable
    int32 array with the vocabulary's number of words: some machines write to its address.
    """
    if not isinstance(out, np.ndarray):
        view = getattr(out, "numpy", None)
        if view is None:
            raise TypeError(f"a bit mask is a NumPy array of int32, not {type(out).__name__}")
        out = view()
    words = words_of(vocab_size)
    if out.dtype != np.int32 or out.shape != (words,):
        raise ValueError(
            f"a bit mask over {vocab_size} tokens is int32 [{words}], not {out.dtype} "
            f"{list(out.shape)}"
        )
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("a bit mask must be contiguous and writable")
    return out


def address(words: np.ndarray) -> int:
    """Return a writable packed mask's address, in a fifth of the time of `words.ctypes.data`."""
    return addressof(c_char.from_buffer(words.data))


def allows(words: np.ndarray, token: int) -> bool:
    """Return whether a packed mask allows a token of the vocabulary."""
    return bool(words.item(token >> 5) >> (token & 31) & 1)


def packed(bits: np.ndarray) -> np.ndarray:
    """Pack `bits`, bool with a multiple of 32 elements, into int32 words."""
    words: np.ndarray = np.packbits(bits, bitorder="little").view(np.int32)
    return words


def filled(fill: Callable[[np.ndarray], None], vocab_size: int) -> np.ndarray:
    """Return the packed mask that `fill` writes as bool [vocab_size]."""
    words = np.zeros(words_of(vocab_size), np.int32)
    fill(words)
    return unpacked(words, vocab_size)


def unpacked(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return a packed mask as bool [vocab_size]."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(bool)


# Vocabulary ---------------------------------------------------------------------------------------


class Vocabulary:
    """Tokens of one model. Immutable; safe to share between threads.

    `size`: the model's vocabulary, which is the number of logits; a model may pad its tokenizer's.
    `token_bytes[i]`: the text of token i as bytes. It is empty for special tokens, for tokens that
    end the sequence and for padding, which are never text.
    """

    def __init__(self, tokenizer_json: str, size: int, eos_token_ids: list[int]) -> None:
        """Read a tokenizer. Raises InvalidConstraint if the bytes of its tokens are unknown, or if
        vocabulary and merges disagree."""
        self.size = size
        self.tokenizer_json = zlib.compress(tokenizer_json.encode(), 1)
        """The tokenizer's JSON, compressed with zlib, for a compiler in another process."""
        self.eos_token_ids = tuple(eos_token_ids)
        spec = json.loads(tokenizer_json)
        self.bpe = _taken_bpe(spec["model"])
        """The tokenizer's model if the model merges pairs; the model caches no result."""
        self.settings = json.dumps(spec)
        """Tokenizer's JSON without the vocabulary and merges of its model, as one text: lasting
        objects would be scattered over the memory of temporary ones."""
        added = spec.get("added_tokens", [])
        special = [token for token in added if token["special"] and token["id"] < size]
        self.special_token_ids = frozenset(token["id"] for token in special) | set(eos_token_ids)
        self.special_tokens: dict[str, int] = {
            token["content"]: token["id"]
            for token in added
            if token["content"] and token["id"] in self.special_token_ids
        }
        """Special tokens that tokenizers find in text, by content."""
        self.token_bytes = self._read_bytes(tokenizer_json)

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, size: int | None = None, eos_token_ids: list[int] | None = None
    ) -> Vocabulary:
        """Return the vocabulary of a transformers fast tokenizer, or of a `tokenizers.Tokenizer`
        (then name the EOS ids).

        Raises TypeError for anything else, and ValueError if the tokenizer names no end of the
        sequence.
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

    @cached_property
    def llguidance(self) -> LLTokenizer:
        """Same vocabulary for llguidance's matchers; built at first use (seconds for 150k)."""
        from llguidance import LLTokenizer, TokenizerWrapper

        # Matchers ask for them on the engine's thread.
        _ = self.byte_tokens, self.order, self.special_mask
        wrapper = TokenizerWrapper(_Callable(self))
        made = LLTokenizer(
            wrapper, n_vocab=self.size, eos_token=list(self.eos_token_ids), slices=list(_SLICES)
        )
        wrapper.tokens = ()  # llguidance has its own copy now
        return made

    @cached_property
    def trie(self) -> ByteTrie:
        """All tokens that are text, as a trie; built at first use (about 0.1 s for 150k)."""
        return ByteTrie(self.order, self.size)

    @cached_property
    def order(self) -> TokenOrder:
        """Tokens sorted by their bytes; built at first use (a fraction of a second)."""
        return TokenOrder(self.token_bytes)

    @cached_property
    def digits(self) -> list[np.ndarray]:
        """Tokens that begin with at least n digits, by n, int32; the last entry is empty."""
        of_digits = [self.order.beginning_with(b"%d" % digit) for digit in range(10)]
        found = [np.concatenate(of_digits)]
        while len(found[-1]):
            count = len(found)
            longer = [t for t in found[-1].tolist() if self.token_bytes[t][:count].isdigit()]
            longer = [t for t in longer if len(self.token_bytes[t]) >= count]
            found.append(np.array(longer, np.int32))
        return found

    @cached_property
    def without_zeros(self) -> np.ndarray:
        """Packed mask of the tokens without a zero byte, int32."""
        return self._packed([0 not in data for data in self.token_bytes])

    @cached_property
    def special_mask(self) -> np.ndarray:
        """Packed mask of the special tokens that do not end the sequence, int32."""
        inner = self.special_token_ids.difference(self.eos_token_ids)
        return self._packed([token in inner for token in range(self.size)])

    @cached_property
    def any_mask(self) -> np.ndarray:
        """Packed mask of all tokens that are text, or special, int32."""
        special = self.special_token_ids
        return self._packed([bool(d) or i in special for i, d in enumerate(self.token_bytes)])

    @cached_property
    def full_mask(self) -> np.ndarray:
        """Packed mask of all tokens, including tokens without bytes, int32."""
        return self._packed([True] * self.size)

    @lru_cache(maxsize=64)  # noqa: B019 (a vocabulary lives as long as its process)
    def going_on_behind(self, text: bytes, begin: bool = False) -> tuple[int, ...]:
        """Return the tokens with `text` (at the start if `begin`) and more than white space behind
        it."""
        data = self.token_bytes
        if begin:
            found = self.order.beginning_with(text).tolist()
        else:
            found = [token for token, one in enumerate(data) if text in one]
        return tuple(token for token in found if data[token].partition(text)[2].strip())

    def _packed(self, tokens: list[bool]) -> np.ndarray:
        bits = np.zeros(words_of(self.size) * 32, bool)
        bits[: self.size] = tokens
        return packed(bits)

    @cached_property
    def byte_tokens(self) -> list[int]:
        """Map from each byte to a token that is this byte, or to -1."""
        tokens = [-1] * 256
        for token, data in enumerate(self.token_bytes):
            if len(data) == 1:
                tokens[data[0]] = token
        return tokens

    def bytewise(self, text: bytes) -> list[int] | None:
        """Return the text in tokens of one byte each; None where the vocabulary lacks one."""
        tokens = [self.byte_tokens[byte] for byte in text]
        return None if -1 in tokens else tokens

    def token_of(self, text: bytes) -> int | None:
        """Return the token that is this text, the last of several; None without one."""
        texts = self.order.texts
        at = bisect_right(texts, text) - 1
        return self.order.tokens.item(at) if at >= 0 and texts[at] == text else None

    def _read_bytes(self, tokenizer_json: str) -> list[bytes]:
        """Return `token_bytes`. Their reader takes as much memory as the rest, and is dropped."""
        from llguidance import LLTokenizer  # late: a gateway needs this module, and no tokens

        try:
            reader = LLTokenizer(
                tokenizer_json, n_vocab=self.size, eos_token=list(self.eos_token_ids), slices=[]
            )
        except ValueError as error:
            raise _unreadable(error) from None
        found = [reader.decode_bytes([token]) for token in range(self.size)]
        for token, data in enumerate(found):
            if token in self.special_token_ids or data == b"<[%d]>" % token:
                found[token] = b""
        return found


def _taken_bpe(model: dict[str, Any]) -> BPE | None:
    """Take vocabulary and merges out of a tokenizer's JSON; return their BPE, None for another
    model.

    A tokenizer that reads the JSON itself takes twice the memory afterwards. Raises
    InvalidConstraint if vocabulary and merges disagree.
    """
    from tokenizers.models import BPE

    vocab, merges = model.pop("vocab", None), model.pop("merges", [])
    if model.get("type") != "BPE":
        return None
    pairs = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
    options = {name: model[name] for name in _OF_BPE if model.get(name) is not None}
    try:
        return BPE(vocab=vocab, merges=pairs, cache_capacity=0, **options)
    except Exception as error:  # of no other type
        raise _unreadable(error) from None


def _unreadable(error: Exception) -> InvalidConstraint:
    return InvalidConstraint(f"no constraint can be enforced with this tokenizer: {error}")


_OF_BPE = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback"),
)


_SLICES = (r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]{1,30}')
"""Slices: tokens that llguidance handles together, within strings of JSON, also of bounded length.

Each slice is two tries of the vocabulary. llguidance's own slices for white space and for strings
of any length speed up no mask beside these two.
"""


class _Callable:
    """Tokenizer interface of llguidance's wrapper."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(vocabulary.special_token_ids)
        self._vocabulary = vocabulary

    @property
    def tokens(self) -> list[bytes]:
        """Return the tokens' bytes. Without own names llguidance's masks could not separate special
        tokens."""
        special = self._vocabulary.special_token_ids
        texts = enumerate(self._vocabulary.token_bytes)
        return [b"[%d]" % token if token in special else data for token, data in texts]

    def __call__(self, text: bytes) -> list[int]:
        """Return some tokens of a text: llguidance needs canonical tokens only to force text, and
        `forced_tokens` forces text here."""
        return self._vocabulary.bytewise(text) or []
