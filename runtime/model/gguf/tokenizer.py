"""Make `tokenizer.json` and `tokenizer_config.json` of a GGUF file's tokenizer.

All users of a tokenizer then work as with a model folder. Unused special tokens at the end of the
vocabulary, with which files fill it up, are left out.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import repeat
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rootlace.runtime.model.families.config_reader import names
from rootlace.runtime.model.gguf.file import GgufFile, Texts
from rootlace.wire.errors import UnsupportedModel

# Vocabulary ---------------------------------------------------------------------------------------
#
# Read the tokens of a GGUF file, their kinds, and the tokens that begin and end a text.


MODELS = ("llama", "gpt2")
"""Supported kinds: SentencePiece's merges by score, and BPE on bytes."""

ENDS = names(
    """
    <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|>
    <|tool_response> <|endoftext|> <|end_of_text|> <end_of_turn> <end_of_utterance> <turn|>
    <eos> <EOT> _<EOT> [EOT] [EOS] [e~[ <｜end▁of▁sentence｜>
    """
)
"""Tokens that end a text or a turn in any model: files name at most one. llama.cpp, too, ends texts
with them, and counts them as special whatever the file says."""

_FILLING_ENDS = frozenset(
    (
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<fim-repo>", "<REPO>", "<|repo_name|>", "<reponame>"),
        "<|file_sep|>",
    )
)
"""Tokens that follow a code model's filled-in text: padding, another repository or file. Prompts
contain them, too, so they are special only if the file says so."""

_CLOSING_TAG = "</s>"
"""Token that ends a text if special; otherwise a tag of HTML. (In llama.cpp the token ends the
texts of all models but Gemma 4 and PLaMo.)"""

_KNOWN_ENDS = ENDS | _FILLING_ENDS | {_CLOSING_TAG}

BEGINNING = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")
"""Pre-tokenizers whose texts begin with a token unless the file states otherwise."""


_MARKER = re.compile(r"<(?!0x)[^<>\s]+>|\[[A-Z_/]+\]")
"""Form of the markers of turns and tools."""


class Kind(IntEnum):
    """Kinds of tokens, by GGUF's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Vocabulary(msgspec.Struct, frozen=True):
    """Vocabulary of a tokenizer. `metadata`: of the GGUF file `path`. `kinds` and `scores` are as
    many as `tokens`; scores of `gpt2` mean nothing. `bos` begins a text if `begins`; `ends` end it.
    `remarks`: notes for the server's operator."""

    path: Path
    metadata: Mapping[str, Any]
    model: str
    pre: str
    tokens: list[str]
    kinds: Sequence[int]
    scores: Sequence[float]
    bos: int | None
    eos: int | None
    unknown: int | None
    ends: tuple[int, ...]
    begins: bool
    space_prefix: bool
    remarks: tuple[str, ...] = ()

    @classmethod
    def read(cls, file: GgufFile) -> Vocabulary:
        """Read a file's vocabulary. Raises `UnsupportedModel`, naming the key, if the vocabulary is
        damaged or of an unknown kind."""
        keys = _Keys(file.path, file.metadata)
        model = keys("model", str)
        if model not in MODELS:
            keys.refuse("model", f"{model!r} is not supported (supported: {', '.join(MODELS)})")
        pre = keys("pre", str, None)
        if pre is None and model == "gpt2":
            keys.refuse(
                "pre",
                "it is missing: an old file, of which nobody knows how it splits text; "
                "take one that was converted since",
            )
        tokens = _tokens(keys)
        kinds = keys.numbers("token_type", len(tokens), array("i", [Kind.NORMAL]) * len(tokens))
        scores = keys.numbers("scores", len(tokens), array("f", [0.0]) * len(tokens))
        spm = model == "llama"
        default = (1, 2, 0) if spm else (None, None, None)
        names = ("bos_token_id", "eos_token_id", "unknown_token_id")
        bos, eos, unknown = (
            keys.token(name, len(tokens), value) for name, value in zip(names, default, strict=True)
        )
        others = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        named = [eos, *(keys.token(f"{name}_token_id", len(tokens)) for name in others)]
        ends = _ends(tokens, kinds, [index for index in named if index is not None])
        kinds = [*kinds]
        for index in ends:
            if tokens[index] in ENDS and kinds[index] != Kind.UNUSED:
                kinds[index] = Kind.CONTROL
        if "tokenizer.ggml.token_type" not in file.metadata:
            keys.remarks += _markers(file.metadata, tokens, kinds)
        begins = keys("add_bos_token", bool, spm or pre in BEGINNING)
        if begins and bos is None:
            keys.refuse("add_bos_token", "there is no bos_token_id")
        return cls(
            file.path,
            file.metadata,
            model,
            pre or "default",
            tokens,
            kinds,
            scores,
            bos,
            eos,
            unknown,
            ends,
            begins,
            keys("add_space_prefix", bool, spm),
            tuple(keys.remarks),
        )

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise `UnsupportedModel` about a key of the tokenizer."""
        _Keys(self.path, self.metadata).refuse(key, why)


class _Keys:
    """Reader of the keys `tokenizer.ggml.*`."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path, self._metadata = path, metadata
        self.remarks: list[str] = []

    def __call__(self, key: str, kind: type, default: Any = ...) -> Any:
        found = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if found is ...:
            self.refuse(key, "it is missing")
        if isinstance(found, Texts):
            found = found.tolist()
        if found is not default and type(found) is not kind:
            self.refuse(key, f"it is not of type {kind.__name__}")
        return found

    def numbers(self, key: str, count: int, default: Sequence[Any]) -> Sequence[Any]:
        found: Sequence[Any] = self(key, array, default)
        if len(found) != count:
            self.refuse(key, f"there are {len(found)} for {count} tokens")
        return found

    def token(self, key: str, count: int, default: int | None = None) -> int | None:
        """Return a token's id; None without one. An id beyond the tokens counts as none, as in
        llama.cpp: for example 2^32 - 1, which converters made of -1."""
        found: int | None = self(key, int, default)
        if found is not None and not 0 <= found < count:
            self.remarks.append(
                f"tokenizer.ggml.{key} {found} is passed over: it is not among {count} tokens"
            )
            found = default if default is not None and default < count else None
        return found

    def refuse(self, key: str, why: str) -> NoReturn:
        raise UnsupportedModel(f"{self._path}: tokenizer.ggml.{key}: {why}")


def _markers(metadata: Mapping[str, Any], tokens: list[str], kinds: Sequence[int]) -> list[str]:
    """Make a remark on markers in a file that does not say which tokens are special; empty without
    markers."""
    marks = [
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == Kind.NORMAL and _MARKER.fullmatch(token)
    ]
    template = str(metadata.get("tokenizer.chat_template", ""))
    marks = [token for token in marks if token in template] or marks
    shown = f"{', '.join(marks[:4])}{' ...' if marks[4:] else ''}"
    steps = (
        "tokenizer.ggml.token_type is missing: no token is known to be special but those that end "
        f"a text by their names. Markers ({len(marks)}: {shown}) are read as text, cut into other "
        "tokens than the model was trained with: chats may go wrong. Take a file that was "
        "converted since"
    )
    return [steps] if marks else []


def _ends(tokens: list[str], kinds: Sequence[int], named: list[int]) -> tuple[int, ...]:
    """Return the tokens that end a text: named by the file, or known by their names."""
    known = sorted(tokens.index(token) for token in _KNOWN_ENDS.intersection(tokens))
    found = [i for i in known if tokens[i] != _CLOSING_TAG or kinds[i] == Kind.CONTROL]
    ends = dict.fromkeys(named + found)
    names = {tokens[index] for index in ends}
    dropped = set()
    if not names.isdisjoint(("<|call|>", "<|calls|>")) and (
        not names.isdisjoint(("<|return|>", "<|flush|>"))
    ):
        dropped.add("<|end|>")  # in Harmony `<|end|>` ends a message, not a turn
    if "<|tool_response>" in names:
        dropped.add(_CLOSING_TAG)
    return tuple(index for index in ends if tokens[index] not in dropped)


def _tokens(keys: _Keys) -> list[str]:
    found = keys("tokens", list)
    # llama.cpp's names for empty tokens: no two tokens may be equal.
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(found)]
    if {*map(type, found)} != {str}:
        keys.refuse("tokens", "it is not a list of texts")
    if len(set(tokens)) < len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        keys.refuse("tokens", f"{twice!r} is there twice")
    return tokens


# Pretokenizers ------------------------------------------------------------------------------------
#
# Split a text before BPE merges, as llama.cpp does for GGUF files.
#
# The first pattern splits a text into matches and the parts between; the next pattern splits each
# of these, and so on. If a pattern of llama.cpp deviates from the original tokenizer, llama.cpp's
# pattern counts. Text is not normalised, as in llama.cpp.


_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"


def _words(digits: str) -> str:
    """Build a pattern: words with a sign before, numbers of `digits`, runs of signs, spaces."""
    return (
        rf"(?:{_ANY_CASE})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased(ending: str, digits: str) -> str:
    """Build a pattern of words, cut where an upper-case letter follows a lower-case one."""
    large, small = r"(?=\p{L})[^a-z]", r"(?=\p{L})[^A-Z]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}(?:{large})*(?:{small})+{ending}|{before}(?:{large})+(?:{small})*{ending}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3, _QWEN2 = _words("{1,3}"), _words("")
_GPT4O = _cased(rf"(?:{_ANY_CASE})?", "{1,3}")
_DIGITS = r"\p{N}"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)

PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "a.x-4.0", "mellum", "gigachat"),
        (_GPT2,),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (_DIGITS, _GPT2),
    ),
    **dict.fromkeys(
        names("llama3 llama-v3 llama-bpe falcon3 pixtral lfm2 dbrx smaug-bpe chatglm-bpe glm4"),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "stablelm2", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "kanana2"), (_GPT4O,)),
    "tekken": (_cased("", ""),),
    "seed-coder": (
        rf"(?:{_ANY_CASE})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
        rf"|{_SPACES}",
    ),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-\ud7ff]+",
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", _DIGITS),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""Patterns by `tokenizer.ggml.pre`."""

WHOLE = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken", "glm4")
)
"""Pre-tokenizers that keep a piece whole where the piece is a token, whatever the merges."""


# Tokenizer ----------------------------------------------------------------------------------------


SPACE = "\u2581"
"""SentencePiece's character for a space."""
_ADDED = (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED, Kind.UNUSED)
"""Kinds of tokens that are found in a text before it is split."""
_LONGEST = 512
"""Most characters of a merged token: every place to cut it is tried, in time that grows with the
square of its length."""
_PADS_BEHIND = ("<unk>", "<s>", "<|endoftext|>")

TEMPLATE = "tokenizer.chat_template"

Json = dict[str, Any]


def tokenizer_json(vocabulary: Vocabulary) -> str:
    """Return `tokenizer.json`. Raises `UnsupportedModel` if it cannot be built as in llama.cpp."""
    tokens = vocabulary.tokens[: _used(vocabulary)]
    ids = {token: index for index, token in enumerate(tokens)}
    parts = _spm(vocabulary, ids) if vocabulary.model == "llama" else _bpe(vocabulary, ids)
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(vocabulary, len(tokens))),
        "post_processor": _beginning(vocabulary),
        **parts,
    }
    return msgspec.json.encode(whole).decode()


def tokenizer_config(vocabulary: Vocabulary) -> Json:
    """Return the special tokens that chat templates and the end of a text need."""
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
    """Return chat templates in Jinja by name; the one without a name is "default"."""
    found: dict[str, str] = {}
    for key, value in file.metadata.items():
        if key != TEMPLATE and not key.startswith(f"{TEMPLATE}."):
            continue
        if not isinstance(value, str):
            raise UnsupportedModel(f"{file.path}: {key} is not a text")
        found[key.removeprefix(TEMPLATE).removeprefix(".") or "default"] = value
    return found


def _used(vocabulary: Vocabulary) -> int:
    """Count the tokens without the unused ones at the end."""
    count = len(vocabulary.tokens)
    while count and vocabulary.kinds[count - 1] == Kind.UNUSED:
        count -= 1
    return count


def _added(vocabulary: Vocabulary, count: int) -> Iterator[Json]:
    name = str(vocabulary.metadata.get("general.name", "")).lower()
    phi3 = "phi-3" in name or "phi3" in name
    for index in range(count):
        kind, token = vocabulary.kinds[index], vocabulary.tokens[index]
        if kind in _ADDED:
            yield {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                # llama.cpp decides by the model's name: no file states it.
                "rstrip": phi3 and token not in _PADS_BEHIND,
                "normalized": False,
                "special": kind != Kind.USER_DEFINED,
            }


def _beginning(vocabulary: Vocabulary) -> Json | None:
    """Return the post-processor that puts a token before each text; None if there is none. An end
    token (`add_eos_token`) is not added: a prompt is to be continued."""
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


def _model(
    vocabulary: Vocabulary, ids: dict[str, int], merges: list[list[str]] | list[str]
) -> Json:
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


def _stated_merges(vocabulary: Vocabulary, ids: dict[str, int]) -> list[list[str]] | list[str]:
    """Return merges as pairs, or as the file's own texts if no token contains a space: texts are
    read in two thirds of the time."""
    found = vocabulary.metadata.get("tokenizer.ggml.merges")
    if found is None and not any(
        kind == Kind.NORMAL and len(token) > 1
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ):
        return []  # writers leave out an empty list
    if isinstance(found, Texts):
        found = found.tolist()
    if not isinstance(found, list):
        vocabulary.refuse("merges", "it is not a list of texts")
    if {*map(type, found)} == {str} and _joins_tokens(found, ids):
        return found
    merges = []
    for merge in found:
        # The first token may be a space, the second never.
        at = merge.find(" ", 1) if type(merge) is str else -1
        pair = [merge[:at], merge[at + 1 :]] if at > 0 else ["", ""]
        if not (pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids):
            vocabulary.refuse("merges", f"{merge!r} are not two tokens that make a third")
        merges.append(pair)
    return merges


def _joins_tokens(merges: list[str], ids: dict[str, int]) -> bool:
    """Tell whether each merge has one space, between two tokens that make a third."""
    tokens = " ".join(merges).split(" ")
    firsts, seconds = tokens[::2], tokens[1::2]
    return (
        len(tokens) == 2 * len(merges)
        and all(map(str.__contains__, merges, repeat(" ")))
        and ids.keys() >= {*tokens}
        and ids.keys() >= {*map(str.__add__, firsts, seconds)}
    )


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
    """Return all pairs of tokens that make a third, sorted by the third's score, highest first.

    SentencePiece merges the best token wherever possible, the leftmost first. Among tokens of equal
    scores (runs of spaces), the longer one is preferred: so the leftmost run grows.
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
    """Refuse scores that most tokens have in common: they do not order the merges."""
    alike = Counter(scores).most_common(1)
    if alike and alike[0][1] > len(scores) // 2 and len(scores) > 2:
        vocabulary.refuse(
            "scores",
            f"{alike[0][1]} tokens have the same one, {alike[0][0]:g}, so that nobody knows which "
            "are merged first; take a file that was converted from the model's tokenizer.model",
        )
