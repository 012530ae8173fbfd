"""A GGUF file's tokenizer as the `tokenizer.json` and the `tokenizer_config.json` it has elsewhere.

Everything that takes a tokenizer then works as it does with a model folder. Special tokens that
nobody uses are left out at the end of the vocabulary, where files have them to fill it up.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rootlace.runtime.model.gguf.file import GgufFile
from rootlace.runtime.model.gguf.pretokenizers import PATTERNS, WHOLE
from rootlace.runtime.model.gguf.vocabulary import Kind, Vocabulary
from rootlace.wire.errors import UnsupportedModel

SPACE = "\u2581"
"""How SentencePiece writes a space."""
_ADDED = (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED, Kind.UNUSED)
"""Tokens that are found in a text before it is split."""
_LONGEST = 512
"""Characters of a token that is merged of others: every place to cut it is tried, which takes a
time that grows with the square of its length."""
_PADS_BEHIND = ("<unk>", "<s>", "<|endoftext|>")

TEMPLATE = "tokenizer.chat_template"

Json = dict[str, Any]

log = logging.getLogger(__name__)


def tokenizer_json(vocabulary: Vocabulary) -> str:
    """Raises `UnsupportedModel` for a tokenizer that cannot be built as llama.cpp has it. Logs what
    is remarkable about the vocabulary: this is asked for once by whoever serves it."""
    for remark in vocabulary.remarks:
        log.warning("%s: %s", vocabulary.file.path, remark)
    tokens = vocabulary.tokens[: _used(vocabulary)]
    ids = {token: index for index, token in enumerate(tokens)}
    parts = _spm(vocabulary, ids) if vocabulary.model == "llama" else _bpe(vocabulary, ids)
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(_added(vocabulary, len(tokens))),
            "post_processor": _beginning(vocabulary),
            **parts,
        },
        ensure_ascii=False,
    )


def tokenizer_config(vocabulary: Vocabulary) -> Json:
    """What a chat template and those who end a text need."""
    named = {
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        "unk_token": vocabulary.unknown,
    }
    found: Json = {
        name: vocabulary.tokens[token] for name, token in named.items() if token is not None
    }
    return found


def chat_templates(file: GgufFile) -> dict[str, str]:
    """In Jinja, by name; the one without a name is "default"."""
    found: dict[str, str] = {}
    for key, value in file.metadata.items():
        if key != TEMPLATE and not key.startswith(f"{TEMPLATE}."):
            continue
        if not isinstance(value, str):
            raise UnsupportedModel(f"{file.path}: {key} is not a text")
        found[key.removeprefix(TEMPLATE).removeprefix(".") or "default"] = value
    return found


def _used(vocabulary: Vocabulary) -> int:
    """How many tokens there are without the unused ones at the end."""
    count = len(vocabulary.tokens)
    while count and vocabulary.kinds[count - 1] == Kind.UNUSED:
        count -= 1
    return count


def _added(vocabulary: Vocabulary, count: int) -> Iterator[Json]:
    name = str(vocabulary.file.metadata.get("general.name", "")).lower()
    phi3 = "phi-3" in name or "phi3" in name
    for index in range(count):
        kind, token = vocabulary.kinds[index], vocabulary.tokens[index]
        if kind in _ADDED:
            yield {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                # llama.cpp knows these by the model's name: no file says so.
                "rstrip": phi3 and token not in _PADS_BEHIND,
                "normalized": False,
                "special": kind != Kind.USER_DEFINED,
            }


def _beginning(vocabulary: Vocabulary) -> Json | None:
    """What puts a token before each text; None where nothing does. That a text should also end
    with one (`add_eos_token`) means nothing to those who go on with it."""
    if not vocabulary.begins or vocabulary.bos is None:
        return None
    token = vocabulary.tokens[vocabulary.bos]
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    single, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [special, single],
        "pair": [special, single, special, second],
        "special_tokens": {token: {"id": token, "ids": [vocabulary.bos], "tokens": [token]}},
    }


def _model(vocabulary: Vocabulary, ids: dict[str, int], merges: list[list[str]]) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": vocabulary.model == "gpt2" and vocabulary.pre in WHOLE,
        "vocab": ids,
        "merges": merges,
    }


# ---------------------------------------------------------------- BPE on bytes


def _bpe(vocabulary: Vocabulary, ids: dict[str, int]) -> Json:
    if vocabulary.pre not in PATTERNS:
        vocabulary.refuse(
            "pre", f"{vocabulary.pre!r} is not supported (supported: {', '.join(PATTERNS)})"
        )
    splits = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
        for one in PATTERNS[vocabulary.pre]
    ]
    as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, as_bytes | {"use_regex": False}],
        },
        "decoder": as_bytes | {"use_regex": True},
        "model": _model(vocabulary, ids, _stated_merges(vocabulary, ids)),
    }


def _stated_merges(vocabulary: Vocabulary, ids: dict[str, int]) -> list[list[str]]:
    found = vocabulary.file.metadata.get("tokenizer.ggml.merges")
    if found is None and not any(
        kind == Kind.NORMAL and len(token) > 1
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ):
        return []  # writers leave out an empty list
    if not isinstance(found, list):
        vocabulary.refuse("merges", "it is not a list of texts")
    merges = []
    for merge in found:
        one, _, other = str(merge)[1:].partition(" ")
        pair = [str(merge)[:1] + one, other]
        if not other or any(part not in ids for part in (*pair, "".join(pair))):
            vocabulary.refuse("merges", f"{merge!r} are not two tokens that make a third")
        merges.append(pair)
    return merges


# ---------------------------------------------------------------- SentencePiece


def _spm(vocabulary: Vocabulary, ids: dict[str, int]) -> Json:
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = [{"type": "Prepend", "prepend": SPACE}] if vocabulary.space_prefix else []
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    fallback = all(f"<0x{byte:02X}>" in ids for byte in range(256))
    unknown = None if vocabulary.unknown is None else vocabulary.tokens[vocabulary.unknown]
    merges = _merges_by_score(vocabulary, ids)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, to_space]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([strip] if prefix else []),
            ],
        },
        "model": _model(vocabulary, ids, merges)
        | {"byte_fallback": fallback, "unk_token": unknown, "fuse_unk": True},
    }


def _merges_by_score(vocabulary: Vocabulary, ids: dict[str, int]) -> list[list[str]]:
    """Every two tokens that make a third, those that make one of a high score first.

    SentencePiece merges wherever the best token comes about, the leftmost first. Where tokens of
    one score compete (runs of spaces), the longer one is preferred: what was begun leftmost grows.
    """
    merged = {
        token: index
        for token, index in ids.items()
        if vocabulary.kinds[index] in (Kind.NORMAL, Kind.USER_DEFINED)
    }
    longest = max(merged, key=len, default="")
    if len(longest) > _LONGEST:
        vocabulary.refuse(
            "tokens",
            f"{longest[:20]!r}... has {len(longest)} characters; up to {_LONGEST} are supported",
        )
    scores = vocabulary.scores
    _check_scores(vocabulary, [scores[index] for token, index in merged.items() if len(token) > 1])
    found = []
    for token, index in merged.items():
        for cut in range(1, len(token)):
            one, other = token[:cut], token[cut:]
            if one in merged and other in merged:
                found.append((-scores[index], -len(token), merged[one], merged[other], one, other))
    found.sort()
    return [[one, other] for *_, one, other in found]


def _check_scores(vocabulary: Vocabulary, scores: list[float]) -> None:
    """Refuse scores that most tokens have in common: they do not say what is merged first."""
    alike = Counter(scores).most_common(1)
    if alike and alike[0][1] > len(scores) // 2 and len(scores) > 2:
        vocabulary.refuse(
            "scores",
            f"{alike[0][1]} tokens have the same one, {alike[0][0]:g}, so that nobody knows which "
            "are merged first; take a file that was converted from the model's tokenizer.model",
        )
