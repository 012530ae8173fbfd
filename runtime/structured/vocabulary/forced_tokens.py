"""Forced text as tokens: exactly the tokens that the tokenizer would choose.

`docs/constrained_internals.md` has the exact meaning, and the effect on the distribution of
outputs. Left of a certain cut of the pre-tokenizer, nothing depends on the text right of the cut.
`PreTokenizer` gives the cuts that every continuation leaves in place. `merges` gives the common
tokens of the last piece over all continuations.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

from rootlace.runtime.structured.vocabulary.merges import (
    Ends,
    Following,
    Merges,
    PreTokenizer,
    Tokens,
    common,
    flat_parts,
)
from rootlace.runtime.structured.vocabulary.vocabulary import (
    Composition,
    Vocabulary,
    categories_by_first_byte,
    composition,
)

# Characters beyond a sure cut that the text left of the cut may depend on.
LOOK_AHEAD = 4
# Bytes of context searched for a sure cut.
MAX_TAIL = 1024


class Canonicalizer:
    """Canonical tokens of forced text, for one vocabulary. Thread-safe. `unsupported`: the reason
    why this tokenizer never gets forced tokens; empty if it does."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes = vocabulary.token_bytes
        self._special = vocabulary.special_token_ids
        spec = _without_beginning(json.loads(vocabulary.settings))
        self.unsupported = _unsupported(spec)
        if self.unsupported:
            return
        try:
            self._pre_tokenizer = PreTokenizer(spec)
        except ValueError as error:
            self.unsupported = str(error)
            return
        normalizers = {part["type"] for part in flat_parts(spec["normalizer"])}
        self._composition: Composition | None = composition() if "NFC" in normalizers else None
        # A literal one would become a space.
        self._space = "▁" if "Replace" in normalizers or not self._pre_tokenizer.byte_level else ""
        added = [token for token in spec["added_tokens"] if not token["special"]]
        self._added = {token["content"]: token["id"] for token in added}
        self._added_first = frozenset(content[0] for content in self._added)
        self._inside_added = {"".join(pair) for text in self._added for pair in pairwise(text)}
        self._merges = Merges(
            vocabulary,
            spec["model"],
            set(self._added.values()),
            self._pre_tokenizer.byte_level,
            self._space,
            whole_text=not self._pre_tokenizer.exists,
        )
        self._last_cut = lru_cache(1 << 14)(self._find_last_cut)

    # ------------------------------------------------------------ public

    def prepare(self) -> None:
        """Do work now that would delay the first tokens of some request."""
        if not self.unsupported:
            categories_by_first_byte()
            self._pre_tokenizer.know_frequent_cuts()

    def tail(self, context: list[int]) -> bytes | None:
        """Return the part of the context that `tokens_after` needs; None if no token can be forced.

        The context is the output so far, from its first token on. The tail is short if cuts are
        frequent, and serves as a key for memos.
        """
        if self.unsupported:
            return None
        tail = b""
        checked = 0  # bytes at the end of the tail in which there is no sure cut
        for token in reversed(context):
            if token in self._special:
                break  # text between special tokens is tokenized alone
            tail = self._bytes[token] + tail
            if len(tail) < checked + 8:
                continue
            cut = self._last_cut(tail)
            if cut is not None:
                return tail[cut:]
            if len(tail) > MAX_TAIL:
                return None
            checked = len(tail)
        cut = self._last_cut(tail)
        return tail if cut is None else tail[cut:]

    def tokens_after(
        self, tail: bytes | None, forced: bytes, can_follow: Callable[[bytes], bool], may_end: bool
    ) -> list[int]:
        """Return the canonical tokens of a beginning of `forced`, which follows a context with this
        `tail`.

        `can_follow(text)`: whether the constraint allows `forced + text` as the beginning of some
        complete text. `may_end`: whether the text may be complete after `forced`. Wrong positive
        answers cost tokens, never correctness.
        """
        if tail is None or not forced:
            return []
        data = tail + forced
        complete = _complete(data)
        following = Following(can_follow, may_end, data[complete:])
        try:
            before = tail[: _complete(tail)]
            text = before.decode()
            new = data[len(before) : complete].decode()
        except UnicodeDecodeError:
            return []
        if not new:
            return []
        normal = text
        if self._composition is not None:
            if text and new[0] in self._composition.joins:
                return []
            normal = unicodedata.normalize("NFC", text)
        elif self._space:
            normal = text.replace(self._space, " ")
        skip = len(normal.encode()) + len(tail) - len(before)
        tokens = self._settled(normal, new, following)
        for index, token in enumerate(tokens):
            if skip == 0:
                return list(tokens[index:])
            skip -= len(self._bytes[token])
            if skip < 0:
                break
        return []

    # ------------------------------------------------------------ what is settled

    def _settled(self, before: str, new: str, following: Following) -> Tokens:
        """Return the first tokens of `before + new` that no continuation changes. If the tokenizer
        would change a character of `new`, the tokens end before this character."""
        text = before + new
        if self._space and self._space in new:
            cut = len(before) + new.index(self._space)
            return self._same(text[:cut], Following(None, True))
        if self._composition is None:
            return self._same(text, following)
        length = self._composition.changes(text)
        if length < len(text):
            return self._same(text[:length], Following(None, True))
        tokens = self._same(text, following)
        if not tokens or text[-1] not in self._composition.takes:
            return tokens
        if not following.joins(self._composition.join_prefixes):
            return tokens
        cut = self._last_starter(text)
        return tokens[: common(tokens, self._same(text[:cut], Following(None, True)))]

    def _last_starter(self, text: str) -> int:
        """Return the offset of the last characters that a continuation of the text may change."""
        assert self._composition is not None
        end = len(text)
        while end and text[end - 1] in self._composition.takes:
            end -= 1
            if text[end] not in self._composition.joins:
                break
        return end

    def _same(self, text: str, following: Following) -> Tokens:
        """Return the first tokens of `text` that are the same with every continuation."""
        segments = self._segments(text)
        if not segments:
            return ()
        settled = self._unless_added(text, following)
        if segments[-1][1] is not None:
            tokens = self._closed_tokens(segments)
        else:
            tokens = self._closed_tokens(segments[:-1])
            tokens += self._last_segment_tokens(segments[-1][0], following)
        return tokens if settled is None else tokens[: common(tokens, settled)]

    def _last_segment_tokens(self, text: str, following: Following) -> Tokens:
        """Return tokens as `_same` does, for a text without added tokens."""
        ends = self._pre_tokenizer.ends(text)
        for cut in range(len(text) - LOOK_AHEAD, 0, -1):
            if self._is_sure(text[cut - 1], text[cut]):
                break
        else:
            return self._open_text_tokens(text, following)
        closed = self._pieces(text, (*(end for end in ends if end < cut), cut))
        return closed + self._open_text_tokens(text[cut:], following)

    def _open_text_tokens(self, text: str, following: Following) -> Tokens:
        """Return tokens as `_same` does, for a text without added tokens that begins at a sure
        cut."""
        best: Tokens | None = None
        whole = (self._pre_tokenizer.ends(text),) if following.may_end else ()
        known = set(whole)
        for ends in chain(whole, self._pre_tokenizer.outcomes(text, following.allows, known)):
            tokens = self._cut_tokens(text, ends, following)
            best = tokens if best is None else best[: common(best, tokens)]
            if not best:
                return ()
        return best or ()

    def _cut_tokens(self, text: str, ends: Ends, following: Following) -> Tokens:
        """Return the tokens of `text` cut at `ends`; the rest behind the last cut may continue."""
        start = ends[-1] if ends else 0
        tokens = self._pieces(text, ends)
        if start < len(text):
            tokens += self._merges.open_piece(text[start:], following)
        return tokens

    def _pieces(self, text: str, ends: Ends) -> Tokens:
        """Return the tokens of the pieces of `text` that end at `ends`."""
        spans = pairwise((0, *ends))
        return tuple(chain.from_iterable(self._merges.piece(text[a:b]) for a, b in spans))

    def _closed_tokens(self, segments: list[tuple[str, int | None]]) -> Tokens:
        """Return the tokens of segments that no continuation can lengthen."""
        tokens: Tokens = ()
        for segment, added in segments:
            if added is None:
                tokens += self._pieces(segment, self._pre_tokenizer.ends(segment))
            else:
                tokens += (added,)
        return tokens

    # ------------------------------------------------------------ added tokens

    def _segments(self, text: str) -> list[tuple[str, int | None]]:
        """Return the text cut at added tokens, which are matched before anything else."""
        segments: list[tuple[str, int | None]] = []
        start = position = 0
        while position < len(text):
            if text[position] in self._added_first:
                found = [a for a in self._added if text.startswith(a, position)]
                if found:
                    longest = max(found, key=len)
                    if start < position:
                        segments.append((text[start:position], None))
                    segments.append((longest, self._added[longest]))
                    start = position = position + len(longest)
                    continue
            position += 1
        if start < len(text):
            segments.append((text[start:], None))
        return segments

    def _unless_added(self, text: str, following: Following) -> Tokens | None:
        """Return the tokens common to all added tokens that may begin in or behind the text; None
        without any."""
        settled: Tokens | None = None
        for content in self._added:
            for begun in range(min(len(content) - 1, len(text)), -1, -1):
                if not text.endswith(content[:begun]):
                    continue
                rest = content[begun:].encode()
                if not following(rest[:1]) or not following(rest):
                    continue
                tokens = self._closed_tokens(self._segments(text[: len(text) - begun]))
                settled = tokens if settled is None else settled[: common(settled, tokens)]
        return settled

    # ------------------------------------------------------------ cuts

    def _find_last_cut(self, tail: bytes) -> int | None:
        """Return the last offset from which the tail can be tokenized by itself, if any."""
        start = next((i for i in range(min(4, len(tail))) if tail[i] & 0xC0 != 0x80), 0)
        text = tail[start : _complete(tail)].decode(errors="replace")
        joins = self._composition.joins if self._composition is not None else ()
        for position in range(len(text) - 1, 0, -1):
            before, after = text[position - 1], text[position]
            if "\ufffd" in (before, after):
                return None
            if after in joins or before + after in self._inside_added:
                continue
            if self._is_sure(before, after):
                return start + len(text[:position].encode())
        return None

    def _is_sure(self, before: str, after: str) -> bool:
        if self._pre_tokenizer.exists:
            return self._pre_tokenizer.is_sure(before, after)
        return before + after not in self._merges.neighbours


def _without_beginning(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer without templates, and without steps that only change a text's
    beginning."""
    spec = {**spec, "post_processor": None, "truncation": None, "padding": None}
    kept = [part for part in flat_parts(spec["normalizer"]) if part["type"] != "Prepend"]
    spec["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    parts = [dict(part) for part in flat_parts(spec["pre_tokenizer"])]
    for part in parts:
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
            part.pop("add_prefix_space", None)
        elif part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts} if parts else None
    return spec


def _unsupported(spec: dict[str, Any]) -> str:
    """Return why the tokens of forced text are unpredictable; "" if they are predictable."""
    model = spec["model"]
    if model["type"] != "BPE":
        return f"the tokenizer's model is {model['type']}, not BPE"
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            return f"byte pair encoding with {name}"
    for part in flat_parts(spec["normalizer"]):
        replaces_space = (
            part["type"] == "Replace"
            and part["pattern"] == {"String": " "}
            and part["content"] == "▁"
        )
        if part["type"] != "NFC" and not replaces_space:
            return f"normalizer {part['type']}"
    for token in spec["added_tokens"]:
        if not token["special"] and (token["lstrip"] or token["rstrip"] or token["single_word"]):
            return f"the added token {token['content']!r} takes what is around it"
    return ""


def _complete(data: bytes) -> int:
    """Return the length of `data` without a character that is cut off at its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if length > back else len(data)
    return len(data)
