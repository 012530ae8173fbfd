"""Byte pair encoding within one piece of a text: its tokens, and those that no continuation
changes.

A sequence is canonical within a piece if and only if each two neighbours are: BPE(T) = t_1 … t_n if
and only if BPE(t_i t_(i+1)) = t_i t_(i+1) for all i. (Take the first merge that crosses a boundary
in T. Before it every t_i was merged by itself, in the order that the merge ranks give, which is the
order in the pair too; so the same merge happens in the pair, and the reverse.) Hence any BPE(Qy)
begins with BPE(Q), or with BPE(Q') and a token u that runs over the end of Q. Here Q = Q's, u = sz
with z a beginning of y, and the last token of BPE(Q') and u are such a pair. The code tries every u
that the constraint allows, and forces the tokens that all ways have in common.
"""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

from tokenizers import Tokenizer

from rootlace.runtime.structured.vocabulary.vocabulary import (
    SAMPLES,
    TokenOrder,
    Vocabulary,
    bytes_after,
    first_bytes_of,
)

# Pre-tokenizer ------------------------------------------------------------------------------------
#
# The pieces into which a tokenizer cuts a text before merging, and the effect of continuations.
#
# A pre-tokenizer scans from left to right. Text right of a cut does not depend on text left of it.
# So a text can be analysed from a *sure* cut on: a cut that stands between two characters in any
# context. Sure cuts and the effects of continuations are found by experiments on the pre-tokenizer
# itself. They take one character of each class, and up to three if more than the next one can
# matter: white space (`\s+(?!\S)` and `\s*[\r\n]+`), contractions (`'re`) and groups of three
# digits.


PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
WHITE = {white: frozenset(white) for white in " \n\r"}
WHITE["\t"] = frozenset("\t\v\f\x1c\x1d\x1e\x1f\x85\u00a0\u2028\u2029\u3000")
CONTRACTIONS = ("s", "t", "re", "ve", "m", "ll", "d")
# Texts beside two characters in experiments on the cut between them.
LEFT = (
    *("", "a", "A", "中", "1", ".", "'", " ", "\n", "\r"),
    *("aa", "AA", "11", "..", "  ", "\n\n", "a.", " .", "1.", "a'", ".a"),
)
FREQUENT_LETTERS = ("s", "t", "e", "r")
RIGHT = ("", "a", "A", "中", "1", ".", "'", " ", "\n", "s", "e", "l", "E", "L", "ll")

Ends = tuple[int, ...]
"""Ends of the pieces of a text, ascending; the last is the text's end if there is a cut."""
Continuation = tuple[frozenset[str] | None, ...]
"""Sets of characters that follow one another; None: any character."""

NO_CUT: tuple[tuple[str, Continuation], ...] = (("", (None,)),)
MAX_MEMOS = 1 << 16


class PreTokenizer:
    """Cuts of texts as one tokenizer makes them. Immutable except for memos; thread-safe."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """Read the JSON of the tokenizer, `spec`. Raises ValueError for pre-tokenizers with
        unpredictable cuts."""
        # Without its vocabulary, which `Merges` has.
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        without = {**spec, "model": empty, "added_tokens": []}
        self._tokenizer = Tokenizer.from_str(json.dumps(without))
        parts = flat_parts(json.loads(self._tokenizer.to_str())["pre_tokenizer"])
        # Metaspace without splitting leaves a text whole.
        self.exists = any(part["type"] != "Metaspace" or part.get("split", True) for part in parts)
        for part in parts:
            if part["type"] not in PRE_TOKENIZERS:
                raise ValueError(f"pre-tokenizer {part['type']}")
        self.byte_level = any(part["type"] == "ByteLevel" for part in parts)
        patterns = [pattern for part in parts for pattern in part.get("pattern", {}).values()]
        if any(re.search(r"\(\?<|\\b|\\B|\\G", pattern) for pattern in patterns):
            raise ValueError("a pre-tokenizer that looks behind")
        # A pattern may treat characters that it names unlike the rest of their class.
        bare = "".join(re.sub(r"\\[pP]\{\^?\w+\}|\\[a-zA-Z]|\(\?[a-z]+:", "", p) for p in patterns)
        named = {cased for c in bare + "'strevmld" for cased in (c, c.lower(), c.upper())}
        self._scripts = any(c > "\x7f" for c in bare) or any(
            r"\x" in p or r"\u" in p for p in patterns
        )
        self._named = frozenset(c for c in named if len(c) == 1)
        self._ascii = self._ascii_classes()
        self._sure: dict[tuple[str, str], bool] = {}
        self._ends: dict[tuple[str, str], Ends] = {}

    def know_frequent_cuts(self) -> None:
        """Find the sure cuts between ASCII characters now, not at the first tokens of some request.
        Tries one character of each class, without letters that only patterns name."""
        if not self.exists:
            return
        frequent = [
            min(characters)
            for characters in self._ascii
            if len(characters) > 1 or not min(characters).isalpha()
        ]
        frequent += FREQUENT_LETTERS
        # Sure cuts behind characters of `LEFT` save questions about all others.
        frequent.sort(key=lambda character: character not in "".join(LEFT))
        for before, after in product(frequent, repeat=2):
            self.is_sure(before, after)

    def ends(self, text: str) -> Ends:
        """Return the ends of the pieces of a whole text."""
        if not self.exists:
            return (len(text),) if text else ()
        pieces = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return tuple(end for _, (_, end) in pieces)

    def is_sure(self, before: str, after: str) -> bool:
        """Return whether a cut stands between these two characters in every text."""
        if not self.exists:
            return False
        key = (self._class_of(before), self._class_of(after))
        if "" in key:
            return False
        known = self._sure.get(key)
        if known is None:
            known = self._sure[key] = all(
                len(left) + 1 in self.ends(left + before + after + right)
                for left in LEFT
                if not self._has_known_cut(left + before)
                for right in RIGHT
            )
        return known

    def _has_known_cut(self, text: str) -> bool:
        """Return whether a cut in the text is known to be sure; then the text before the cut need
        not be tried."""
        return any(
            self._sure.get((self._class_of(before), self._class_of(after)))
            for before, after in pairwise(text)
        )

    def _class_of(self, character: str) -> str:
        if character < "\x80":
            alone = character in self._named or character.isspace()
            return character if alone else unicodedata.category(character)
        category = unicodedata.category(character)
        # Some patterns take marks for letters, depending on the text before.
        return "" if self._scripts or category[0] == "M" else "+" + category

    def _ascii_classes(self) -> list[frozenset[str]]:
        classes: dict[str, set[str]] = {}
        for character in map(chr, range(128)):
            classes.setdefault(self._class_of(character), set()).add(character)
        return [frozenset(characters) for characters in classes.values()]

    def outcomes(
        self, text: str, allows: Callable[[Continuation], bool], known: set[Ends]
    ) -> Iterator[Ends]:
        """Yield the ways in which `text` (not empty) can be cut before a text that `allows` admits.

        Ways in `known` are left out, and new ones are added to `known`. If the end of `text` is not
        among the cuts, the last piece continues.
        """
        for sample, continuation in self._continuations(text) if self.exists else NO_CUT:
            # The cheaper check comes first.
            ends = self._ends.get((text, sample))
            if ends in known or not allows(continuation):
                continue
            if ends is None:
                ends = self._ends_before(text, sample)
            if ends not in known:
                known.add(ends)
                yield ends

    def _ends_before(self, text: str, sample: str) -> Ends:
        """Return the ends of the pieces of `text` if `sample` follows."""
        found = self.ends(text + sample) if self.exists else ()
        if len(self._ends) >= MAX_MEMOS:
            self._ends.clear()
        ends = self._ends[text, sample] = tuple(end for end in found if end <= len(text))
        return ends

    def _continuations(self, text: str) -> Iterator[tuple[str, Continuation]]:
        """Yield samples of continuations, each with the characters that the sample represents."""
        for characters in self._ascii:
            yield min(characters), (characters,)
        for sample in SAMPLES:
            yield sample, (frozenset(sample),)
        for white, first in WHITE.items():
            for second in ("a", "1", "."):
                yield white + second, (first, None)
            for second, middle in WHITE.items():
                yield white + second, (first, middle)
                for third in ("a", " ", "\n", "\r"):
                    yield white + second + third, (first, middle, None)
        for digits in ("11", "111", "11a", "1a"):
            yield digits, (frozenset("0123456789"), *[None] * (len(digits) - 1))
        yield from _contractions(text)


def flat_parts(spec: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a normalizer or pre-tokenizer of a tokenizer.json as a flat list of its parts."""
    if spec is None:
        return []
    if spec["type"] != "Sequence":
        return [spec]
    inner = spec.get("normalizers") or spec.get("pretokenizers") or []
    return [part for one in inner for part in flat_parts(one)]


def _contractions(text: str) -> Iterator[tuple[str, Continuation]]:
    """Yield the endings of a contraction that the text may have begun."""
    for ending in CONTRACTIONS:
        word = "'" + ending
        for begun in range(len(word)):
            if begun and text[-begun:].lower() != word[:begun]:
                continue
            rest = word[begun:]
            for sample in {rest, rest.upper(), rest.capitalize(), rest[:-1] + rest[-1].upper()}:
                yield sample, tuple(frozenset(character) for character in sample)


# Following ----------------------------------------------------------------------------------------


class Following:
    """Answers about the texts that may follow a place; one place, one call, then dropped. Unknown
    answers are positive: the possible texts are never underestimated."""

    def __init__(
        self, can_follow: Callable[[bytes], bool] | None, may_end: bool, pending: bytes = b""
    ) -> None:
        """Make the answers. `can_follow` answers for texts behind `pending`, a text that certainly
        comes first; None allows any text."""
        self._can_follow = can_follow
        self._pending = pending
        self._known: dict[bytes, bool] = {}
        self._categories: dict[tuple[bytes, str], bool] = {}
        self.may_end = may_end and not pending

    def __call__(self, text: bytes) -> bool:
        """Return whether some complete text continues with `text`."""
        if self._can_follow is None:
            return True
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self._ask(text)
        return known

    def shortest_forbidden(self, text: bytes) -> int | None:
        """Return the length of the shortest forbidden prefix of `text`; None without one."""
        if self(text):
            return None
        return next(n for n in range(1, len(text) + 1) if not self(text[:n]))

    def allows(self, continuation: Continuation) -> bool:
        """Return whether a text that begins with these characters may follow. For characters beyond
        ASCII only the first byte is checked."""
        return self._allows(continuation, b"")

    def joins(self, prefixes: list[bytes]) -> bool:
        """Return whether a text that begins with one of `prefixes` (two bytes each) may follow."""
        leads = {prefix[:1] for prefix in prefixes}
        allowed = {lead for lead in leads if self(lead)}
        return any(prefix[:1] in allowed and self(prefix) for prefix in prefixes)

    def _ask(self, text: bytes) -> bool:
        assert self._can_follow is not None
        pending = self._pending
        if len(text) <= len(pending):
            return pending.startswith(text)
        return text.startswith(pending) and self._can_follow(text[len(pending) :])

    def _allows(self, continuation: Continuation, before: bytes) -> bool:
        if not continuation or continuation[0] is None:
            return True
        for character in continuation[0]:
            if character < "\x80":
                text = before + character.encode()
                if self(text) and self._allows(continuation[1:], text):
                    return True
            elif self._category(unicodedata.category(character), before):
                return True
        return False

    def _category(self, category: str, before: bytes) -> bool:
        """Return whether a character beyond ASCII of this category may follow `before`; wrong
        positive answers are possible."""
        found = self._categories.get((before, category))
        if found is None:
            first = first_bytes_of(category)
            found = any(self(before + bytes((byte,))) for byte in first)
            self._categories[before, category] = found
        return found


# Merges -------------------------------------------------------------------------------------------


# Pairs of tokens tried for one end; beyond, the end counts as unsafe.
MAX_PAIRS = 4096

Tokens = tuple[int, ...]


class Merges:
    """Merges of one tokenizer. Thread-safe.

    `neighbours`: with `whole_text`, each two characters that stand side by side in some token. If
    no pre-tokenizer cuts the text, it can be cut between all other characters.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        settings: dict[str, Any],
        added: Collection[int],
        byte_level: bool,
        space: str,
        whole_text: bool,
    ) -> None:
        """Read the merges. `settings` come from the model in the tokenizer's JSON; `added` are
        tokens that no merge gives. `space`: the character for a space in the names of tokens; empty
        without one."""
        assert vocabulary.bpe is not None
        self._model = vocabulary.bpe
        self._bytes = vocabulary.token_bytes
        self._space = space
        self._to_byte_level = _byte_alphabet() if byte_level else None
        self._whole_first = bool(settings.get("ignore_merges"))
        """Whether a whole piece that is a token becomes this token, regardless of merges."""
        self._index(vocabulary.order, added, bool(settings.get("byte_fallback")), whole_text)
        self._bpe = lru_cache(1 << 14)(self._bpe_uncached)
        self._pairs = lru_cache(1 << 18)(self._is_pair)

    def piece(self, text: str) -> Tokens:
        """Return the tokens of a piece that no continuation can lengthen."""
        data = text.encode()
        if self._whole_first:
            token = self._model.token_to_id(self._symbols(data))
            if token is not None:
                return (token,)
        return self._bpe(data)

    def _bpe_uncached(self, data: bytes) -> Tokens:
        """Merge a piece into tokens; `data` may cut characters where symbols are bytes."""
        return tuple(token.id for token in self._model.tokenize(self._symbols(data)))

    def _symbols(self, data: bytes) -> str:
        if self._to_byte_level is not None:
            return data.decode("latin-1").translate(self._to_byte_level)
        return data.decode().replace(" ", self._space) if self._space else data.decode()

    def open_piece(self, text: str, following: Following) -> Tokens:
        """Return the sure first tokens of a piece that begins with `text` and continues."""
        data = text.encode()
        tokens = self._bpe(data)
        ways: list[tuple[int, int, int | None]] = []  # tokens left, where u begins, token before
        for start in range(max(0, len(data) - self._longest + 1), len(data)):
            if self._to_byte_level is None and data[start] & 0xC0 == 0x80:
                continue
            if self._has_longer(data[start:]):
                left = self._bpe(data[:start])
                ways.append((common(tokens, left), start, left[-1] if left else None))
        for count, start, before in sorted(ways, key=lambda way: way[0]):
            if count >= len(tokens):
                break
            if self._can_run_over(data[start:], before, following):
                return tokens[:count]
        return tokens

    def _can_run_over(self, begun: bytes, before: int | None, following: Following) -> bool:
        """Return whether a token that begins with `begun` and continues may follow the token
        `before`."""
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
        """Return whether the tokenizer cuts the text of both into both (None: the piece begins)."""
        if before is None or before in self._fallback:
            if self._whole_first:
                return True  # a whole piece that is a token is that token
            return self._bpe_uncached(self._bytes[token]) == (token,)
        text = self._bytes[before] + self._bytes[token]
        return self._bpe_uncached(text) == (before, token)

    def _index(
        self, order: TokenOrder, added: Collection[int], fallback: bool, whole_text: bool
    ) -> None:
        """Return the tokens that merging can give, in the order of their bytes."""
        self._words: list[bytes] = []
        self._ids = array("i")
        self.neighbours: set[str] = set()
        self._fallback: set[int] = set()  # single bytes of characters that no token has
        for token, data in zip(order.tokens.tolist(), order.texts, strict=True):
            name = None if token in added else self._model.id_to_token(token)
            if name is None:
                continue
            if fallback and len(name) == 6 and name.startswith("<0x"):
                self._fallback.add(token)
                continue
            self._words.append(data)
            self._ids.append(token)
            if whole_text:
                spelled = name.replace(self._space, " ") if self._space else name
                self.neighbours.update(map("".join, pairwise(spelled)))
        self._longest = max(map(len, self._words), default=0)


def _byte_alphabet() -> dict[int, str]:
    """Return GPT-2's characters for bytes: printable ones are themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return table


def common(left: Tokens, right: Tokens) -> int:
    """Count the first tokens that are the same in both."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
