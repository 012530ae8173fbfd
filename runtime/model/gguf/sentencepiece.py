"""Read SentencePiece's `tokenizer.model`, in folders that have no `tokenizer.json`.

The file is a protocol buffer (sentencepiece_model.proto). Supported is the kind that GGUF files
have, too: pieces merged by their scores, of text that is not normalised.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rootlace.runtime.model.gguf.tokenizer import Kind, Vocabulary, tokenizer_json
from rootlace.wire.errors import UnsupportedModel

Json = dict[str, Any]

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _SUFFIX, _UNKNOWN, _BEGIN, _END = 3, 24, 40, 41, 42
_CHARACTERS, _PREFIX, _SINGLE_SPACES, _ESCAPED, _RULES = 2, 3, 4, 5, 6
_TYPES = {1: "unigram", 3: "word", 4: "char"}
_MERGES = 2
"""Model type that is supported: BPE."""
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
"""Beginning of a tiktoken file, which may have this name, too: a token in base64 and its id."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def sentencepiece_json(vocabulary: Vocabulary, config: Json) -> str:
    """Return the `tokenizer.json` of a `tokenizer.model`. The folder's `tokenizer_config.json`,
    `config`, and `added_tokens.json` name further tokens. Raises `UnsupportedModel`."""
    begins = vocabulary.begins and config.get("add_bos_token", True) is not False
    vocabulary = replace(vocabulary, begins=begins)
    found = json.loads(tokenizer_json(vocabulary))
    added = {one["id"]: one for one in found["added_tokens"]}
    further = dict(_further(config, vocabulary))
    for index, kind in enumerate(vocabulary.kinds):
        if kind != Kind.USER_DEFINED or index in further:
            continue
        if vocabulary.space_prefix:
            # A space would have to precede such a symbol, too, and never follow one.
            raise UnsupportedModel(
                f"{vocabulary.path}: user-defined symbols ({vocabulary.tokens[index]!r}) are "
                "not supported where texts begin with a space (add_dummy_prefix); convert it to "
                "tokenizer.json"
            )
        # SentencePiece finds symbols in text whose spaces are already replaced.
        added[index]["normalized"] = True
    added |= further
    found["added_tokens"] = [added[index] for index in sorted(added)]
    return json.dumps(found, ensure_ascii=False)


def _further(config: Json, vocabulary: Vocabulary) -> Iterator[tuple[int, Json]]:
    """Yield the tokens that the folder's other files name, by their ids."""
    folder = vocabulary.path.parent
    file = folder / "added_tokens.json"
    try:
        named = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        stated = {index: {"content": token} for token, index in named.items()}
        more = config.get("added_tokens_decoder", {})
        stated |= {int(index): about for index, about in more.items()}
        for index, about in sorted(stated.items()):
            content = about["content"]
            known = index < len(vocabulary.tokens)
            if type(content) is not str or (known and vocabulary.tokens[index] != content):
                raise ValueError(f"token {index} is {content!r}")
            flags = {flag: bool(about.get(flag, flag == "special")) for flag in _FLAGS}
            yield index, {"id": index, "content": content, **flags}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"{folder}: added tokens: {error!r}") from error


def read_sentencepiece(path: Path) -> Vocabulary:
    """Read a vocabulary. Raises `UnsupportedModel` for a damaged file or an unsupported kind."""
    try:
        data = path.read_bytes()
        if _TIKTOKEN.match(data):
            raise UnsupportedModel(
                f"{path}: a vocabulary of tiktoken, which does not say how text is cut into words; "
                "the model's tokenizer.json is needed"
            )
        tokens, scores, kinds = [], [], []
        trainer: dict[int, Any] = {}
        normalizer: dict[int, Any] = {}
        for field, value in _fields(data):
            if field == _PIECES:
                piece = dict(_fields(value))
                tokens.append(piece.get(1, b"").decode())
                scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
                kinds.append(piece.get(3, Kind.NORMAL))
            elif field == _TRAINER:
                trainer |= _fields(value)
            elif field == _NORMALIZER:
                normalizer |= _fields(value)
        ids = [
            _signed(trainer.get(field, default))
            for field, default in ((_BEGIN, 1), (_END, 2), (_UNKNOWN, 0))
        ]
        bos, eos, unknown = (index if 0 <= index < len(tokens) else None for index in ids)
    except (OSError, ValueError, AttributeError, TypeError, struct.error) as error:
        raise UnsupportedModel(f"{path}: not a SentencePiece model: {error}") from error
    reason = _why_not(trainer, normalizer, tokens)
    if reason is not None:
        raise UnsupportedModel(f"{path}: {reason}")
    return Vocabulary(
        path,
        {},
        "llama",
        "default",
        tokens,
        kinds,
        scores,
        bos,
        eos,
        unknown,
        () if eos is None else (eos,),
        bos is not None,
        bool(normalizer.get(_PREFIX, 1)),
    )


def _why_not(trainer: dict[int, Any], normalizer: dict[int, Any], tokens: list[str]) -> str | None:
    """Explain why a tokenizer is not supported; None if it is."""
    kind = trainer.get(_MODEL_TYPE, 1)
    if kind != _MERGES:
        return f"tokenizers of the type {_TYPES.get(kind, kind)} are not supported, only BPE"
    if normalizer.get(_CHARACTERS) or normalizer.get(_RULES):
        return "it normalises characters, which is not supported"
    if normalizer.get(_SINGLE_SPACES, 1):
        return "it removes extra spaces (remove_extra_whitespaces), which is not supported"
    if not normalizer.get(_ESCAPED, 1):
        return "it does not write spaces as \\u2581 (escape_whitespaces), which is not supported"
    if trainer.get(_SUFFIX, 0):
        return "it writes spaces behind words (treat_whitespace_as_suffix), which is not supported"
    if not tokens or len(set(tokens)) < len(tokens):
        return "it has no pieces, or one of them twice"
    return None


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield a message's fields by their numbers: integers, or bytes of a field with a length.
    Raises ValueError."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError(f"a field of kind {kind} at byte {at}")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    found = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends in a number")
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
    raise ValueError(f"a number without an end at byte {at}")


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
