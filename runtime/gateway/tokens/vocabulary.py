"""What each token is: its spelling, whether it is special, the bytes it stands for."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer as FastTokenizer

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
