"""Tokens of a tokenizer, and the other rules of its `tokenizer.json`.

Sections: tokens, rules.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

# Tokens -------------------------------------------------------------------------------------------
#
# Spelling of each token, whether the token is special, and the bytes it stands for.


SPACE = "\u2581"  # how SentencePiece writes a space

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class AddedToken(msgspec.Struct, frozen=True):
    """Token beside the model's own; the flags are those of `tokenizer.json`."""

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool


class Vocabulary:
    """Tokens of a Hugging Face fast tokenizer. Thread-safe: only caches change.

    `vocab_size` counts added tokens. `token_bytes` and `visible_bytes` hold the tokens' bytes; the
    latter has none for special tokens.
    """

    def __init__(self, fast: FastTokenizer, decoder: dict[str, Any] | None) -> None:
        """`decoder`: the field of `tokenizer.json` that defines how tokens become text."""
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
        """Return the id of the token with this spelling; None without one."""
        token = self.by_content.get(content)
        return token.id if token else self.fast.token_to_id(content)

    def content(self, token_id: int) -> str | None:
        """Return a token's spelling in the vocabulary; None for an unknown id."""
        token = self.added.get(token_id)
        return token.content if token else self.fast.id_to_token(token_id)

    def is_special(self, token_id: int) -> bool:
        token = self.added.get(token_id)
        return token is not None and token.special


class TokenBytes(dict[int, bytes]):
    """Bytes that each token stands for, converted at the first lookup.

    With `skip_special_tokens`, special tokens stand for no bytes. A dictionary, because looking up
    a known token then costs no Python call.
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
        """Return whether at least one of the tokens is not skipped."""
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
    """GPT-2's table: printable Latin-1 characters are themselves, other bytes 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    table.update({chr(256 + n): b for n, b in enumerate(others)})
    return table


Kind = Literal["byte_level", "byte_fallback", "metaspace", "other"]


def _decoder_kind(spec: dict[str, Any] | None) -> tuple[Kind, bool]:
    """Return how tokens become text, and whether decoding strips a text's first space."""
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


# Rules --------------------------------------------------------------------------------------------
#
# Changes that a tokenizer makes to text before tokenizing, and tokens that it puts around.


class Dummy(msgspec.Struct, frozen=True):
    """Dummy prefix: where it is added, and whether also before a text that begins with a space.
    Within `words`, split by another pre-tokenizer before, the library adds the prefix itself."""

    where: Literal["never", "first", "always", "words"] = "never"
    even_before_space: bool = False


def around(encoding: Encoding) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the post-processor's ids before one or two texts, between them, and behind."""
    places = [at for at, mask in enumerate(encoding.special_tokens_mask) if not mask]
    if not places:
        return tuple(encoding.ids), (), ()
    first, last = places[0], places[-1]
    between = [one for one in range(first, last) if one not in places]
    ids = encoding.ids
    return tuple(ids[:first]), tuple(ids[at] for at in between), tuple(ids[last + 1 :])


def without_vocabulary(fast: FastTokenizer) -> dict[str, Any]:
    """Return the tokenizer's JSON without the model's tables, which are megabytes."""

    def state(part: Any) -> Any:
        return None if part is None else json.loads(part.__getstate__())

    return {
        "normalizer": state(fast.normalizer),
        "pre_tokenizer": state(fast.pre_tokenizer),
        "decoder": state(fast.decoder),
        "model": {"type": type(fast.model).__name__},
    }


def may_have_dummy(fast: FastTokenizer) -> bool:
    return any(
        name in repr(part)
        for part in (fast.normalizer, fast.pre_tokenizer)
        for name in ("Prepend", "Metaspace", "add_prefix_space=True")
    )


def remove_dummy_prefix(spec: dict[str, Any]) -> Dummy:
    """Remove the dummy prefix from a tokenizer's JSON in place, except one of words; return how the
    prefix was added."""
    dummy = Dummy()
    steps = _parts(spec.get("normalizer"), "normalizers")
    rest = [step for step in steps if (step["type"], step.get("prepend")) != ("Prepend", SPACE)]
    if len(rest) != len(steps):
        dummy = Dummy("always", even_before_space=True)
        spec["normalizer"] = {"type": "Sequence", "normalizers": rest} if rest else None
    for place, part in enumerate(_parts(spec.get("pre_tokenizer"), "pretokenizers")):
        none: dict[str, Any]
        if part["type"] == "Metaspace":
            where, none = part.get("prepend_scheme", "always"), {"prepend_scheme": "never"}
        elif part["type"] == "ByteLevel" and part.get("add_prefix_space"):
            where, none = "always", {"add_prefix_space": False}
        else:
            continue
        if where == "always" and place:
            dummy = Dummy("words")
        elif where != "never":
            dummy = Dummy(where)
            part |= none
    return dummy


def _parts(whole: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a sequence, or the only step."""
    found: list[dict[str, Any]] = (whole or {}).get(name, [whole] if whole else [])
    return found


def never_crosses_space(spec: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    """Return whether text may be split before every space that follows another character.

    True if spaces are written as U+2581 and no token has U+2581 behind another character: neither a
    BPE merge nor a unigram piece can then span the split.
    """
    if spec["model"]["type"] not in ("BPE", "Unigram"):
        return False
    steps = _parts(spec.get("normalizer"), "normalizers")
    only_replaces = bool(steps) and all(
        step["type"] == "Replace"
        and step["pattern"] == {"String": " "}
        and step["content"] == SPACE
        for step in steps
    )
    inner = re.compile(f"[^{SPACE}]{SPACE}")
    return only_replaces and not any(inner.search(token) for token in vocabulary)
