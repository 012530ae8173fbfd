"""Token ids to text, a few at a time, never half a character.

Most tokenizers are byte-faithful: each token stands for a fixed string of bytes (byte-level BPE, or
SentencePiece with byte fallback), so decoding is concatenation followed by UTF-8, and an
incremental UTF-8 decoder does it in O(new tokens). Others are decoded by the library over a short
window.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer as FastTokenizer

# Vocabulary ---------------------------------------------------------------------------------------
#
# What each token is: its spelling, whether it is special, the bytes it stands for.


SPACE = "\u2581"  # how SentencePiece writes a space

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class AddedToken:
    """A token beside the model's own; the flags are those of `tokenizer.json`."""

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool


class Vocabulary:
    """The tokens of a Hugging Face fast tokenizer. Thread-safe: only caches change.

    `vocab_size` counts added tokens. `token_bytes` and `visible_bytes` are the tokens' bytes, in
    the latter none for special ones.
    """

    def __init__(self, fast: FastTokenizer, decoder: dict[str, Any] | None) -> None:
        """`decoder` is that of `tokenizer.json`: it says how tokens become text."""
        self.fast = fast
        self.vocab_size = fast.get_vocab_size(with_added_tokens=True)
        self.added = {
            id_: AddedToken(id_, t.content, t.special, t.lstrip, t.rstrip, t.single_word)
            for id_, t in fast.get_added_tokens_decoder().items()
        }
        self.by_content = {token.content: token for token in self.added.values()}
        self.token_bytes = TokenBytes(self, decoder)
        self.visible_bytes = TokenBytes(self, decoder, skip_special_tokens=True)

    def id_of(self, content: str) -> int | None:
        """The id of the token spelled so in the vocabulary."""
        token = self.by_content.get(content)
        return token.id if token else self.fast.token_to_id(content)

    def content(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token."""
        token = self.added.get(token_id)
        return token.content if token else self.fast.id_to_token(token_id)

    def is_special(self, token_id: int) -> bool:
        token = self.added.get(token_id)
        return token is not None and token.special


class TokenBytes(dict[int, bytes]):
    """The bytes that each token stands for, converted when first looked up.

    With `skip_special_tokens` special ones stand for nothing. A dictionary, because looking up a
    known token then costs no Python call.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        decoder: dict[str, Any] | None,
        skip_special_tokens: bool = False,
    ) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self.kind, self.strips_first = _decoder_kind(decoder)

    def __missing__(self, token_id: int) -> bytes:
        content = self._vocabulary.content(token_id)
        if content is None or (self._skip and self._vocabulary.is_special(token_id)):
            data = b""
        else:
            data = self._convert(content)
        self[token_id] = data
        return data

    def shows_any(self, token_ids: Iterable[int]) -> bool:
        """Whether one of them is not skipped."""
        return any(not (self._skip and self._vocabulary.is_special(i)) for i in token_ids)

    def _convert(self, content: str) -> bytes:
        if self.kind == "byte_level":
            alphabet = _byte_level_alphabet()
            try:
                return bytes(alphabet[c] for c in content)
            except KeyError:  # an added token with characters outside the alphabet
                return content.encode("utf-8", "replace")
        if self.kind == "byte_fallback" and (match := _BYTE_TOKEN.fullmatch(content)):
            return bytes([int(match[1], 16)])
        return content.replace(SPACE, " ").encode("utf-8", "replace")


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the rest for 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    table.update({chr(256 + n): b for n, b in enumerate(others)})
    return table


Kind = Literal["byte_level", "byte_fallback", "metaspace", "other"]


def _decoder_kind(spec: dict[str, Any] | None) -> tuple[Kind, bool]:
    """How tokens become text, and whether the first space of a text is stripped."""
    if spec is None:
        return "other", False
    steps = spec.get("decoders", [spec])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    if kinds == ["Metaspace"]:
        return "metaspace", steps[0].get("prepend_scheme", "always") != "never"
    replaces_space = steps[0].get("pattern") == {"String": SPACE}
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and replaces_space:
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if steps[3:] in ([], [strip]):
            return "byte_fallback", bool(steps[3:])
    return "other", False


# Detokenizer --------------------------------------------------------------------------------------


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
            # Where the last byte is not ASCII, the tokens may end within a character.
            data = b"".join(map(table.__getitem__, context[-_CONTEXT_TOKENS:]))
            if data and data[-1] >= 0x80:
                self._held = data[codecs.utf_8_decode(data, "replace", False)[1] :]

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
        if len(token_ids) == 1:
            data = self._bytes[token_ids[0]]
        else:
            data = b"".join(map(self._bytes.__getitem__, token_ids))
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        # What codecs' incremental decoder does, without its Python overhead.
        if self._held:
            data = self._held + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        """At the end, what is held back: U+FFFD for an unfinished character."""
        if self._window is not None:
            return self._window.flush()
        held, self._held = self._held, b""
        return codecs.utf_8_decode(held, "replace", True)[0]


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
