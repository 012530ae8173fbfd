"""Token ids to text, a few at a time, never half a character.

Most tokenizers are byte-faithful: each token stands for a fixed string of bytes (byte-level BPE, or
SentencePiece with byte fallback), so decoding is concatenation followed by UTF-8, and an
incremental UTF-8 decoder does it in O(new tokens). Others are decoded by the library over a short
window.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from rootlace.runtime.gateway.tokens.vocabulary import TokenBytes, Vocabulary

_CONTEXT_TOKENS = 8
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of the tokens fed so far, in the context of those before.

    `context` are the ids before (only the last few matter: they may hold the beginning of a
    character); `at_start` says that no visible token came before, which matters to tokenizers that
    strip the first space of a text. The concatenation of what `feed` and `flush` return is the
    text of the fed ids in that context; bytes that are not UTF-8 show as U+FFFD.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        at_start: bool = True,
    ) -> None:
        table = vocabulary.visible_bytes if skip_special_tokens else vocabulary.token_bytes
        self._bytes = table
        self._strip = table.strips_first and at_start and not table.shows_any(context)
        self._held = b""
        """The beginning of a character."""
        self._window = _Window(vocabulary, skip_special_tokens) if table.kind == "other" else None
        if self._window is not None:
            self._window.feed(list(context[-_CONTEXT_TOKENS:]))
        else:
            last = list(context[-_CONTEXT_TOKENS:])
            if _may_end_inside(table, last):
                self._decode(b"".join([table[i] for i in last]))

    @property
    def clean(self) -> bool:
        """Whether no part of a character is held back."""
        if self._window is not None:
            return not self._window.holds
        return not self._held

    def feed(self, token_ids: Sequence[int]) -> str:
        """The new text that is certain."""
        if self._window is not None:
            return self._window.feed(token_ids)
        data = b"".join([self._bytes[token_id] for token_id in token_ids])
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        return self._decode(data)

    def flush(self) -> str:
        """At the end, what is held back: U+FFFD for an unfinished character."""
        if self._window is not None:
            return self._window.flush()
        held, self._held = self._held, b""
        return codecs.utf_8_decode(held, "replace", True)[0]

    def _decode(self, data: bytes) -> str:
        # What codecs' incremental decoder does, without its Python overhead.
        if self._held:
            data = self._held + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text


class _Window:
    """Decoding through the library: the text a window gains when the new tokens join it.

    The window starts at the last place where the text was whole, so the cost of a call does not
    grow with the sequence.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._fast = vocabulary.fast
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._told = 0  # tokens of the window whose text was returned
        self.holds = False

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(self._feed_one(token_id) for token_id in token_ids)

    def _feed_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        new = self._new_text()
        self.holds = new.endswith(_REPLACEMENT) and len(self._ids) - self._told < 8
        if self.holds:
            return ""
        self._ids = self._ids[-_CONTEXT_TOKENS:]
        self._told = len(self._ids)
        return new

    def flush(self) -> str:
        new = self._new_text() if self.holds else ""
        self._told, self.holds = len(self._ids), False
        return new

    def _new_text(self) -> str:
        before = self._fast.decode(self._ids[: self._told], skip_special_tokens=self._skip)
        whole = self._fast.decode(self._ids, skip_special_tokens=self._skip)
        return whole[len(before) :]


def _may_end_inside(table: TokenBytes, token_ids: list[int]) -> bool:
    """Whether the tokens may end within a character: their last byte is not ASCII."""
    for token_id in reversed(token_ids):
        if data := table[token_id]:
            return data[-1] >= 0x80
    return False
